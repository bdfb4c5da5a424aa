"""Sets of ablations run: processes, resume, failures, and the command."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tomli_w
import torch
from tiny_ablation import VOCAB, ablation, base, group, planned

from openk3.checkpoint.jsonl import read_jsonl
from openk3.cli.main import main
from openk3.data import load_recipe, prepare
from openk3.train.ablation import runner
from openk3.train.ablation.config import AblationSet
from openk3.train.ablation.plan import entries, first_choices
from openk3.train.ablation.runner import Workers, run_all, run_folder
from openk3.train.ablation.study import study
from openk3.train.loop import run as train
from openk3.train.progress import Silent

WORKERS = Workers(jobs=2, threads=1)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("corpus")
    chance = random.Random(0)
    (folder / "files").mkdir()
    for number in range(8):
        text = " ".join(chance.choice(["let", "x", "=", "y", "+", "one", "\n"]) for _ in range(200))
        (folder / "files" / f"{number}.txt").write_text(text)
    recipe = {
        "name": "words",
        "sources": [{"name": "words", "kind": "tree", "path": "files"}],
        "split": {"validation_share": 0.3},
        "deduplication": {"near": False},
    }
    (folder / "words.toml").write_text(tomli_w.dumps(recipe))
    prepare(load_recipe(folder / "words.toml"), folder / "prepared", tokenizer=VOCAB)
    return str(folder / "prepared")


class Heard:
    """What `run_all` tells, in short."""

    def __init__(self) -> None:
        self.said: list[tuple] = []

    def begins(self, runs, finished):
        self.said.append(("begins", len(runs), len(finished)))

    def advanced(self, run, step):
        pass

    def finished(self, run):
        self.said.append(("finished", run.label))

    def failed(self, run, reason):
        self.said.append(("failed", run.label))


class Interrupted(Silent):
    """Ends a run from outside after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def stepped(self, row):
        if row["step"] == self.step:
            raise KeyboardInterrupt


def wanted(corpus: str) -> AblationSet:
    """Plain residuals, as the better of two candidates; the second gives up when a gradient grows."""
    nervous = {"history": 1, "multiple": 1.0001, "patience": 1}
    candidates = [{"optim": {"lr": 2e-2}}, {"train": {"spike": nervous}}]
    tried = group()["variants"][1] | {"candidates": candidates}
    return ablation(group(variants=[{"name": "block"}, tried]), base=base(corpus), search_seeds=[9])


def done(a: AblationSet, out: Path) -> tuple:
    heard = Heard()
    return heard, study(a, out, WORKERS, progress=heard, preparing=lambda *_: None, announce=lambda _: None)


@pytest.fixture(scope="module")
def studied(corpus, tmp_path_factory):
    """A study whose first compared run was interrupted before it."""
    torch.set_num_threads(1)
    a, out = wanted(corpus), tmp_path_factory.mktemp("study")
    first = entries(a, first_choices(a))[0].run
    with pytest.raises(KeyboardInterrupt):
        train(first.config, run_folder(first, out / "runs"), progress=Interrupted(6))
    return a, out, *done(a, out)


def test_a_study_searches_compares_and_loses_nothing_to_a_failed_run(studied):
    _, out, heard, found = studied
    failed = "search-depth-none-1-seed9"
    assert [s for s in heard.said if s[0] == "failed"] == [("failed", failed)]
    assert list(found.failures) == [failed]
    assert "gradients in a row were spikes" in found.failures[failed]
    assert [(c.chosen, c.scored[1]) for c in found.choices] == [(0, None)]
    assert [(line.variant, line.equal, line.runs) for line in found.lines] == [
        (variant, equal, 2) for equal in ("tokens", "flops") for variant in ("block", "none")
    ]
    written = {path.name for path in out.iterdir()}
    assert {"table.md", "results.csv", "results.json", "group-depth.png", "overview.png", "runs"} <= written
    assert failed in (out / "table.md").read_text()
    assert {run["lr"] for run in last_rows(out, "depth-none-seed")} != {
        run["lr"] for run in last_rows(out, "depth-block")
    }


def last_rows(out: Path, label: str) -> list[dict]:
    return [read_jsonl(path / "metrics.jsonl")[-1] for path in sorted(out.glob(f"runs/{label}*"))]


def test_an_interrupted_run_goes_on_from_its_checkpoint_with_every_step_once(studied):
    a, out, _, _ = studied
    first = entries(a, first_choices(a))[0].run
    folder = run_folder(first, out / "runs")
    assert "going on from the checkpoint of step 4" in (folder / "log.txt").read_text()
    assert [row["step"] for row in read_jsonl(folder / "metrics.jsonl")] == list(range(1, 9))


def test_what_is_reported_is_what_the_runs_wrote(studied):
    _, out, _, found = studied
    record = json.loads((out / "results.json").read_text())
    rows = last_rows(out, "depth-block")
    line = found.lines[0]
    assert line.values["bits_per_byte"].value == statistics.fmean(row["bits_per_byte"] for row in rows)
    assert line.values["tokens"].value == 8 * 64
    assert line.parameters > line.active > 0
    single = next(r for r in record["results"] if r["variant"] == "none" and r["seed"] == 1)
    steps = read_jsonl(out / "runs" / single["folder"] / "metrics.jsonl")
    assert single["measured"]["flops"] == sum(row["flops"] for row in steps)
    assert single["measured"]["seconds"] == pytest.approx(sum(row["step_seconds"] for row in steps))
    assert single["measured"]["spikes"] == 0
    dead = list(steps[-1]["dead_experts"].values())
    assert single["measured"]["dead_experts"] == statistics.fmean(dead)  # a tenth of eight steps is one


