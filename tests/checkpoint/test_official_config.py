"""`config.json`: the released files against our presets, both ways."""

from __future__ import annotations

import copy
import json

import pytest

from checkpoint.released import asset
from model.tiny import VARIANTS, changed
from openk3.checkpoint.official.config_reading import model_config_from, weights_dtype
from openk3.checkpoint.official.config_writing import config_json_of, generation_config_of
from openk3.config import PRESETS, ActivationConfig, ModelConfig
from openk3.errors import CheckpointError, InvalidInput

RELEASED = {"k3": "config.kimi-k3.json", "linear-48b": "config.kimi-linear-48b.json"}
WRITABLE = {
    name: config
    for name, config in {**PRESETS, **VARIANTS}.items()
    if config.attn_res.kind != "full" and config.activation.kind != "glu"
}


def _released(preset: str) -> dict:
    return json.loads(asset(RELEASED[preset]).read_text())


@pytest.mark.parametrize("preset", RELEASED)
def test_the_released_file_describes_the_preset(preset):
    assert model_config_from(_released(preset)) == PRESETS[preset]


@pytest.mark.parametrize("preset", RELEASED)
def test_every_field_we_write_stands_in_the_released_file_byte_for_byte(preset):
    def compare(ours, theirs, path):
        for field, value in ours.items():
            assert field in theirs, f"{path}{field}"
            if isinstance(value, dict) and field != "quantization_config":
                compare(value, theirs[field], f"{path}{field}.")
            else:
                assert json.dumps(value) == json.dumps(theirs[field]), f"{path}{field}"

    compare(config_json_of(PRESETS[preset]), _released(preset), "")


@pytest.mark.parametrize("preset", RELEASED)
def test_a_released_file_written_back_is_the_same_text(preset):
    text = asset(RELEASED[preset]).read_text()
    table = json.loads(text)
    again = config_json_of(model_config_from(table), table)
    assert json.dumps(again, indent=2, ensure_ascii=False) == text.rstrip("\n")


def test_a_change_keeps_the_fields_that_are_not_ours():
    table = _released("k3")
    config = PRESETS["k3"].model_copy(update={"expert_format": "bf16"})
    text = config_json_of(config, table)["text_config"]
    assert "quantization_config" not in text
    assert {**text, "quantization_config": table["text_config"]["quantization_config"]} == table[
        "text_config"
    ]


@pytest.mark.parametrize("name", WRITABLE)
def test_what_is_written_reads_as_what_was_meant(name):
    table = json.loads(json.dumps(config_json_of(WRITABLE[name])))
    read = model_config_from(table)
    assert read.mla_layer_numbers == WRITABLE[name].mla_layer_numbers
    assert read.model_copy(update={"mla_layers": None}) == WRITABLE[name].model_copy(
        update={"mla_layers": None}
    )


def test_a_model_without_kda_or_without_mla_can_be_written():
    plain = {"num_layers": 2, "vocab_size": 300, "hidden_size": 16, "dense_width": 8, "dense_layers": 2}
    mla = PRESETS["nano"].mla
    softmax = ModelConfig(**plain, mla_layers=(1, 2), mla=mla)
    recurrent = ModelConfig(**plain, mla_layers=(), kda=PRESETS["nano"].kda)
    for config in (softmax, recurrent):
        assert model_config_from(config_json_of(config)) == config


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (VARIANTS["full attention residuals"], "full"),
        (changed(activation=ActivationConfig(kind="glu")), "glu"),
    ],
)
def test_a_model_without_a_released_form_is_refused(config, reason):
    with pytest.raises(InvalidInput, match=reason):
        config_json_of(config)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mla_use_nope", False),
        ("moe_layer_freq", 2),
        ("moe_router_activation_func", "softmax"),
        ("num_expert_group", 8),
        ("rope_scaling", {"type": "yarn"}),
        ("hidden_act", "gelu"),
        ("num_key_value_heads", 8),
        ("activation_situ_linear_beta", None),
        ("hidden_size", "wide"),
        ("hidden_size", -1),
        ("hidden_size", True),
        ("rms_norm_eps", float("nan")),
        ("linear_attn_config", [1]),
        ("quantization_config", {"format": "int-quantized"}),
        ("openk3", {"hidden_size": 8}),
        ("openk3", 3),
    ],
)
def test_what_this_model_cannot_do_is_refused_by_name(field, value):
    table = _released("k3")
    table["text_config"][field] = value
    with pytest.raises(CheckpointError, match=field.split("_")[0]):
        model_config_from(table)


