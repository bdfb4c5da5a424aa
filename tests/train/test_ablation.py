"""Sets of ablations: what is planned, what is run, and what the numbers are said to mean."""

from __future__ import annotations

import csv
import io
import json
import math
import random
import re
import statistics
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread
from tiny_run import MODEL

from openk3.checkpoint.jsonl import read_jsonl
from openk3.cli.main import main
from openk3.config import preset
from openk3.data import load_recipe, prepare
from openk3.errors import InvalidInput
from openk3.train.ablation import runner
from openk3.train.ablation.config import AblationSet, load_set, set_names
from openk3.train.ablation.estimate import Pace
from openk3.train.ablation.plan import Run, distinct, entries, first_choices, trials
from openk3.train.ablation.plot import group_picture
from openk3.train.ablation.results import Result, measured
from openk3.train.ablation.runner import Workers, run_all, run_folder
from openk3.train.ablation.study import study
from openk3.train.ablation.summary import Choice, Mean, choose, summarise
from openk3.train.ablation.table import csv_text, markdown
from openk3.train.flops import model_flops
from openk3.train.loop import run as train
from openk3.train.progress import Silent

VOCAB = 520
WORKERS = Workers(jobs=2, threads=1)


def base(corpus: str = "nowhere") -> dict:
    return {
        "model": {**MODEL, "vocab_size": VOCAB, "mtp_layers": 0},
        "data": {"kind": "shards", "sources": [{"folder": corpus}]},
        "train": {"steps": 8, "context": 32, "micro_batch_tokens": 64, "device": "cpu"},
        "optim": {"lr": 1e-2},
        "checkpoint": {"every": 4},
        "logging": {"tensorboard": False},
    }


def group(name: str = "depth", **fields) -> dict:
    variants = [{"name": "block"}, {"name": "none", "overrides": {"model": {"attn_res": {"kind": "none"}}}}]
    return {"name": name, "question": "Which one?", "variants": variants, **fields}


def ablation(*groups: dict, **fields) -> AblationSet:
    return AblationSet.model_validate(
        {"name": "tiny", "base": base(), "seeds": [0, 1], "groups": list(groups) or [group()], **fields}
    )


def planned(a: AblationSet) -> list[Run]:
    return [*distinct(trials(a)), *distinct(entries(a, first_choices(a)))]


# What a set is.


def test_a_later_layer_wins_and_a_length_takes_back_the_other():
    variants = [
        {"name": "a"},
        {"name": "b", "overrides": {"optim": {"lr": 3e-2}}, "candidates": [{"optim": {"lr": 4e-2}}]},
    ]
    a = ablation(
        group(overrides={"optim.lr": 2e-2, "train": {"tokens": 640}}, variants=variants),
        overrides={"optim": {"lr": 1e-3, "momentum": 0.5}},
        search_seeds=[5],
    )
    first, second = a.groups[0].variants
    assert a.config(a.groups[0], first, 0).optim.lr == 2e-2
    assert a.config(a.groups[0], second, 0).optim.lr == 3e-2
    config = a.config(a.groups[0], second, 7, candidate=0)
    assert (config.optim.lr, config.optim.momentum, config.train.seed) == (4e-2, 0.5, 7)
    assert (config.train.steps, config.train.tokens) == (10, None)
    assert a.base == base()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": [0, 0]}, "seed 0 stands twice"),
        ({"seeds": []}, "seeds"),
        ({"search_seeds": [1]}, r"\[1\] stand among the seeds"),
        ({"groups": [group(), group()]}, "group depth stands twice"),
        ({"groups": [group(variants=[{"name": "alone"}])]}, "variants"),
        ({"groups": [group(variants=[{"name": "x"}, {"name": "x"}])]}, "variant x stands twice"),
        (
            {"groups": [group(variants=[{"name": "x"}, {"name": "y", "candidates": [{}]}])]},
            "give the search_seeds",
        ),
        (
            {"groups": [group(variants=[{"name": "x"}, {"name": "y", "overrides": {"optim.lrr": 1}}])]},
            "group depth, y: .*unknown field --optim.lrr; did you mean --optim.lr",
        ),
        ({"group": 3}, "group: unknown field"),
        ({"base": "nanoo"}, "did you mean 'nano'"),
    ],
)
def test_a_wrong_set_is_refused_by_name_before_anything_runs(change, message, tmp_path):
    table = {"name": "tiny", "base": base(), "seeds": [0, 1], "groups": [group()], **change}
    (tmp_path / "tiny.toml").write_text(tomli_w.dumps(table))
    with pytest.raises(InvalidInput, match=message):
        load_set(tmp_path / "tiny.toml")


@pytest.mark.parametrize("name", set_names())
def test_every_set_of_the_package_loads_by_name_and_by_path(name):
    by_name = load_set(name)
    assert by_name == load_set(f"recipes/ablations/{name}.toml")
    assert by_name.name == name
    assert len(planned(by_name)) > len(by_name.groups)


