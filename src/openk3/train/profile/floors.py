"""The least bytes and operations of each part of a step, from shapes.

Bytes: what a part reads from others, and what it writes for others or for its own backward, once each, at its
dtype; what it hands on inside itself is free, as if it were one kernel. Weights are read once per pass, their
gradients written once, in at least fp32. Operations are those of `openk3.train.flops`: the parts of the model
sum to it exactly. Newton-Schulz, which is not the model's, counts the half of its symmetric products that
is not a copy of the other.

So a floor is what no implementation with these parts can be under, not what a good one reaches: products of
widths like 416 and a recurrence that cannot use all of the matrix units stay above it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from openk3.config import KdaConfig, MlaConfig, ModelConfig, MoeConfig
from openk3.model.residual import opens_block
from openk3.train.profile import parts
from openk3.train.profile.attribution import Phase

C = TypeVar("C")

GRADIENT = 4
"""Bytes of a gradient's element."""
PRECISE = 4
"""Bytes of what stays in fp32 where activations are bf16."""


@dataclass(frozen=True)
class Cost:
    """Bytes moved and floating-point operations."""

    bytes: int = 0
    flops: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.flops + other.flops)


@dataclass(frozen=True)
class MicroBatch:
    """lengths: of its sequences. distinct: different tokens in it, rows of the table that are touched."""

    lengths: tuple[int, ...]
    distinct: int

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


Costs = Mapping[tuple[str, Phase], Cost]


def model_costs(config: ModelConfig, batches: Iterable[MicroBatch], *, size: int, mtp: bool = False) -> Costs:
    """Of forward and backward of a step's micro-batches.

    Args:
        size: bytes of an activation and of a weight's compute copy.
        mtp: that layer is trained.
    """
    ledger = _Ledger()
    for batch in batches:
        _Pass(config, batch, size, ledger).whole(mtp)
    return ledger.costs


class _Ledger:
    def __init__(self) -> None:
        self.costs: defaultdict[tuple[str, Phase], Cost] = defaultdict(Cost)

    def add(
        self,
        part: str,
        reads: int,
        writes: int,
        *,
        weights: int = 0,
        size: int,
        flops: int = 0,
        kept: int | None = None,
        outputs: bool = False,
    ) -> None:
        """A function: bytes of its inputs and outputs; elements of its weights, which have `size` bytes.

        Its backward reads gradients of the outputs, the inputs (or `kept` bytes instead) and the weights, and
        writes gradients of inputs and weights. `outputs`: it reads its outputs again too. `flops` are the
        forward's products; the backward has twice as many.
        """
        again = reads if kept is None else kept
        backward = writes + again + reads + (writes if outputs else 0) + weights * (size + GRADIENT)
        self.costs[part, "forward"] += Cost(reads + writes + weights * size, flops)
        self.costs[part, "backward"] += Cost(backward, 2 * flops)


