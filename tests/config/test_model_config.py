"""ModelConfig: what it accepts, what it refuses, and how it says so."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from openk3.config import PRESETS, ModelConfig, digest, parse, preset
from openk3.errors import InvalidInput


def varied(name: str = "nano", **fields) -> dict:
    values = PRESETS[name].model_dump()
    for path, value in fields.items():
        *steps, last = path.split("__")
        target = values
        for step in steps:
            target = target[step]
        target[last] = value
    return values


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_its_own_json(name):
    config = PRESETS[name]
    again = ModelConfig.model_validate(json.loads(config.model_dump_json()))
    assert again == config
    assert digest(again) == digest(config)


def test_the_layer_pattern_is_three_to_one_with_global_attention_last():
    k3 = PRESETS["k3"]
    assert k3.mla_layer_numbers == (*range(4, 93, 4), 93)
    assert sum(not k3.is_mla(i) for i in range(93)) == 69
    assert PRESETS["linear-48b"].mla_layer_numbers == (4, 8, 12, 16, 20, 24, 27)
    assert PRESETS["r1"].mla_layer_numbers == (4, 8, 12)
    assert PRESETS["1b"].mla_layer_numbers == (4, 8, 12, 16)


def test_unknown_fields_are_refused_by_name_at_every_depth():
    with pytest.raises(InvalidInput, match=r"my\.toml: hiden_size: unknown field"):
        parse(ModelConfig, varied() | {"hiden_size": 3}, "my.toml")
    with pytest.raises(InvalidInput, match=r"moe\.num_expert: unknown field"):
        parse(ModelConfig, varied(moe__num_expert=3), "my.toml")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"moe__experts_per_token": 99}, "experts_per_token 99 is more than num_experts 16"),
        ({"moe__experts_per_token": 16}, "balancing 'qb' needs experts_per_token < num_experts"),
        ({"moe__latent_width": None}, "latent_norm needs moe.latent_width"),
        ({"mla_layers": [4, 2]}, "mla_layers must be ascending"),
        ({"mla_layers": [9]}, r"mla_layers must lie in 1\.\.4"),
        ({"mla": None}, r"layers \(4,\) are MLA, so `mla` must be given"),
        ({"kda": None}, "some layers are KDA, so `kda` must be given"),
        ({"moe": None}, "are MoE, so `moe` must be given"),
        ({"dense_layers": 5}, "dense_layers 5 is more than num_layers 4"),
        ({"kda__gate_lower_bound": -6.0}, "kda.gate_lower_bound"),
        ({"kda__gate_lower_bound": 0.0}, "kda.gate_lower_bound"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"activation__kind": "relu"}, "activation.kind"),
    ],
)
def test_impossible_models_are_refused_with_the_reason(fields, message):
    with pytest.raises(InvalidInput, match=message):
        parse(ModelConfig, varied(**fields), "here")


def test_a_config_cannot_be_changed_in_place():
    with pytest.raises(ValidationError, match="frozen"):
        PRESETS["nano"].hidden_size = 5


def test_the_digest_tells_configs_apart():
    assert len({digest(config) for config in PRESETS.values()}) == len(PRESETS)


def test_a_wrong_preset_names_the_nearest():
    with pytest.raises(InvalidInput, match="did you mean 'micro'"):
        preset("mikro")
