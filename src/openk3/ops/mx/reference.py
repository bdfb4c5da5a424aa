"""MXFP4 as its definition reads (OCP Microscaling 1.0; report §4.1.4): the oracle for the other file.

Scales follow the EVEN rule: the group's largest magnitude is rounded to E2M1's one mantissa bit before its
exponent is taken.
"""

from __future__ import annotations

import math

import torch

Tensor = torch.Tensor

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What codes 0..7 stand for; bit 3 is the sign."""
VALUES = torch.tensor(MAGNITUDES + tuple(-m for m in MAGNITUDES), dtype=torch.float64)
SCALES = torch.tensor([2.0 ** (byte - 127) for byte in range(255)] + [math.nan], dtype=torch.float64)
"""What scale bytes stand for."""


def scales(weight: Tensor) -> Tensor:
    """See `openk3.ops.mx.mxfp4_scales`."""
    groups = weight.double().reshape(weight.numel() // 32, 32)
    found = [_scale_byte(float(group.abs().max())) for group in groups]
    flat = torch.tensor(found, dtype=torch.uint8, device=weight.device)
    return flat.view(*weight.shape[:-1], weight.shape[-1] // 32)


def _scale_byte(largest: float) -> int:
    if largest == 0:
        return 0
    half_mantissa, exponent_above = math.frexp(largest)
    exponent = exponent_above - 1
    if 2 * half_mantissa >= 1.75:  # halfway between 1.5 and 2, which it rounds up to
        exponent += 1
    return min(max(exponent - 2 + 127, 0), 252)


def encode(weight: Tensor, scale: Tensor) -> Tensor:
    """See `openk3.ops.mx.encode_mxfp4`; the packed bytes alone."""
    ratios = (weight.double() / _by_element(scale)).flatten().tolist()
    codes = [_nearest_code(abs(r)) + (8 if math.copysign(1, r) < 0 else 0) for r in ratios]
    low_then_high = torch.tensor(codes, dtype=torch.uint8, device=weight.device)
    low_then_high = low_then_high.view(*weight.shape[:-1], weight.shape[-1] // 2, 2)
    return low_then_high[..., 0] + 16 * low_then_high[..., 1]


def _nearest_code(ratio: float) -> int:
    """Of two magnitudes equally near, the one with the even code; what exceeds 6 saturates."""
    return min(range(8), key=lambda code: (abs(min(ratio, 6.0) - MAGNITUDES[code]), code % 2))


def rounded(x: Tensor, bits: int) -> Tensor:
    """See `openk3.ops.mx.rounding`: of all numbers of the format the nearest, ties to the even code."""
    grid = MAGNITUDES if bits == 4 else _E4M3
    groups = x.double().reshape(x.numel() // 32, 32).tolist()
    out = []
    for group in groups:
        largest = max(abs(element) for element in group)
        byte = _scale_byte(largest) if bits == 4 else _floor_byte(largest)
        scale = 2.0 ** (byte - 127)
        for element in group:
            ratio = min(abs(element) / scale, grid[-1])
            code = min(range(len(grid)), key=lambda code: (abs(ratio - grid[code]), code % 2))
            out.append(math.copysign(grid[code] * scale, element))
    return torch.tensor(out, dtype=torch.float64, device=x.device).view(x.shape).to(x.dtype)


_E4M3 = tuple(
    m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)
    for e in range(16)
    for m in range(8)
    if (e, m) != (15, 7)  # NaN
)


def _floor_byte(largest: float) -> int:
    """2^(floor(log2 largest) - 8), 0 for zero."""
    return 0 if largest == 0 else min(max(math.frexp(largest)[1] - 1 - 8 + 127, 0), 252)


def decode(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """See `openk3.ops.mx.decode_mxfp4`."""
    codes = torch.stack([packed % 16, packed // 16], dim=-1).flatten(-2).long()
    return (VALUES.to(packed.device)[codes] * _by_element(scale)).to(dtype)


def _by_element(scale: Tensor) -> Tensor:
    """Each column's scale, float64 `[..., in]`."""
    return SCALES.to(scale.device)[scale.long()].repeat_interleave(32, dim=-1)


def linear(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """See `openk3.ops.mx.mxfp4_linear`; expands the whole matrix."""
    return x @ decode(packed, scale, x.dtype).T
