"""Sets of ablations: what is planned, and what the numbers are said to mean."""

from __future__ import annotations

import csv
import datetime
import io
import json
import math

import numpy as np
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread
from tiny_ablation import ablation, base, group, planned

from openk3.config import preset
from openk3.errors import InvalidInput
from openk3.model.sizes import count
from openk3.train.ablation.config import load_set, set_names
from openk3.train.ablation.estimate import Pace
from openk3.train.ablation.plan import distinct, entries, trials
from openk3.train.ablation.plot import group_picture
from openk3.train.ablation.results import Result, measured
from openk3.train.ablation.runner import run_folder
from openk3.train.ablation.summary import Choice, Mean, choose, summarise
from openk3.train.ablation.table import csv_text, markdown
from openk3.train.flops import model_flops

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


def test_the_estimate_adds_up_starts_and_steps_over_those_at_a_time():
    runs = planned(ablation())
    pace = Pace(flops_per_second=1e9, overhead=3.0)
    expected = sum(3.0 + run.flops / 1e9 for run in runs)
    assert pace.seconds(runs, 1) == pytest.approx(expected)
    assert pace.seconds(runs, 2) == pytest.approx(expected / 2)
    assert pace.seconds(runs, 99) == pytest.approx(expected / len(runs))


def test_a_model_of_the_larger_set_is_about_twice_nano():
    deeper = load_set("deeper")
    config = deeper.config(deeper.groups[0], deeper.groups[0].baseline, 0).model
    assert 1.7 < count(config).total / count(preset("nano")).total < 2.5
    assert config.num_layers == 8 and config.mla_layer_numbers == (4, 8)


def test_a_date_in_a_set_is_a_wrong_value_of_its_field(tmp_path):
    path = tmp_path / "dated.toml"
    table = ablation(base=base()).model_dump(exclude_none=True)
    path.write_text(tomli_w.dumps(table | {"overrides": {"train": {"steps": datetime.date(1979, 5, 27)}}}))
    with pytest.raises(InvalidInput, match=r"train\.steps"):
        load_set(path)
