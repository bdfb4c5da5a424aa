"""MXFP4 in plain PyTorch: one table look-up for two values, and three roundings for a code.

Decoding looks (scale byte, packed byte) up in a table of 65,536 pairs of values, each pair one machine word.
No arithmetic touches the values, so that they are exact down to the subnormals under 2^-127, and it was the
fastest of the forms tried on a CPU core: 0.3 ns a weight, where looking the byte up and multiplying by the
scale took 0.4 to 1.1, and going through float8 3.6.
"""

from __future__ import annotations

import functools
import math

import torch
from torch.nn import functional as F

from openk3.ops.mx.reference import SCALES, VALUES
from openk3.ops.precision import wide, widen

Tensor = torch.Tensor

ROWS = 256
"""Rows of a matrix that are expanded at a time: 512 and 128 measured within a tenth, 64 slower."""

_WORDS = {torch.bfloat16: torch.int32, torch.float32: torch.int64, torch.float64: torch.complex128}
"""A dtype as wide as two values."""


def scales(weight: Tensor) -> Tensor:
    """See `openk3.ops.mx.mxfp4_scales`."""
    largest = widen(_grouped(weight)).abs().amax(-1)
    mantissa, exponent = torch.frexp(largest)  # mantissa in [0.5, 1), so that 1.75 reads 0.875
    byte = exponent - 1 + (mantissa >= 0.875) - 2 + 127
    return byte.clamp_(0, 252).masked_fill_(largest == 0, 0).to(torch.uint8)


def encode(weight: Tensor, scale: Tensor) -> Tensor:
    """See `openk3.ops.mx.encode_mxfp4`; the packed bytes alone."""
    inverse = (1 / SCALES).to(weight.device, wide(weight.dtype))[scale.int()]  # powers of two: exact
    ratio = widen(_grouped(weight)).mul(inverse.unsqueeze(-1)).abs_()
    # E2M1 steps by 1/2 up to 2, by 1 up to 4, by 2 beyond. Counted in steps each stretch is a line, the
    # lowest of the three lines is the right one, and torch rounds halves to even, which is the even code.
    code = torch.round(ratio * 2)
    code = torch.minimum(code, torch.round(ratio).add_(2))
    code = torch.minimum(code, ratio.div_(2).round_().add_(4)).clamp_(max=7)
    code = code.flatten(-2).to(torch.uint8)
    code |= torch.signbit(weight).to(torch.uint8) << 3
    return code[..., 0::2] | code[..., 1::2] << 4


def rounded(x: Tensor, bits: int) -> Tensor:
    """See `openk3.ops.mx.rounding`."""
    groups = widen(_grouped(x))
    if bits == 4:
        byte, least, mantissa, largest = scales(x).int(), 0, 1, 6.0
    else:
        exponent = torch.frexp(groups.abs().amax(-1)).exponent - 1
        zero = groups.abs().amax(-1) == 0
        byte = (exponent - 8 + 127).clamp_(0, 252).masked_fill_(zero, 0)
        least, mantissa, largest = -6, 3, 448.0
    scale = SCALES.to(x.device, groups.dtype)[byte].unsqueeze(-1)
    ratio = (groups * SCALES.to(x.device, groups.dtype)[254 - byte].unsqueeze(-1)).abs_().clamp_(max=largest)
    exponent = torch.frexp(ratio).exponent.sub_(1).clamp_(min=least).sub_(mantissa)
    steps = torch.round(torch.ldexp(ratio, -exponent))
    out = torch.ldexp(steps, exponent) * scale
    return torch.copysign(out, groups).view(x.shape).to(x.dtype)


def _grouped(weight: Tensor) -> Tensor:
    """`[..., in / 32, 32]`."""
    return weight.reshape(*weight.shape[:-1], weight.shape[-1] // 32, 32)


def decode(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """See `openk3.ops.mx.decode_mxfp4`."""
    rows = math.prod(packed.shape[:-1])
    out = torch.empty(*packed.shape[:-1], 2 * packed.shape[-1], dtype=dtype, device=packed.device)
    blocks = (torch.split(x.reshape(rows, x.shape[-1]), ROWS) for x in (packed, scale, out))
    for packed_rows, scale_rows, out_rows in zip(*blocks, strict=True):
        out_rows.copy_(_expand(packed_rows, scale_rows, dtype))
    return out


def linear(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """See `openk3.ops.mx.mxfp4_linear`."""
    blocks = zip(torch.split(packed, ROWS), torch.split(scale, ROWS), strict=True)
    return torch.cat([F.linear(x, _expand(p, s, x.dtype)) for p, s in blocks], dim=1)


def _expand(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of a few rows, `[rows, in]`."""
    index = packed.reshape(*scale.shape, 16).int() + (scale.int() << 8).unsqueeze(-1)
    words = torch.index_select(_table(dtype, packed.device), 0, index.flatten())
    return words.view(dtype).view(packed.shape[0], 2 * packed.shape[1])


@functools.cache
def _table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[256 * 256]` words: entry 256 s + b is both values of byte b under scale byte s, low nibble first."""
    byte = torch.arange(256)
    pairs = torch.stack([VALUES[byte % 16], VALUES[byte // 16]], dim=-1)  # [256, 2]
    scaled = SCALES.view(256, 1, 1) * pairs  # [256, 256, 2], exact in float64
    return scaled.to(dtype).view(_WORDS[dtype]).flatten().to(device)