def test_planned_flops_are_those_that_runs_count(studied):
    """Up to the attention pairs that document borders take away."""
    a, _, _, found = studied
    run = entries(a, first_choices(a))[0].run
    assert 0.98 * run.flops < found.lines[0].values["flops"].value <= run.flops


def test_a_second_time_nothing_is_run_but_what_failed(studied):
    a, out, _, found = studied
    before = {path: path.read_bytes() for path in out.glob("runs/depth-*/*.*")}
    table = (out / "table.md").read_text()
    heard, again = done(a, out)
    assert heard.said == [("begins", 2, 1), ("failed", "search-depth-none-1-seed9"), ("begins", 4, 4)]
    assert {path: path.read_bytes() for path in out.glob("runs/depth-*/*.*")} == before
    assert again.lines == found.lines
    assert (out / "table.md").read_text() == table


def finished_set(corpus: str, folder: Path) -> str:
    """A set without a search whose runs are those that `wanted` compared."""
    variants = [{"name": "block"}, group()["variants"][1]]
    variants[1]["overrides"]["optim"] = {"lr": 2e-2}
    path = folder / "finished.toml"
    path.write_text(tomli_w.dumps(wanted_table(corpus, variants)))
    return str(path)


def wanted_table(corpus: str, variants: list[dict]) -> dict:
    return {"name": "tiny", "base": base(corpus), "seeds": [0, 1], "groups": [group(variants=variants)]}


def called(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return ended.value.code or 0


def test_the_command_says_in_short_what_the_table_holds(studied, corpus, tmp_path, capsys, monkeypatch):
    _, out, _, found = studied
    assert called("ablate", finished_set(corpus, tmp_path), "--out", str(out), "--jobs", "2") == 0
    printed = capsys.readouterr().out
    assert "4 of 4 runs are finished already" in printed
    block, none = (line for line in found.lines if line.equal == "tokens")
    assert f"  block: {block.values['bits_per_byte'].value:.4f} ± " in printed
    assert f"({none.differences['bits_per_byte'].value:+.4f} ± " in printed
    assert (out / "table.md").read_text().count("| none |") == 1  # equal tokens are equal FLOPs


def test_the_command_names_the_runs_that_failed(corpus, tmp_path, capsys):
    path = tmp_path / "failing.toml"
    nervous = {
        "name": "nervous",
        "overrides": {"train": {"spike": {"history": 1, "multiple": 1.0001, "patience": 1}}},
    }
    path.write_text(tomli_w.dumps(wanted_table(corpus, [{"name": "calm"}, nervous])))
    assert (
        called("ablate", str(path), "--out", str(tmp_path / "out"), "--seeds", "1", "--train.steps", "6") == 2
    )
    captured = capsys.readouterr()
    assert captured.err.startswith(
        "openk3: error: failed runs: 1; the others are in the table. The first, depth-nervous"
    )
    assert "| calm | " in (tmp_path / "out" / "table.md").read_text()


def test_a_dry_run_counts_and_measures_and_leaves_nothing(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert called("ablate", finished_set(corpus, tmp_path), "--dry-run", "--jobs", "1") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "all │ 4 │ │ 2,048 │" in printed
    assert re.search(r"about \d+ minutes at 1 runs at a time of", printed)
    assert [path.name for path in tmp_path.iterdir()] == ["finished.toml"]


def test_finished_runs_leave_no_weights_unless_they_are_asked_for(studied, corpus, tmp_path):
    _, out, _, _ = studied
    assert not list(out.glob("runs/depth-*/checkpoints"))
    run = planned(ablation(base=base(corpus)))[0]
    assert run_all([run], tmp_path, WORKERS, Heard(), keep_checkpoints=True) == {}
    assert list(tmp_path.glob("*/checkpoints/step-00000008"))


def test_no_process_outlives_an_interrupt(corpus, tmp_path, monkeypatch):
    started = []

    class Recorded(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

    class Impatient(Heard):
        def advanced(self, run, step):
            raise KeyboardInterrupt

    monkeypatch.setattr(runner.subprocess, "Popen", Recorded)
    with pytest.raises(KeyboardInterrupt):
        run_all(planned(ablation(base=base(corpus))), tmp_path, WORKERS, Impatient())
    assert [process.returncode for process in started] == [-15, -15]


def has_ended(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux's kernel")
def test_a_run_ends_when_what_started_it_is_killed(corpus, tmp_path):
    """Killed, so that nothing of the parent's own can end the child."""
    runs = planned(ablation(base=base(corpus) | {"train": base()["train"] | {"steps": 100_000}}))
    code = (
        "import pickle, sys\n"
        "from pathlib import Path\n"
        "from openk3.train.ablation.runner import Workers, run_all\n"
        "runs, folder = pickle.load(sys.stdin.buffer)\n"
        "class Told:\n"
        "    def begins(self, *_): pass\n"
        "    def advanced(self, run, step): print(step, flush=True)\n"
        "run_all(runs, folder, Workers(2, 1), Told())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    parent.stdin.write(pickle.dumps((runs[:2], tmp_path)))
    parent.stdin.close()
    while int(parent.stdout.readline()) == 0:  # until both are at work
        pass
    children = [int(p) for p in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()]
    assert len(children) == 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until = time.monotonic() + 60
    while not all(map(has_ended, children)) and time.monotonic() < until:
        time.sleep(0.05)
    left = [child for child in children if not has_ended(child)]
    for child in left:
        os.kill(child, 9)
    assert not left


def test_a_run_whose_parent_has_ended_before_it_could_ask_does_not_start():
    command = [sys.executable, "-m", "openk3.train.ablation.child", str(os.getppid()), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (128 + 15, "")
