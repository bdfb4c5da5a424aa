"""A set whose data is a recall probe, from its TOML to its table."""

from __future__ import annotations

import csv
import json

import pytest
from test_curves import PROBE
from tiny_ablation import ablation, base, group

from openk3.train.ablation.runner import Workers
from openk3.train.ablation.study import study


class Quiet:
    """Implements `RunsProgress`, and remembers failures."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    def begins(self, runs, finished) -> None:
        pass

    def advanced(self, run, step) -> None:
        pass

    def finished(self, run) -> None:
        pass

    def failed(self, run, reason) -> None:
        self.failures.append(reason)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    data = {**PROBE, "measured": [16, 64], "measured_sequences": 10}
    a = ablation(group(equal=["tokens"]), base={**base(), "data": data}, seeds=[3])
    quiet = Quiet()
    finished = study(
        a, tmp_path_factory.mktemp("study") / "out", Workers(2, 1), progress=quiet,
        preparing=lambda *_: None, announce=lambda _: None,
    )  # fmt: skip
    assert not quiet.failures
    return finished


def test_the_answers_of_every_run_stand_in_the_tables(done):
    counted = {}
    for path in sorted((done.folder / "runs").glob("*/probe.json")):
        recalled = json.loads(path.read_text())["recalled"]
        counted[path.parent.name] = {row["length"]: row["accuracy"] for row in recalled}
    rows = list(csv.DictReader((done.folder / "results.csv").open()))
    assert [row["variant"] for row in rows] == ["block", "none"]
    for row in rows:
        shares = {n: float(row[f"accuracy at {n}"]) for n in (16, 64)}
        assert shares == counted[row["folder"]]
    assert len(counted) == 2
    table = done.table.read_text()
    assert "% right at 16" in table
    assert "% right at 64" in table


def test_a_group_of_probes_is_drawn(done):
    assert (done.folder / "group-depth.png").read_bytes().startswith(b"\x89PNG")
