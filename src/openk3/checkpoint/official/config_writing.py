"""`ModelConfig` to the `config.json` of a released checkpoint.

Fields that are not known here are kept when a config is written from one that was read, so that what other
tools put there survives. What is written is read back and compared before it leaves this module.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from openk3.checkpoint.official.config_reading import (
    OURS,
    PACKED,
    UNNAMED,
    canonical,
    model_config_from,
    weights_dtype,
)
from openk3.checkpoint.official.layout import is_k3_form
from openk3.config import ModelConfig
from openk3.errors import InvalidInput

CONTROL_TOKENS = 256
"""Ids at the end of a vocabulary that are no text: first [BOS], third <|end_of_msg|>, last [PAD]."""
QUANTIZATION: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "format": PACKED,
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "scale_dtype": "torch.uint8",
                "strategy": "group",
                "symmetric": True,
                "type": "float",
                "zp_dtype": None,
            },
        }
    },
    "format": PACKED,
    "global_compression_ratio": None,
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
"""What the release says of its MXFP4 experts."""


def config_json_of(
    config: ModelConfig, base: Mapping[str, Any] | None = None, *, dtype: str = "bfloat16"
) -> dict[str, Any]:
    """`config` as the table of a `config.json`, in the form that `is_k3_form` says.

    Args:
        base: a table that was read; its fields that are not known here, and its order, are kept. It comes
            back as it is when it already describes `config`.

        dtype: what the file says of the weights' type.

    Raises:
        InvalidInput: the released form has no words for this model.
    """
    config = canonical(config)
    if config.attn_res.kind == "full":
        raise InvalidInput("attn_res.kind 'full' has no released form: blocks there are of whole layers")
    if config.activation.kind == "glu":
        raise InvalidInput("activation.kind 'glu' has no released form")
    if base is not None and model_config_from(base) == config and weights_dtype(base) == dtype:
        return copy.deepcopy(dict(base))
    k3 = is_k3_form(config)
    table: dict[str, Any] = copy.deepcopy(dict(base)) if base is not None else {}
    if base is not None and base.get("model_type") != ("kimi_k3" if k3 else "kimi_linear"):
        raise InvalidInput(f"a {base.get('model_type')} config.json cannot describe a model of another form")
    if k3:
        table |= _outer_fields(config, dtype)
        text = dict(table.get("text_config") or {}) | _text_fields(config, dtype)
        table["text_config"] = text
        if config.vision is not None:
            table["vision_config"] = dict(table.get("vision_config") or {}) | _vision_fields(config)
    else:
        table |= _text_fields(config, dtype)
        text = table
    text.pop("quantization_config", None)
    if config.expert_format == "mxfp4":
        text["quantization_config"] = copy.deepcopy(QUANTIZATION)
    text.pop(OURS, None)
    if ours := dict(_unnamed(config, model_config_from(table))):
        text[OURS] = ours
    assert model_config_from(table) == config, "what is written must read as what was meant"
    return table


def _unnamed(config: ModelConfig, read: ModelConfig) -> Iterator[tuple[str, Any]]:
    """The fields of `UNNAMED` in which `config` differs from what was `read` of its own table."""
    for name in UNNAMED:
        part, field = name.split(".")
        meant, found = getattr(config, part), getattr(read, part)
        if meant is not None and getattr(meant, field) != getattr(found, field):
            yield name, getattr(meant, field)


def _special_ids(config: ModelConfig) -> dict[str, int | None]:
    first = config.vocab_size - CONTROL_TOKENS
    known = first >= 0
    return {
        "bos_token_id": first if known else None,
        "eos_token_id": first + 2 if known else None,
        "pad_token_id": config.vocab_size - 1 if known else None,
    }


def generation_config_of(config: ModelConfig) -> dict[str, Any]:
    """The `generation_config.json`: generation ends at the end of a message."""
    return {name: value for name, value in _special_ids(config).items() if value is not None}


def _outer_fields(config: ModelConfig, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        **_special_ids(config),
        "dtype": dtype,
        "model_type": "kimi_k3",
        "tie_word_embeddings": config.tie_embeddings,
    }


def _text_fields(config: ModelConfig, dtype: str) -> dict[str, Any]:
    k3 = is_k3_form(config)
    mla, moe, act = config.mla, config.moe, config.activation
    fields: dict[str, Any] = {
        "architectures": ["KimiLinearForCausalLM"],
        **_special_ids(config),
        "dtype": dtype,
        "first_k_dense_replace": config.dense_layers,
        "hidden_act": "situ" if act.kind == "situ" else "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": config.initializer_range,
        "intermediate_size": config.dense_width,
        "kv_lora_rank": mla.kv_lora_rank if mla else None,
        "linear_attn_config": _linear_fields(config),
        "mla_use_nope": True,
        ("max_position_embeddings" if k3 else "model_max_length"): config.max_context,
        "model_type": "kimi_linear",
        "moe_intermediate_size": moe.expert_width if moe else None,
        "moe_layer_freq": 1,
        "moe_renormalize": moe.renormalize if moe else True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": mla.num_heads if mla else config.kda.num_heads if config.kda else None,
        "num_expert_group": 1,
        "num_experts": moe.num_experts if moe else None,
        "num_experts_per_token": moe.experts_per_token if moe else None,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": mla.num_heads if mla else config.kda.num_heads if config.kda else None,
        "num_nextn_predict_layers": config.mtp_layers,
        "num_shared_experts": moe.num_shared_experts if moe else None,
        "q_lora_rank": mla.q_lora_rank if mla else None,
        "qk_nope_head_dim": mla.qk_nope_head_dim if mla else None,
        "qk_rope_head_dim": mla.qk_rope_head_dim if mla else None,
        "rms_norm_eps": config.rms_norm_eps,
        "routed_scaling_factor": moe.routed_scaling if moe else 1.0,
        "tie_word_embeddings": config.tie_embeddings,
        "topk_group": 1,
        "use_cache": True,
        "use_grouped_topk": True,
        "v_head_dim": mla.v_head_dim if mla else None,
        "vocab_size": config.vocab_size,
    }
    if not k3:
        # The older class turns rotation off by `mla_use_nope`, and still wants to know these.
        return fields | {
            "head_dim": config.hidden_size // fields["num_attention_heads"],
            "rope_scaling": None,
            "rope_theta": 10000.0,
        }
    return fields | {
        "activation_situ_beta": act.gate_cap if act.kind == "situ" else None,
        "activation_situ_linear_beta": act.up_cap if act.kind == "situ" else None,
        "attn_res_block_size": config.attn_res.block_size if config.attn_res.kind == "block" else None,
        "latent_moe_use_norm": moe.latent_norm if moe else False,
        "mla_use_output_gate": mla.gated if mla else False,
        "routed_expert_hidden_size": moe.latent_width if moe else None,
        "topk_method": "noaux_tc",
    }


def _linear_fields(config: ModelConfig) -> dict[str, Any]:
    """Which layer is of which kind, and the sizes of KDA; readers look for the lists without KDA, too."""
    kda, full = config.kda, list(config.mla_layer_numbers)
    if kda is None:
        return {"full_attn_layers": full, "kda_layers": []}
    fields: dict[str, Any] = {
        "full_attn_layers": full,
        "head_dim": kda.head_dim,
        "kda_layers": [n for n in range(1, config.num_layers + 1) if n not in set(full)],
        "num_heads": kda.num_heads,
        "short_conv_kernel_size": kda.conv_width,
    }
    if kda.gate == "bounded":
        fields["gate_lower_bound"] = kda.gate_lower_bound
    if kda.output_gate == "full":
        fields["use_full_rank_gate"] = True
    return fields


def _vision_fields(config: ModelConfig) -> dict[str, Any]:
    vision = config.vision
    assert vision is not None
    return {
        "init_pos_emb_height": vision.position_grid,
        "init_pos_emb_width": vision.position_grid,
        "merge_kernel_size": [vision.merge, vision.merge],
        "mm_hidden_size": vision.hidden_size,
        "patch_size": vision.patch_size,
        "qkv_hidden_size": vision.qkv_width,
        "text_hidden_size": config.hidden_size,
        "vt_hidden_size": vision.hidden_size,
        "vt_intermediate_size": vision.intermediate_size,
        "vt_num_attention_heads": vision.num_heads,
        "vt_num_hidden_layers": vision.num_layers,
    }
