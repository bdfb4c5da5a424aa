"""Recipes: TOML and command line to a config, and back."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

import pytest

from openk3.config import preset
from openk3.errors import InvalidInput
from openk3.train.config import CorpusData, TrainConfig
from openk3.train.recipes import as_table, as_toml, load_recipe, parse_overrides, read_table, recipe_names

MINIMAL = 'model = "nano"\n[data]\nkind = "corpus"\n[train]\nsteps = 10\n'


@pytest.fixture
def recipe(tmp_path):
    def write(text: str = MINIMAL) -> Path:
        path = tmp_path / "recipe.toml"
        path.write_text(text)
        return path

    return write


def refusal(path: Path | str, overrides: dict[str, str] | None = None) -> str:
    with pytest.raises(InvalidInput) as caught:
        load_recipe(path, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_of_the_package_loads_and_survives_being_written(name, recipe):
    config = load_recipe(name)
    assert load_recipe(recipe(as_toml(config))) == config


def test_a_resolved_recipe_round_trips_where_absent_and_infinite_values_matter(recipe):
    overrides = {
        "model.moe": "none",
        "model.dense_layers": "4",
        "evaluation.every": "none",
        "optim.grad_clip": "inf",
        "data": '{kind = "shards", sources = [{folder = "a b", weight = 2.5}, {folder = "c"}]}',
    }
    config = load_recipe(recipe(), overrides)
    assert config.model.moe is None
    assert config.evaluation.every is None
    assert math.isinf(config.optim.grad_clip)
    text = as_toml(config)
    assert load_recipe(recipe(text)) == config
    assert tomllib.loads(text) == as_table(config)
    model = read_table(type(config.model), as_table(config.model))
    assert type(config.model).model_validate(model) == config.model


def test_fields_from_the_command_line_are_read_as_the_field_types(recipe):
    words = [
        "--optim.lr",
        "2e-3",
        "--train.recompute",
        "--model.moe.num_experts=8",
        "--optim.betas",
        "[0.8, 0.9]",
    ]
    config = load_recipe(recipe(), parse_overrides([*words, "--train.micro-batch-tokens", "1024"]))
    assert config.optim.lr == 2e-3
    assert config.train.recompute is True
    assert config.model.moe.num_experts == 8
    assert config.optim.betas == (0.8, 0.9)
    assert config.train.micro_batch_tokens == 1024


def test_a_preset_with_changes_keeps_everything_else_of_the_preset(recipe):
    text = MINIMAL.replace('model = "nano"', "") + '[model]\npreset = "nano"\n[model.moe]\nnum_experts = 24\n'
    model = load_recipe(recipe(text)).model
    nano = preset("nano")
    assert model == nano.model_copy(update={"moe": nano.moe.model_copy(update={"num_experts": 24})})
    assert TrainConfig(model="nano", data=CorpusData(), train={"steps": 1}).model == nano


def test_steps_and_tokens_replace_each_other_on_the_command_line(recipe):
    config = load_recipe(recipe(), {"train.tokens": "10000"})
    assert config.train.steps is None
    assert config.train.total_steps == math.ceil(10000 / 4096)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (MINIMAL + "contxt = 64\n", "train.contxt; did you mean train.context"),
        (MINIMAL.replace("steps", "step"), "train.step; did you mean train.steps"),
        (MINIMAL + "[optimizer]\nlr = 1\n", "optimizer; did you mean optim"),
        ('model = "nanno"\n[data]\n[train]\nsteps = 1\n', "did you mean 'nano'"),
        (MINIMAL + "tokens = 5\n", "either `steps` or `tokens`"),
        (MINIMAL + "context = 100\n", "micro_batch_tokens 4096 must be a multiple of context 100"),
        (MINIMAL + "context = 4096\n", "train.context 4096 is more than model.max_context 1024"),
        (MINIMAL + "mtp_weight = 0.1\n", "train.mtp_weight"),
        (MINIMAL + '[model]\npreset = "nano"\n', "not TOML"),
        (MINIMAL + "seed = 1.5\n", "train.seed"),
    ],
)
def test_a_wrong_recipe_is_one_line_that_names_file_and_field(text, expected, recipe):
    path = recipe(text)
    message = refusal(path)
    assert str(path) in message
    assert expected in message


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("optim.lrr", "1", "--optim.lrr; did you mean --optim.lr?"),
        ("optm", "1", "--optm; did you mean --optim?"),
        ("optim.lr", "fast", "optim.lr"),
        ("optim.lr", "-1", "optim.lr"),
        ("data", "{kind = ", "not TOML"),
        ("data.kind", "csv", "data"),
    ],
)
def test_a_wrong_field_on_the_command_line_is_named(name, text, expected, recipe):
    assert expected in refusal(recipe(), {name: text})


def test_an_unknown_recipe_lists_what_there_is():
    message = refusal("nanoo")
    assert "did you mean 'nano'" in message
    assert "micro" in message


def test_a_word_without_a_field_is_refused():
    with pytest.raises(InvalidInput, match="'fast' belongs to no field"):
        parse_overrides(["--optim.lr", "1", "fast"])
