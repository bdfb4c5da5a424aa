"""Which parameter is trained how: one table, read top to bottom (report §2.5, §3.3).

Every trained parameter must match exactly one row; none or two is an error that names it. Knows the names
of our state dict and the sizes of heads, nothing about gradients. The router's balance bias is a buffer and
never comes here.

The report splits the Q, K, V projections by head and says nothing of the others. For those we read as other
public ports do: gates by head (a flag undoes it), one matrix per expert, latent and shared projections and
the router whole; AdamW for tables, vectors, and projections whose rows are one number per head. What pulls
a value towards zero must mean "simpler": so no decay where zero is just a value or switches a channel off.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch

from openk3.config import MlaConfig, ModelConfig
from openk3.errors import InvalidInput
from openk3.optim.config import OptimConfig

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Split:
    """A parameter's rows as `groups` equal groups, and each group's rows as bands of the given heights."""

    groups: int
    bands: tuple[int, ...]

    @property
    def rows(self) -> int:
        return self.groups * sum(self.bands)

    def blocks(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views `[groups, band, columns]`, one per band, of a contiguous tensor in the parameter's shape."""
        return torch.split(x.view(self.groups, sum(self.bands), x.shape[-1]), list(self.bands), dim=1)


def _whole(shape: Shape, config: ModelConfig) -> Split:
    return Split(1, (math.prod(shape[:-1]),))


def _experts(shape: Shape, config: ModelConfig) -> Split:
    return Split(shape[0], shape[1:-1])


def _kda_heads(shape: Shape, config: ModelConfig) -> Split:
    assert config.kda is not None  # ModelConfig has checked: it holds what its layers need
    return Split(config.kda.num_heads, (config.kda.head_dim,))


def _mla(config: ModelConfig) -> MlaConfig:
    assert config.mla is not None
    return config.mla


def _mla_queries(shape: Shape, config: ModelConfig) -> Split:
    mla = _mla(config)
    return Split(mla.num_heads, (mla.qk_head_dim,))


def _mla_keys_values(shape: Shape, config: ModelConfig) -> Split:
    mla = _mla(config)
    return Split(mla.num_heads, (mla.qk_nope_head_dim, mla.v_head_dim))


def _mla_values(shape: Shape, config: ModelConfig) -> Split:
    mla = _mla(config)
    return Split(mla.num_heads, (mla.v_head_dim,))


@dataclass(frozen=True)
class Rule:
    """One row of the table."""

    pattern: str
    """A glob over the name inside the layer, where `self_attn` reads `kda` or `mla`."""
    kind: Literal["matrix", "embedding", "vector"]
    """matrix: Muon. embedding, vector: AdamW, each with its learning-rate scale."""
    why: str
    split: Callable[[Shape, ModelConfig], Split] = _whole
    decays: bool = True
    flag: Literal["per_head", "per_head_gates"] | None = None
    """The flag that must be on for `split`; a gate's needs `per_head` as well."""


def _matrix(pattern: str, why: str, split: Callable[[Shape, ModelConfig], Split] = _whole) -> Rule:
    return Rule(pattern, "matrix", why, split)


def _heads(pattern: str, split: Callable[[Shape, ModelConfig], Split], why: str) -> Rule:
    return Rule(pattern, "matrix", why, split, flag="per_head")


def _gate(pattern: str, split: Callable[[Shape, ModelConfig], Split], why: str) -> Rule:
    return Rule(pattern, "matrix", why, split, flag="per_head_gates")


def _vector(pattern: str, why: str, decays: bool = False) -> Rule:
    return Rule(pattern, "vector", why, decays=decays)