NEEDED = [
    "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "first_k_dense_replace",
    "rms_norm_eps", "tie_word_embeddings", "num_nextn_predict_layers", "hidden_act", "activation_situ_beta",
    "num_experts_per_token", "num_shared_experts", "moe_intermediate_size", "moe_renormalize",
    "routed_scaling_factor", "num_attention_heads", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim", "max_position_embeddings",
]  # fmt: skip


@pytest.mark.parametrize("field", NEEDED)
def test_a_missing_field_is_an_error_not_a_default(field):
    table = _released("k3")
    del table["text_config"][field]
    with pytest.raises(CheckpointError, match=field):
        model_config_from(table)


def test_layers_in_neither_or_both_lists_are_refused():
    for change in ([1], [4, 93, 94], list(range(1, 94))):
        table = copy.deepcopy(_released("k3"))
        table["text_config"]["linear_attn_config"]["full_attn_layers"] = change
        with pytest.raises(CheckpointError, match="divide"):
            model_config_from(table)


@pytest.mark.parametrize("layers", [2**70, 2**40, 4097, 0, -1, 93.0, True, "93"])
@pytest.mark.parametrize("hybrid", [True, False])
def test_a_number_of_layers_that_cannot_be_is_refused_before_anything_is_made_of_it(layers, hybrid):
    table = copy.deepcopy(_released("k3"))
    table["text_config"]["num_hidden_layers"] = layers
    if not hybrid:
        del table["text_config"]["linear_attn_config"]
    with pytest.raises(CheckpointError, match="num_hidden_layers"):
        model_config_from(table)


def test_other_models_are_refused():
    for kind in ("deepseek_v3", None, 3):
        with pytest.raises(CheckpointError, match="model_type"):
            model_config_from({"model_type": kind})
    with pytest.raises(CheckpointError, match="text_config"):
        model_config_from({"model_type": "kimi_k3"})


def test_generation_ends_at_the_released_token():
    assert generation_config_of(PRESETS["k3"])["eos_token_id"] == 163586


def test_the_weights_type_is_read_from_either_name():
    assert weights_dtype({"torch_dtype": "float32"}) == "float32"
    assert weights_dtype({"dtype": "bfloat16", "text_config": {"dtype": "float32"}}) == "float32"
    assert weights_dtype({}) == "bfloat16"


@pytest.mark.parametrize(
    "field", ["latent_moe_use_norm", "mla_use_output_gate", "linear_attn_config.use_full_rank_gate"]
)
@pytest.mark.parametrize("value", ["false", 0, 1, [1], float("nan")])
def test_a_switch_is_true_or_false_and_nothing_that_counts_as_it(field, value):
    table = _released("k3")
    *parts, last = field.split(".")
    text = table["text_config"]
    for part in parts:
        text = text[part]
    text[last] = value
    with pytest.raises(CheckpointError, match=f"{last} is .*want true or false"):
        model_config_from(table)


@pytest.mark.parametrize("value", ["", [], {}, False])
@pytest.mark.parametrize("field", ["activation_situ_beta", "activation_situ_linear_beta"])
def test_a_bound_is_a_number_and_nothing_that_is_empty(field, value):
    table = _released("k3")
    table["text_config"][field] = value
    with pytest.raises(CheckpointError, match="cap"):
        model_config_from(table)
    table["text_config"][field] = 0
    config = model_config_from(table).activation
    assert (config.gate_cap if field == "activation_situ_beta" else config.up_cap) == 1.0


def test_without_kda_the_lists_of_layers_are_there_for_readers_that_look_for_them():
    config = ModelConfig(
        vocab_size=300, hidden_size=16, dense_width=8, num_layers=2, dense_layers=2,
        mla_layers=(1, 2), mla=PRESETS["nano"].mla,
    )  # fmt: skip
    table = config_json_of(config)
    assert table["text_config"]["linear_attn_config"] == {"full_attn_layers": [1, 2], "kda_layers": []}
    assert model_config_from(table) == config
    table["text_config"]["linear_attn_config"] = None
    assert model_config_from(table) == config
