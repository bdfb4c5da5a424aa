"""The released tensor layout: which tensors a checkpoint of a configuration holds, by name, shape and dtype.

Derived from the model on the meta device by a few renaming rules, not from a list. Reading and writing such
files is not done here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from openk3.config import ModelConfig, VisionConfig
from openk3.model import K3

MX_GROUP = 32
"""Weights that share one E8M0 scale, along the input axis."""
RELEASED_HEADS = 128
"""`A_log` of the K3 release is padded to this many entries with zeros."""

_BYTES = {"BF16": 2, "F32": 4, "U8": 1}


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a checkpoint. `dtype` is a safetensors name."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * _BYTES[self.dtype]


def official_tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of `config`'s checkpoint in the released naming, layer by layer, globals last.

    A model with attention residuals is written as Kimi K3 (`language_model.` prefix), one without as
    Kimi-Linear.
    """
    k3_form = config.attn_res.kind != "none"
    prefix = "language_model." if k3_form else ""
    model = K3(config, device="meta", dtype=torch.bfloat16)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    layered = [name for name in tensors if name.startswith("layers.")]
    for name in [*layered, *(name for name in tensors if name not in set(layered))]:
        tensor = tensors[name]
        if name == "lm_head.weight":
            yield TensorSpec(f"{prefix}{name}", tuple(tensor.shape), _dtype(tensor))
        elif ".experts." in name:
            yield from _experts(f"{prefix}model.{name}", tuple(tensor.shape), config)
        else:
            yield TensorSpec(
                f"{prefix}model.{_renamed(name, config)}", _shape(name, tensor, k3_form), _dtype(tensor)
            )
    if config.vision is not None:
        yield from _vision(config.vision, config.hidden_size)


def _dtype(tensor: torch.Tensor) -> str:
    return "F32" if tensor.dtype == torch.float32 else "BF16"


def _shape(name: str, tensor: torch.Tensor, k3_form: bool) -> tuple[int, ...]:
    if name.endswith(".A_log"):
        heads = tensor.shape[0]
        return (max(heads, RELEASED_HEADS),) if k3_form else (1, 1, heads, 1)
    return tuple(tensor.shape)


def _renamed(name: str, config: ModelConfig) -> str:
    """The MTP layer is stored as the layer after the last."""
    if not name.startswith("mtp."):
        return name
    rest = name.removeprefix("mtp.").removeprefix("layer.")
    rest = "shared_head.norm.weight" if rest == "norm.weight" else rest
    return f"layers.{config.num_layers}.{rest}"


def _experts(name: str, shape: tuple[int, ...], config: ModelConfig) -> Iterator[TensorSpec]:
    """`...experts.w1` `[E, out, in]` as one tensor an expert, packed when the format is MXFP4."""
    stem, matrix = _renamed_stem(name, config).rsplit(".", 1)
    experts, rows, columns = shape
    for e in range(experts):
        at = f"{stem}.{e}.{matrix}"
        if config.expert_format == "mxfp4":
            yield TensorSpec(f"{at}.weight_packed", (rows, columns // 2), "U8")
            yield TensorSpec(f"{at}.weight_scale", (rows, columns // MX_GROUP), "U8")
        else:
            yield TensorSpec(f"{at}.weight", (rows, columns), "BF16")


def _renamed_stem(name: str, config: ModelConfig) -> str:
    head, _, tail = name.partition("model.mtp.")
    return name if not tail else f"{head}model.{_renamed('mtp.' + tail, config)}"


def _vision(vision: VisionConfig, text_width: int) -> Iterator[TensorSpec]:
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
        yield TensorSpec(name, shape, "BF16")
