"""Attention residuals (report §2.2) as the released bank-and-prefix protocol; the plain residual is a special
case.

A `Stream` is what flows between sublayers: frozen rows (the bank) and the running sum of the current block. A
sublayer reads a mix of all of them and adds its output to the sum; where a block opens, the sum freezes into
the bank after it was read, and the output starts a new one. Without AttnRes no block ever opens and nothing
is mixed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from openk3.config import AttnResConfig
from openk3.model.layers import Linear, RmsNorm
from openk3.model.record import ForwardRecord
from openk3.ops.attnres import attnres_mix

Tensor = torch.Tensor


class Stream(NamedTuple):
    """`bank`: rows `[T, d]`, the embedding first. `prefix`: `[T, d]`, or None while a block has no output
    yet."""

    bank: tuple[Tensor, ...]
    prefix: Tensor | None

    @property
    def sources(self) -> tuple[Tensor, ...]:
        return self.bank if self.prefix is None else (*self.bank, self.prefix)

    def opened(self) -> Stream:
        """A new block begins: the running sum is frozen."""
        return Stream(self.sources, None)

    def plus(self, output: Tensor) -> Stream:
        return Stream(self.bank, output if self.prefix is None else self.prefix + output)


def mix(
    stream: Stream, proj: Linear | None, norm: RmsNorm | None, name: str, record: ForwardRecord | None
) -> Tensor:
    """What a sublayer reads from the stream, `[T, d]`: the attention over its sources, or the prefix alone.

    `proj` and `norm` are the pseudo-query and its key norm; None without AttnRes.
    """
    if proj is None or norm is None or not stream.bank:
        (only,) = stream.sources
        return only
    detail = record is not None and record.detail
    mixed, weights = attnres_mix(
        stream.sources, proj.weight.squeeze(0), norm.weight, eps=norm.eps, return_weights=detail
    )
    if record is not None and weights is not None:
        record.source_weights[name] = weights.mean(0)
    return mixed


def opens_block(config: AttnResConfig, sublayer: int) -> bool:
    """Whether the running sum freezes before sublayer `sublayer` (0-based; two per decoder layer)."""
    match config.kind:
        case "none":
            return False
        case "full":
            return True
        case "block":
            return sublayer % (2 * config.block_size) == 0
