"""`config.json` of a released checkpoint to `ModelConfig`.

Two forms: Kimi K3 (`kimi_k3`, the text model under `text_config`) and Kimi-Linear (`kimi_linear`, flat). The
released classes have defaults that differ from the released values, so a field that decides a shape or a
formula must be present. What our config says and theirs has no field for (how routers are balanced, say)
stands in a table `openk3`, which other readers ignore.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openk3.config import ModelConfig, parse
from openk3.errors import CheckpointError, InvalidInput

FILE_NAME = "config.json"
MOST_BYTES = 64 * 2**20
OURS = "openk3"
"""The table for what the released form has no field for."""
UNNAMED = (
    "moe.balancing",
    "moe.qb_bins",
    "moe.qb_ema",
    "moe.sign_step",
    "mla.latent_norm_eps",
    "attn_res.block_size",
    "kda.gate_lower_bound",
    "activation.gate_cap",
    "activation.up_cap",
)
"""Fields that the table may hold: training's, and those that do nothing under the kind in use."""
PACKED = "mxfp4-pack-quantized"
"""The released format of routed experts."""

# What this model cannot do otherwise, by field: any other value would be computed wrongly, so it is refused.
_FIXED: dict[str, tuple[Any, ...]] = {
    "mla_use_nope": (True,),
    "moe_layer_freq": (1,),
    "moe_router_activation_func": ("sigmoid",),
    "num_expert_group": (1, None),
    "topk_group": (1, None),
    "topk_method": ("noaux_tc", None),
    "rope_scaling": (None,),
    "attention_bias": (False, None),
}


def read_config(folder: Path) -> dict[str, Any]:
    """The table in `folder`'s `config.json`.

    Raises:
        CheckpointError: there is none, or it is no JSON object.
    """
    path = folder / FILE_NAME
    table = read_json(path)
    if not isinstance(table, dict):
        raise CheckpointError(f"{path}: is no JSON object")
    return table


def read_json(path: Path) -> Any:
    """A JSON file of bounded size.

    Raises:
        CheckpointError: it is absent, no file, too large or no JSON; names it.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for its writer
            raise CheckpointError(f"{path}: cannot read: is no file")
        if found.st_size > MOST_BYTES:
            raise CheckpointError(f"{path}: {found.st_size} bytes are too many for such a file")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON that can be read: {error}") from None


def model_config_from(table: Mapping[str, Any], source: str = FILE_NAME) -> ModelConfig:
    """The model that a `config.json` describes.

    Raises:
        CheckpointError: it describes another architecture, lacks a field, or asks for something that this
            model does not have; all of it in one line.
    """
    kind = table.get("model_type")
    if kind == "kimi_k3":
        text, outer = table.get("text_config"), table
    elif kind == "kimi_linear":
        text, outer = table, table
    else:
        raise CheckpointError(f"{source}: model_type {kind!r} is neither 'kimi_k3' nor 'kimi_linear'")
    if not isinstance(text, Mapping):
        raise CheckpointError(f"{source}: text_config is missing")
    try:
        values = _values(text, kind)
        if (vision := outer.get("vision_config")) is not None:
            values["vision"] = _vision_values(_table(vision, "vision_config"))
        if (ours := text.get(OURS)) is not None:
            _add_ours(values, ours)
        return canonical(parse(ModelConfig, values, source))
    except InvalidInput as error:
        raise CheckpointError(str(error)) from None
    except _ConfigError as error:
        raise CheckpointError(f"{source}: {error}") from None


def canonical(config: ModelConfig) -> ModelConfig:
    """`config` with its layer pattern by name where it has one, so that equal models compare equal."""
    by_name = config.model_copy(update={"mla_layers": None})
    return by_name if by_name.mla_layer_numbers == config.mla_layer_numbers else config


def weights_dtype(table: Mapping[str, Any]) -> str:
    """The type that a `config.json` names for the weights: "bfloat16" where it names none."""
    text = table.get("text_config")
    for level in (text if isinstance(text, Mapping) else {}, table):
        for field in ("dtype", "torch_dtype"):
            if level.get(field) is not None:
                return str(level[field])
    return "bfloat16"


_PLAUSIBLE_LAYERS = range(1, 4097)  # those of ModelConfig; lists are made of them before it looks


class _ConfigError(Exception):
    """What is wrong with a table, without its source."""


def _table(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _ConfigError(f"{name} is no table")
    return value


def _values(text: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The text model's fields as those of `ModelConfig`."""
    for field, accepted in _FIXED.items():
        if field in text and not any(text[field] is a or text[field] == a for a in accepted):
            raise _ConfigError(f"{field} is {text[field]!r}; this model has {accepted[0]!r} only")
    need = _Needed(text)
    layers = need("num_hidden_layers")
    linear = text.get("linear_attn_config")
    values: dict[str, Any] = {
        "vocab_size": need("vocab_size"),
        "hidden_size": need("hidden_size"),
        "num_layers": layers,
        "dense_width": need("intermediate_size"),
        "dense_layers": need("first_k_dense_replace"),
        "rms_norm_eps": need("rms_norm_eps"),
        "initializer_range": text.get("initializer_range", 0.02),
        "tie_embeddings": need("tie_word_embeddings"),
        "mtp_layers": need("num_nextn_predict_layers"),
        "max_context": _max_context(text),
        "activation": _activation(text, need),
        "expert_format": _expert_format(text),
        "moe": _moe(text, need, kind),
    }
    block = text.get("attn_res_block_size")
    values["attn_res"] = {"kind": "none"} if block is None else {"kind": "block", "block_size": block}
    values["mla"] = _mla(text, need) if text.get("kv_lora_rank") is not None else None
    need.check()
    if type(layers) is not int or layers not in _PLAUSIBLE_LAYERS:
        raise _ConfigError(f"num_hidden_layers is {layers!r}, must be an integer in 1..4096")
    if linear is None:
        values["mla_layers"] = tuple(range(1, layers + 1))
    else:
        linear = _table(linear, "linear_attn_config")
        values["mla_layers"] = _mla_layers(linear, layers)
        # Without a KDA layer its sizes may be missing.
        values["kda"] = _kda(linear) if linear["kda_layers"] or "num_heads" in linear else None
    return values