RULES: tuple[Rule, ...] = (
    Rule("embed_tokens.weight", "embedding", "a table: rows are looked up, each for its own token"),
    Rule("lm_head.weight", "embedding", "a table as well: one row per token"),
    # Attention: queries, keys and values, head by head.
    _heads("kda.[qkv]_proj.weight", _kda_heads, "report §2.5"),
    _heads("mla.q_proj.weight", _mla_queries, "report §2.5; own and shared dims together make a query"),
    _heads("mla.q_b_proj.weight", _mla_queries, "report §2.5; own and shared dims together make a query"),
    _heads("mla.kv_b_proj.weight", _mla_keys_values, "report §2.5; keys and values are two projections"),
    # Attention: what heads share, what mixes them, gates.
    _matrix("mla.q_a_proj.weight", "the latent of all heads"),
    _matrix("mla.kv_a_proj_with_mqa.weight", "the latent and the shared key of all heads"),
    _matrix("kda.[fg]_a_proj.weight", "the low-rank gate input of all heads"),
    _matrix("kda.o_proj.weight", "mixes heads"),
    _matrix("mla.o_proj.weight", "mixes heads"),
    _gate("kda.f_b_proj.weight", _kda_heads, "decay logits of a head's key channels"),
    _gate("kda.g_proj.weight", _kda_heads, "output gate of a head's value channels"),
    _gate("kda.g_b_proj.weight", _kda_heads, "output gate of a head's value channels"),
    _gate("mla.g_proj.weight", _mla_values, "output gate of a head's value channels"),
    _vector(
        "kda.b_proj.weight", "a row makes one number per head, so a head's block would be a vector", True
    ),
    _vector("kda.[qkv]_conv1d.weight", "four taps per channel; zero switches the channel off"),
    _vector("kda.A_log", "log of a slope; zero is a value like others"),
    _vector("kda.dt_bias", "bias; zero is a value like others"),
    # Feed-forward.
    _matrix("mlp.*_proj.weight", "the dense network"),
    _matrix("block_sparse_moe.gate.weight", "the router, a matrix like others"),
    _matrix("block_sparse_moe.routed_expert_*_proj.weight", "the latent of all experts"),
    _matrix("block_sparse_moe.shared_experts.*_proj.weight", "one network, seen by every token"),
    _matrix("block_sparse_moe.experts.w[123]", "one matrix per expert", _experts),
    # Depth.
    _vector("*_res_proj.weight", "AttnRes pseudo-query, a vector; zero is the plain average"),
    _vector("*norm.weight", "gain; its rest position is one"),
    _matrix("mtp.eh_proj.weight", "joins embedding and hidden state"),
)


@dataclass(frozen=True)
class Treatment:
    """What one parameter gets. `split` is None under AdamW."""

    rule: Rule
    split: Split | None
    weight_decay: float
    lr_scale: float


def assign(
    shapes: Mapping[str, Shape], config: OptimConfig, model: ModelConfig, rules: Sequence[Rule] = RULES
) -> dict[str, Treatment]:
    """The treatment of every parameter, by name.

    Args:
        shapes: by name in our state dict.

    Raises:
        InvalidInput: a parameter matches no row or several, or its rows are not those of the model's heads.
    """
    return {
        name: _treatment(name, shape, _rule(name, model, rules), config, model)
        for name, shape in shapes.items()
    }


def _rule(name: str, model: ModelConfig, rules: Sequence[Rule]) -> Rule:
    inner = _inside_layer(name, model)
    matching = [rule for rule in rules if fnmatchcase(inner, rule.pattern)]
    if len(matching) != 1:
        found = " and ".join(rule.pattern for rule in matching) or "none"
        raise InvalidInput(
            f"parameter {name} must match one row of openk3.optim.rules; as {inner} it matches {found}"
        )
    return matching[0]


def _inside_layer(name: str, model: ModelConfig) -> str:
    """`layers.3.self_attn.q_proj.weight` to `mla.q_proj.weight`: KDA and MLA share names, not splits."""
    layer = re.match(r"layers\.(\d+)\.|mtp\.layer\.", name)
    if layer is None:
        return name
    is_mla = layer[1] is None or model.is_mla(int(layer[1]))
    return re.sub(r"^self_attn\.", "mla." if is_mla else "kda.", name[layer.end() :])


def _treatment(name: str, shape: Shape, rule: Rule, config: OptimConfig, model: ModelConfig) -> Treatment:
    decay = config.weight_decay if rule.decays else 0.0
    scale = {"matrix": 1.0, "embedding": config.embedding_lr_scale, "vector": config.vector_lr_scale}[
        rule.kind
    ]
    if rule.kind != "matrix" or config.optimizer == "adamw":
        return Treatment(rule, None, decay, scale)
    splits = rule.flag is None or (config.per_head and getattr(config, rule.flag))
    split = (rule.split if splits else _whole)(shape, model)
    if split.rows != math.prod(shape[:-1]):
        raise InvalidInput(
            f"parameter {name} is {list(shape)}, but the model's heads make {split.groups} blocks of "
            f"{' + '.join(map(str, split.bands))} = {split.rows} rows"
        )
    return Treatment(rule, split, decay, scale)
