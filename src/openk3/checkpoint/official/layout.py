"""The released tensor layout: which tensors a checkpoint of a configuration holds, by name, shape and dtype.

Derived from the model on the meta device by a few renaming rules, not from a list. Each tensor also says
which parameter of our model it is (or is a part of), so that readers and writers need no second table.
Reading and writing such files is not done here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from openk3.checkpoint.official.shard import bytes_of
from openk3.config import ModelConfig, VisionConfig
from openk3.model import K3

MX_GROUP = 32
"""Weights that share one E8M0 scale, along the input axis."""
RELEASED_HEADS = 128
"""`A_log` of the K3 release is padded to this many entries with zeros."""

MODEL_PREFIX = "language_model."
"""Of the text model's tensors in the K3 form."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a checkpoint. `dtype` is a safetensors name.

    Attributes:
        ours: the parameter or buffer of `K3` it belongs to; None for a vision tensor, which passes through.
        expert: its index in a stacked parameter; None when the tensor is the whole.
        layer: 0-based layer, the MTP layer counted behind the last; None for what belongs to none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    ours: str | None = None
    expert: int | None = None
    layer: int | None = None

    @property
    def bytes(self) -> int:
        return bytes_of(self.dtype, self.shape)


def is_k3_form(config: ModelConfig) -> bool:
    """Whether `config` is written as Kimi K3 (`language_model.` prefix); otherwise it is as Kimi-Linear.

    The older form has no word for anything that K3 added.
    """
    kda, mla, moe = config.kda, config.mla, config.moe
    return (
        config.attn_res.kind != "none"
        or config.activation.kind == "situ"
        or config.vision is not None
        or (kda is not None and (kda.gate == "bounded" or kda.output_gate == "full"))
        or (mla is not None and (mla.gated or mla.q_lora_rank is not None))
        or (moe is not None and moe.latent_width is not None)
    )


def official_tensors(config: ModelConfig, *, weights: str = "BF16") -> Iterator[TensorSpec]:
    """Every tensor of `config`'s checkpoint in the released naming, layer by layer, globals last, vision
    behind them.

    Args:
        weights: dtype of what the release stores in BF16: "BF16", or "F32" for weights that are kept whole.
    """
    k3_form = is_k3_form(config)
    prefix = MODEL_PREFIX if k3_form else ""
    model = K3(config, device="meta", dtype=torch.bfloat16)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    layer_of = {ours: _layer(ours, config.num_layers) for ours in tensors}
    layered = sorted(
        (ours for ours in tensors if layer_of[ours] is not None), key=lambda ours: layer_of[ours] or 0
    )
    for ours in [*layered, *(ours for ours in tensors if layer_of[ours] is None)]:
        tensor, layer = tensors[ours], layer_of[ours]
        name = ours if ours == "lm_head.weight" else f"model.{_renamed(ours, config.num_layers)}"
        dtype = "F32" if tensor.dtype == torch.float32 else weights
        if ".experts." in ours:
            for spec in _experts(f"{prefix}{name}", tuple(tensor.shape), config.expert_format, weights):
                yield replace(spec, ours=ours, layer=layer)
        else:
            shape = _shape(ours, tuple(tensor.shape), k3_form)
            yield TensorSpec(f"{prefix}{name}", shape, dtype, ours, layer=layer)
    if config.vision is not None:
        yield from _vision(config.vision, config.hidden_size, weights)


def _layer(ours: str, num_layers: int) -> int | None:
    if ours.startswith("mtp."):
        return num_layers
    return int(ours.split(".")[1]) if ours.startswith("layers.") else None


def _shape(ours: str, shape: tuple[int, ...], k3_form: bool) -> tuple[int, ...]:
    if ours.endswith(".A_log"):
        (heads,) = shape
        return (max(heads, RELEASED_HEADS),) if k3_form else (1, 1, heads, 1)
    return shape


def _renamed(ours: str, num_layers: int) -> str:
    """The MTP layer is stored as the layer after the last."""
    if not ours.startswith("mtp."):
        return ours
    rest = ours.removeprefix("mtp.").removeprefix("layer.")
    rest = "shared_head.norm.weight" if rest == "norm.weight" else rest
    return f"layers.{num_layers}.{rest}"


def _experts(name: str, shape: tuple[int, ...], expert_format: str, weights: str) -> Iterator[TensorSpec]:
    """`...experts.w1` `[E, out, in]` as one tensor an expert, packed when the format is MXFP4."""
    stem, matrix = name.rsplit(".", 1)
    experts, rows, columns = shape
    for e in range(experts):
        at = f"{stem}.{e}.{matrix}"
        if expert_format == "mxfp4":
            yield TensorSpec(f"{at}.weight_packed", (rows, columns // 2), "U8", expert=e)
            yield TensorSpec(f"{at}.weight_scale", (rows, columns // MX_GROUP), "U8", expert=e)
        else:
            yield TensorSpec(f"{at}.weight", (rows, columns), weights, expert=e)


def _vision(vision: VisionConfig, text_width: int, weights: str) -> Iterator[TensorSpec]:
    """MoonViT-V2 and its projector, which pass through a checkpoint untouched."""
    d, q, f, p = vision.hidden_size, vision.qkv_width, vision.intermediate_size, vision.patch_size
    merged = d * vision.merge**2
    shapes: dict[str, tuple[int, ...]] = {
        "mm_projector.proj.0.weight": (merged, merged),
        "mm_projector.proj.2.weight": (text_width, merged),
        "mm_projector.post_norm.weight": (text_width,),
        "vision_tower.patch_embed.proj.weight": (d, 3, p, p),
        "vision_tower.patch_embed.pos_emb.weight": (vision.position_grid, vision.position_grid, d),
        "vision_tower.encoder.final_layernorm.weight": (d,),
    }
    for i in range(vision.num_layers):
        block = f"vision_tower.encoder.blocks.{i}"
        shapes[f"{block}.wqkv.weight"] = (3 * q, d)
        shapes[f"{block}.wo.weight"] = (d, q)
        shapes[f"{block}.mlp.fc0.weight"] = (f, d)
        shapes[f"{block}.mlp.fc1.weight"] = (d, f)
        shapes[f"{block}.norm0.weight"] = (d,)
        shapes[f"{block}.norm1.weight"] = (d,)
    for name, shape in shapes.items():
        yield TensorSpec(name, shape, weights)