def test_the_command_line_changes_base_and_seeds_and_variants_still_win():
    short = load_set("smoke", {"train.tokens": "2048", "optim.lr": "5e-2"}, seeds=3)
    assert short.seeds == (0, 1, 2)
    runs = planned(short)
    assert {r.config.train.total_steps for r in runs if "flops" not in r.label} == {4}
    assert {r.config.optim.lr for r in runs} == {5e-2, 3e-3, 1e-2}
    with pytest.raises(InvalidInput, match="did you mean 'smoke'"):
        load_set("smok")


# What is planned.


def test_the_baseline_of_every_group_is_one_run_for_each_seed():
    other = [{"name": "block"}, {"name": "adamw", "overrides": {"optim": {"optimizer": "adamw"}}}]
    a = ablation(group(), group("optimizer", variants=other))
    places = entries(a, {})
    assert len(places) == 2 * 2 * 2 * 2  # groups, comparisons, variants, seeds
    assert len(distinct(places)) == 3 * 2  # no AttnRes and AdamW change no model FLOPs
    assert {place.run.config.train.seed for place in places if place.seed == 1} == {1}


def test_equal_flops_are_met_to_half_a_step_by_a_count_of_its_own():
    softmax = {"name": "softmax", "overrides": {"model": {"mla_layers": [1, 2]}}}
    wide = {"name": "wide", "overrides": {"model": {"dense_width": 400}, "train": {"context": 64}}}
    long = base() | {"train": {**base()["train"], "steps": 200}}
    a = ablation(group(variants=[{"name": "hybrid"}, softmax, wide]), base=long)

    def flops(config):
        windows = [config.train.context] * (64 // config.train.context)
        return config.train.steps * model_flops(config.model, windows).total

    runs = {(place.variant, place.equal): place.run.config for place in entries(a, {}) if place.seed == 0}
    budget = flops(runs["hybrid", "tokens"])
    assert runs["hybrid", "flops"] == runs["hybrid", "tokens"]
    for variant in ("softmax", "wide"):
        config = runs[variant, "flops"]
        assert runs[variant, "tokens"].train.steps == 200 != config.train.steps
        assert abs(flops(config) - budget) <= flops(config) / config.train.steps / 2
        assert config.schedule == runs[variant, "tokens"].schedule


def test_a_search_tries_every_candidate_with_its_own_seeds_and_the_plan_uses_the_chosen():
    tried = {"name": "adamw", "candidates": [{"optim": {"lr": lr}} for lr in (1e-3, 2e-3, 4e-3)]}
    a = ablation(group(variants=[{"name": "muon"}, tried]), search_seeds=[8, 9])
    searched = trials(a)
    assert {(t.candidate, t.seed) for t in searched} == {(i, s) for i in range(3) for s in (8, 9)}
    assert {t.run.config.optim.lr for t in searched} == {1e-3, 2e-3, 4e-3}
    chosen = [p for p in entries(a, {("depth", "adamw"): 2}) if p.variant == "adamw"]
    assert {p.run.config.optim.lr for p in chosen} == {4e-3}
    assert {p.seed for p in chosen} == {0, 1}
    left = entries(a, {("depth", "adamw"): None})
    assert {p.variant for p in left} == {"muon"}


def test_a_run_keeps_its_folder_when_a_set_changes_around_it(tmp_path):
    before, after = ablation(group("old")), ablation(group("new"), seeds=[1, 2])
    for run in planned(before):
        (tmp_path / f"{run.label}-{run.digest}").mkdir()
    found = [run_folder(run, tmp_path).exists() for run in planned(after)]
    assert [run.config.train.seed for run in planned(after)] == [1, 2, 1, 2]
    assert found == [True, False, True, False]


# What the numbers mean.


def result(variant: str, seed: int, bits: float, equal: str = "tokens", **other: float) -> Result:
    values = {"bits_per_byte": bits, "train_loss": 1.0, **other}
    return Result("depth", variant, equal, seed, f"{variant}{seed}", 2_000_000, 1_000_000, values)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=9))
def test_a_mean_has_the_standard_error_of_its_runs(values):
    mean = Mean.of(values)
    assert mean.value == pytest.approx(np.mean(values), abs=1e-9)
    assert mean.error == pytest.approx(np.std(values, ddof=1) / math.sqrt(len(values)), abs=1e-9)
    assert Mean.of(values[:1]).error is None


def test_differences_are_taken_seed_by_seed():
    """Seeds that move both runs alike leave the difference sharp; a run without its pair is left out."""
    a = ablation(seeds=[0, 1, 2])
    rows = [result("block", s, 3.0 + s) for s in (0, 1, 2)] + [result("none", s, 3.1 + s) for s in (2, 0)]
    block, none = summarise(a, rows)
    assert block.differences == {}
    assert block.values["bits_per_byte"].error == pytest.approx(1 / math.sqrt(3))
    assert none.differences["bits_per_byte"].value == pytest.approx(0.1)
    assert none.differences["bits_per_byte"].error == pytest.approx(0, abs=1e-12)
    assert (none.runs, none.wanted, none.differences["bits_per_byte"].runs) == (2, 3, 2)