class _Pass:
    """One micro-batch through the model, layer by layer, as `openk3.model.decoder` runs it."""

    def __init__(self, config: ModelConfig, batch: MicroBatch, size: int, ledger: _Ledger) -> None:
        self.config, self.batch, self.size, self.ledger = config, batch, size, ledger
        self.T = batch.tokens
        self.row = self.T * config.hidden_size * size  # bytes of `[T, d]`

    def whole(self, mtp: bool) -> None:
        self._embed()
        bank, prefix, output = 0, True, False  # rows in the bank; whether there is a sum, and one to be added
        for sublayer in range(2 * self.config.num_layers):
            self._enter(bank, prefix, output)
            if opens_block(self.config.attn_res, sublayer):
                bank, prefix = bank + prefix, False
            prefix, output = True, prefix
            self._sublayer(*divmod(sublayer, 2))
        self._enter(bank, prefix, output)
        self._head()
        if mtp:
            self._mtp()

    def _embed(self) -> None:
        ids, costs = 8 * self.T, self.ledger.costs
        touched = self.batch.distinct * self.config.hidden_size
        costs[parts.EMBEDDING, "forward"] += Cost(ids + touched * self.size + self.row)
        costs[parts.EMBEDDING, "backward"] += Cost(ids + self.row + touched * GRADIENT)

    def _enter(self, bank: int, prefix: bool, output: bool) -> None:
        """Sum, mix and norm before a sublayer or the head; see `openk3.model.residual`."""
        row, size = self.row, self.size
        summed = row if output else 0
        if not bank:
            if output:
                self.ledger.add(parts.RESIDUAL, 2 * row, row, size=size, kept=0)
            self._norm(self.config.hidden_size)
            return
        sources = (bank + prefix) * row
        self.ledger.add(
            parts.ATTNRES,
            sources + summed,
            row + summed,
            weights=3 * self.config.hidden_size,
            size=size,
        )

    def _norm(self, width: int) -> None:
        row = self.T * width * self.size
        self.ledger.add(parts.NORMS, row, row, weights=width, size=self.size)

    def _sublayer(self, layer: int, second: int) -> None:
        if second:
            if self.config.is_moe(layer):
                self._moe(_given(self.config.moe))
            else:
                self._ffn(parts.DENSE, self.config.dense_width)
        elif self.config.is_mla(layer):
            self._mla(_given(self.config.mla))
        else:
            self._kda(_given(self.config.kda))

    def _product(self, part: str, inputs: int, outputs: int) -> None:
        self._products(part, inputs, outputs, inputs * outputs)

    def _products(self, part: str, inputs: int, outputs: int, weights: int) -> None:
        """Products that share `[T, inputs]` and leave `[T, outputs]` together, with `weights` elements."""
        T, size = self.T, self.size
        reads, writes, flops = T * inputs * size, T * outputs * size, 2 * T * weights
        self.ledger.add(part, reads, writes, weights=weights, size=size, flops=flops)

    def _kda(self, kda: KdaConfig) -> None:
        d, T, size = self.config.hidden_size, self.T, self.size
        H, K = kda.num_heads, kda.head_dim
        C = H * K
        gate = d * C if kda.output_gate == "full" else d * K + K * C
        decay = d * K + K * C
        # q, k, v, decay logits, beta, output gate from one x; then the output.
        self._products(parts.KDA_PROJECTIONS, d, 5 * C + H, 3 * d * C + decay + d * H + gate)
        self._product(parts.KDA_PROJECTIONS, C, d)
        add = self.ledger.add
        taps = 3 * C * kda.conv_width
        add(parts.KDA_CONVOLUTION, 3 * T * C * size, 3 * T * C * size, weights=taps, size=PRECISE)
        states = len(self.batch.lengths) * H * K * K * PRECISE
        read = T * (4 * C + H) * size
        flops = 6 * T * H * K * K
        add(parts.KDA_RECURRENCE, read, T * C * size, weights=H + C, size=PRECISE, flops=flops)
        self.ledger.costs[parts.KDA_RECURRENCE, "forward"] += Cost(states)
        add(parts.KDA_NORM, 2 * T * C * size, T * C * size, weights=K, size=PRECISE)

    def _mla(self, mla: MlaConfig) -> None:
        d, T, size = self.config.hidden_size, self.T, self.size
        H, r, shared = mla.num_heads, mla.kv_lora_rank, mla.qk_rope_head_dim
        queries, values = H * mla.qk_head_dim, H * mla.v_head_dim
        content = H * (mla.qk_nope_head_dim + mla.v_head_dim)
        rank = mla.q_lora_rank
        query = d * queries if rank is None else rank * (d + queries)
        gate = values if mla.gated else 0
        weights = query + d * (r + shared) + r * content + d * gate
        self._products(parts.MLA_PROJECTIONS, d, queries + r + shared + content + gate, weights)
        self._product(parts.MLA_PROJECTIONS, values, d)
        self._norm(r)
        if rank is not None:
            self._norm(rank)
        pairs = sum(n * (n + 1) // 2 for n in self.batch.lengths)
        self.ledger.add(
            parts.MLA_ATTENTION,
            T * (queries + content + shared) * size,
            T * values * size,
            size=size,
            flops=H * 2 * (mla.qk_head_dim + mla.v_head_dim) * pairs,
            outputs=True,
        )

    def _ffn(self, part: str, width: int) -> None:
        d = self.config.hidden_size
        self._products(part, d, d, 3 * d * width)

    def _moe(self, moe: MoeConfig) -> None:
        d, T, size = self.config.hidden_size, self.T, self.size
        E, k, F = moe.num_experts, moe.experts_per_token, moe.expert_width
        width, rows = moe.latent_width or d, T * k
        latent = moe.latent_width is not None
        # Scores stay inside; ids and weights come out.
        self._products(parts.ROUTER, d, width if latent else 0, d * E + (d * width if latent else 0))
        self.ledger.costs[parts.ROUTER, "forward"] += Cost(rows * (8 + PRECISE))
        self.ledger.costs[parts.ROUTER, "backward"] += Cost(rows * (8 + PRECISE))
        if latent:
            self._product(parts.ROUTER, width, d)
        if moe.latent_norm:
            self._norm(width)
        few, many = T * width * size, rows * width * size
        costs = self.ledger.costs
        costs[parts.EXPERT_DISPATCH, "forward"] += Cost(few + many + rows * 8)
        costs[parts.EXPERT_DISPATCH, "backward"] += Cost(few + many + rows * 8)
        costs[parts.EXPERT_COMBINE, "forward"] += Cost(many + few + rows * (8 + PRECISE))
        costs[parts.EXPERT_COMBINE, "backward"] += Cost(many + few + rows * 8)
        hit = min(E, rows)  # weights of experts without a row are not read; at most this many have one
        flops = 2 * rows * 3 * width * F
        self.ledger.add(
            parts.EXPERT_PRODUCTS, many, many, weights=hit * 3 * width * F, size=size, flops=flops
        )
        if moe.num_shared_experts:
            self._ffn(parts.SHARED, moe.num_shared_experts * F)
            self.ledger.add(parts.ROUTER, 2 * self.row, self.row, size=size, kept=0)  # routed + shared

    def _head(self) -> None:
        """Logits are nobody's: hidden states, the table and targets go in, a number comes out."""
        d, V, T, size = self.config.hidden_size, self.config.vocab_size, self.T, self.size
        self.ledger.add(parts.HEAD, T * d * size, 0, weights=d * V, size=size, flops=2 * T * d * V)
        self.ledger.costs[parts.HEAD, "forward"] += Cost(8 * T)
        self.ledger.costs[parts.HEAD, "backward"] += Cost(8 * T)

    def _mtp(self) -> None:
        d, row, size = self.config.hidden_size, self.row, self.size
        self._embed()
        for _ in range(2):
            self._norm(d)
        self._product(parts.MTP, 2 * d, d)
        self._norm(d)
        self._mla(_given(self.config.mla))
        self.ledger.add(parts.RESIDUAL, 2 * row, row, size=size, kept=0)
        self._norm(d)
        self._moe(_given(self.config.moe))
        self.ledger.add(parts.RESIDUAL, 2 * row, row, size=size, kept=0)
        self._norm(d)
        self._head()


@dataclass(frozen=True)
class Parameter:
    """What the optimizer does with one: `blocks` `[R, C]` of Newton-Schulz, none under AdamW."""

    elements: int
    blocks: Sequence[tuple[int, int]] = ()


def update_costs(
    parameters: Iterable[Parameter],
    *,
    micro_batches: int,
    iterations: int,
    copy_size: int | None,
    direction_size: int,
) -> Costs:
    """Of what happens once per step.

    Args:
        iterations: of Newton-Schulz. direction_size: bytes of an element it works on.
        copy_size: bytes of a weight's compute copy; None where the master itself computes.
    """
    listed = list(parameters)
    elements = sum(p.elements for p in listed)
    published = copy_size or 0
    update = directions = flops = 0
    for p in listed:
        moments = 1 if p.blocks else 2
        # Gradient and master read, moments read and written, master and copy written.
        update += p.elements * (GRADIENT + 2 * 4 * moments + 2 * 4 + published)
        if p.blocks:
            update += 2 * p.elements * direction_size
            directions += 2 * p.elements * direction_size
        for rows, cols in p.blocks:
            small, large = min(rows, cols), max(rows, cols)
            flops += iterations * (small * small * large + small**3 + 2 * small * small * large)
    return {
        (parts.GRADIENT_SUMS, "step"): Cost((micro_batches - 1) * elements * GRADIENT),
        (parts.CLIPPING, "step"): Cost(elements * GRADIENT),
        (parts.NEWTON_SCHULZ, "step"): Cost(directions, flops),
        (parts.UPDATE, "step"): Cost(update),
    }


def _given(config: C | None) -> C:
    assert config is not None  # ModelConfig checked it for every layer that asks
    return config