class _Needed:
    """Reads fields that must be there, and names all that are not at once."""

    def __init__(self, table: Mapping[str, Any], prefix: str = "") -> None:
        self._table, self._prefix = table, prefix
        self._missing: list[str] = []

    def __call__(self, field: str) -> Any:
        if field not in self._table:
            self._missing.append(self._prefix + field)
        return self._table.get(field)

    def check(self) -> None:
        if self._missing:
            raise _ConfigError(f"missing {', '.join(self._missing)}")


def _max_context(text: Mapping[str, Any]) -> Any:
    for field in ("max_position_embeddings", "model_max_length"):
        if text.get(field) is not None:
            return text[field]
    raise _ConfigError("missing max_position_embeddings (or model_max_length)")


def _activation(text: Mapping[str, Any], need: _Needed) -> dict[str, Any]:
    match need("hidden_act"):
        case "situ":
            if (up := need("activation_situ_linear_beta")) is None:
                raise _ConfigError("activation_situ_linear_beta is null: the unbounded form is not supported")
            return {"kind": "situ", "gate_cap": _cap(need("activation_situ_beta")), "up_cap": _cap(up)}
        case "silu":
            return {"kind": "swiglu"}
        case other:
            raise _ConfigError(f"hidden_act is {other!r}; this model has 'situ' and 'silu'")


def _cap(value: Any) -> Any:
    """The release takes no bound, or 0, as 1."""
    return 1.0 if value is None or (type(value) in (int, float) and value == 0) else value


def _flag(table: Mapping[str, Any], field: str) -> bool:
    """A switch that is off where it is absent or null."""
    value = table.get(field)
    if value is not None and not isinstance(value, bool):
        raise _ConfigError(f"{field} is {value!r}, want true or false")
    return bool(value)


def _expert_format(text: Mapping[str, Any]) -> str:
    quantization = text.get("quantization_config")
    if quantization is None:
        return "bf16"
    form = _table(quantization, "quantization_config").get("format")
    if form != PACKED:
        raise _ConfigError(f"quantization_config.format is {form!r}; {PACKED!r} can be read")
    return "mxfp4"


