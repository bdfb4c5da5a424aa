"""Attention residuals (report §2.2) as the released bank-and-prefix protocol; the plain residual is a special
case.

A `Stream` is what flows between sublayers: frozen rows (the bank) and the running sum of the current block. A
sublayer reads a mix of all of them and adds its output to the sum; where a block opens, the sum freezes into
the bank after it was read, and the output starts a new one. Without AttnRes no block ever opens and nothing
is mixed. On the way in, addition, mix and norm are one operator.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from openk3.config import AttnResConfig
from openk3.model.layers import Linear, RmsNorm
from openk3.model.record import ForwardRecord
from openk3.ops.attnres import SublayerInput, attnres_add_mix_norm

Tensor = torch.Tensor


class Stream(NamedTuple):
    """`bank`: rows `[T, d]`, the embedding first. `prefix`: `[T, d]`, or None while a block has no output
    yet. `output`: `[T, d]`, left to the next sublayer to be added to the prefix; None if there is none."""

    bank: tuple[Tensor, ...]
    prefix: Tensor | None
    output: Tensor | None = None

    @property
    def sources(self) -> tuple[Tensor, ...]:
        if self.prefix is None:
            return self.bank
        return (*self.bank, self.prefix if self.output is None else self.prefix + self.output)

    def opened(self) -> Stream:
        """A new block begins: the running sum is frozen."""
        return Stream(self.sources, None)

    def plus(self, output: Tensor) -> Stream:
        """With the output of a sublayer that has read this stream, and so left nothing to be added."""
        return Stream(self.bank, output if self.prefix is None else self.prefix + output)

    def awaiting(self, output: Tensor) -> Stream:
        """As `plus`, but the addition is left to the next sublayer, which reads both anyway."""
        return Stream(self.bank, output) if self.prefix is None else Stream(self.bank, self.prefix, output)


def enter(
    stream: Stream,
    proj: Linear | None,
    norm: RmsNorm | None,
    after: RmsNorm,
    name: str,
    record: ForwardRecord | None,
) -> tuple[Stream, Tensor]:
    """The way into a sublayer: the stream with everything added, and what the sublayer reads, `[T, d]`.

    Later sublayers read the rows that come out of it, so that their gradients meet in its backward.

    That is a norm of the attention over the stream's sources, or of the prefix alone. `proj` and `norm` are
    the pseudo-query and its key norm; None without AttnRes. `after` is the sublayer's own norm.
    """
    entered = _enter(stream, proj, norm, after, name, record, mixed=False)
    assert entered.normed is not None
    return Stream(entered.bank, entered.prefix), entered.normed


def leave(
    stream: Stream,
    proj: Linear | None,
    norm: RmsNorm | None,
    after: RmsNorm,
    name: str,
    record: ForwardRecord | None,
) -> tuple[Tensor, Tensor]:
    """What the head reads, normed, and the same before that norm, `[T, d]` both; see `enter`."""
    entered = _enter(stream, proj, norm, after, name, record, mixed=True)
    assert entered.normed is not None
    assert entered.mixed is not None
    return entered.normed, entered.mixed


def _enter(
    stream: Stream,
    proj: Linear | None,
    norm: RmsNorm | None,
    after: RmsNorm,
    name: str,
    record: ForwardRecord | None,
    *,
    mixed: bool,
) -> SublayerInput:
    if proj is None or norm is None or not stream.bank:
        (only,) = stream.sources
        return SublayerInput(after(only), only, only)
    *bank, prefix = stream.bank if stream.prefix is None else (*stream.bank, stream.prefix)
    detail = record is not None and record.detail
    entered = attnres_add_mix_norm(
        bank,
        prefix,
        stream.output,
        proj.weight.squeeze(0),
        norm.weight,
        after.weight,
        eps=norm.eps,
        norm_eps=after.eps,
        return_mixed=mixed,
        return_weights=detail,
    )
    if record is not None and entered.weights is not None:
        record.source_weights[name] = entered.weights.mean(0)
    return entered


def opens_block(config: AttnResConfig, sublayer: int) -> bool:
    """Whether the running sum freezes before sublayer `sublayer` (0-based; two per decoder layer)."""
    match config.kind:
        case "none":
            return False
        case "full":
            return True
        case "block":
            return sublayer % (2 * config.block_size) == 0