def test_the_best_mean_is_chosen_and_a_candidate_with_a_failed_run_never_is():
    tried = {"name": "none", "candidates": [{"optim": {"lr": lr}} for lr in (1e-3, 2e-3, 4e-3)]}
    a = ablation(group(variants=[{"name": "block"}, tried]), search_seeds=[8, 9])
    bits = {0: (2.0, 3.0), 1: (2.4, 2.4), 2: (1.0, None)}
    found = {
        t.run.digest: {"bits_per_byte": value}
        for t in trials(a)
        if (value := bits[t.candidate][t.seed - 8]) is not None
    }
    (choice,) = choose(trials(a), found)
    assert choice == Choice("depth", "none", (2.5, 2.4, None), 1)
    assert not choice.at_the_edge
    (nothing,) = choose(trials(a), {})
    assert nothing.chosen is None


def test_the_table_says_what_was_measured_how_often_and_against_what():
    a = ablation(search_seeds=[9])
    rows = [result("block", 0, 3.0, maxvio=0.5), result("block", 1, 3.2, maxvio=0.7)]
    rows += [result("none", 1, 3.25, maxvio=0.25)]
    text = markdown(a, summarise(a, rows), [], {"depth-none-seed0": "exit code 2"}, {"torch": "2.x"})
    block, none = (
        line.split("|")[1:-1] for line in text.splitlines() if line.startswith(("| block", "| none"))
    )
    assert [cell.strip() for cell in block] == [
        "block", "3.1000 ± 0.1000", "baseline", "1.000", "0.60 ± 0.10", "2.000", "1.000", "2",
    ]  # fmt: skip
    assert [cell.strip() for cell in none] == [
        "none", "3.2500", "+0.0500", "1.000", "0.25", "2.000", "1.000", "1 of 2",
    ]  # fmt: skip
    assert "- depth-none-seed0: exit code 2" in text
    both = rows + [result(r.variant, r.seed, r.measured["bits_per_byte"], "flops", maxvio=0.5) for r in rows]
    assert "which are equal training FLOPs here" in markdown(a, summarise(a, both), [], {}, {})


def test_csv_has_a_line_for_each_run_in_each_place():
    rows = [result("block", 0, 3.0), result("none, plain", 1, 3.25, maxvio=0.25)]
    first, second = csv.DictReader(io.StringIO(csv_text(rows)))
    assert (first["bits_per_byte"], first["maxvio"]) == ("3.0", "")
    assert (second["variant"], second["maxvio"], second["seed"]) == ("none, plain", "0.25", "1")


def test_a_picture_moves_with_the_numbers():
    a = ablation()
    pictures = []
    for bits in (3.1, 3.5):
        rows = [result("block", s, 3.0 + s / 10) for s in (0, 1)] + [result("none", s, bits) for s in (0, 1)]
        png = group_picture(a, a.groups[0], summarise(a, rows), rows)
        pictures.append(imread(io.BytesIO(png)))
    assert pictures[0].shape == pictures[1].shape
    assert (pictures[0] != pictures[1]).any()


# What is run.


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


def test_the_end_of_a_run_is_a_mean_over_its_last_tenth(tmp_path):
    rows = [
        {"step": s, "loss": float(s), "skipped": s % 7 == 0, "tokens": s, "flops": 10, "step_seconds": 0.5}
        | {"maxvio": {"1": s, "2": 3 * s}, "dead_experts": {"1": 0.0, "2": 0.5}}
        for s in range(1, 31)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    values = measured(planned(ablation())[0], tmp_path)
    assert values["train_loss"] == 29
    assert values["maxvio"] == 58
    assert values["dead_experts"] == 0.25
    assert (values["spikes"], values["flops"], values["seconds"]) == (4, 300, 15)


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


def test_the_estimate_adds_up_starts_and_steps_over_those_at_a_time():
    runs = planned(ablation())
    pace = Pace(flops_per_second=1e9, overhead=3.0)
    expected = sum(3.0 + run.flops / 1e9 for run in runs)
    assert pace.seconds(runs, 1) == pytest.approx(expected)
    assert pace.seconds(runs, 2) == pytest.approx(expected / 2)
    assert pace.seconds(runs, 99) == pytest.approx(expected / len(runs))


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


def test_a_model_of_the_larger_set_is_about_twice_nano():
    from openk3.model.sizes import count

    deeper = load_set("deeper")
    config = deeper.config(deeper.groups[0], deeper.groups[0].baseline, 0).model
    assert 1.7 < count(config).total / count(preset("nano")).total < 2.5
    assert config.num_layers == 8 and config.mla_layer_numbers == (4, 8)