def _moe(text: Mapping[str, Any], need: _Needed, kind: str) -> dict[str, Any] | None:
    if text.get("num_experts") in (None, 0):
        return None
    chosen = need("num_experts_per_token")
    all_chosen = chosen == text["num_experts"]
    return {
        "num_experts": text["num_experts"],
        "experts_per_token": chosen,
        "num_shared_experts": need("num_shared_experts") or 0,
        "expert_width": need("moe_intermediate_size"),
        "latent_width": text.get("routed_expert_hidden_size"),
        "latent_norm": _flag(text, "latent_moe_use_norm"),
        "renormalize": need("moe_renormalize"),
        "routed_scaling": need("routed_scaling_factor"),
        # How the bias moved in training; no field says it.
        "balancing": "none" if all_chosen else "qb" if kind == "kimi_k3" else "sign",
    }


def _mla_layers(linear: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """The 1-based layers with MLA, from two lists that must divide all layers."""
    full, kda = linear.get("full_attn_layers"), linear.get("kda_layers")
    if not isinstance(full, list) or not isinstance(kda, list):
        raise _ConfigError("linear_attn_config needs the lists full_attn_layers and kda_layers")
    listed = [*full, *kda]
    if not all(type(n) is int for n in listed) or sorted(listed) != list(range(1, layers + 1)):
        raise _ConfigError(f"full_attn_layers and kda_layers do not divide the layers 1..{layers}")
    return tuple(sorted(full))


def _kda(linear: Mapping[str, Any]) -> dict[str, Any]:
    need = _Needed(linear, "linear_attn_config.")
    bound = linear.get("gate_lower_bound")
    values = {
        "num_heads": need("num_heads"),
        "head_dim": need("head_dim"),
        "conv_width": need("short_conv_kernel_size"),
        "output_gate": "full" if _flag(linear, "use_full_rank_gate") else "low_rank",
        "gate": "softplus" if bound is None else "bounded",
    }
    need.check()
    return values if bound is None else values | {"gate_lower_bound": bound}


def _mla(text: Mapping[str, Any], need: _Needed) -> dict[str, Any]:
    heads = need("num_attention_heads")
    if heads is not None and text.get("num_key_value_heads", heads) != heads:
        raise _ConfigError(f"num_key_value_heads is {text['num_key_value_heads']}, heads are {heads}")
    return {
        "num_heads": heads,
        "q_lora_rank": need("q_lora_rank"),
        "kv_lora_rank": text["kv_lora_rank"],
        "qk_nope_head_dim": need("qk_nope_head_dim"),
        "qk_rope_head_dim": need("qk_rope_head_dim"),
        "v_head_dim": need("v_head_dim"),
        "gated": _flag(text, "mla_use_output_gate"),
    }


def _vision_values(table: Mapping[str, Any]) -> dict[str, Any]:
    need = _Needed(table, "vision_config.")
    merge = need("merge_kernel_size")
    if not isinstance(merge, list) or len(merge) != 2 or merge[0] != merge[1]:
        raise _ConfigError(f"vision_config.merge_kernel_size is {merge!r}, want two equal numbers")
    values = {
        "hidden_size": need("vt_hidden_size"),
        "num_layers": need("vt_num_hidden_layers"),
        "num_heads": need("vt_num_attention_heads"),
        "qkv_width": need("qkv_hidden_size"),
        "intermediate_size": need("vt_intermediate_size"),
        "patch_size": need("patch_size"),
        "position_grid": need("init_pos_emb_height"),
        "merge": merge[0],
    }
    need.check()
    return values


def _add_ours(values: dict[str, Any], ours: Any) -> None:
    for name, value in _table(ours, OURS).items():
        if name not in UNNAMED:
            raise _ConfigError(f"{OURS}.{name} is no field that may stand there ({', '.join(UNNAMED)})")
        part, field = name.split(".")
        if not isinstance(values.get(part), dict):
            raise _ConfigError(f"{OURS}.{name} belongs to a part that this model does not have")
        values[part][field] = value
