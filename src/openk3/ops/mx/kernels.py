"""MXFP4 and MXFP8 on a GPU: encode, decode, and round in one pass. Each gives the reference's bits.

Everything is exact but the one rounding, and that is an addition: r + c - c with c = 1.5 * 2^23 steps of the
grid at r rounds to a multiple of the step, ties to the even one, which is the even code.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import, assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from openk3.ops.kernel_operator import kernel_operator

Tensor = torch.Tensor

GROUPS = 128  # of 32 elements that a program takes
WARPS = 4


@triton.jit
def _power(field):
    """The fp32 number 2^(field - 127), field from 0 on."""
    return tl.where(field == 0, 0x00400000, field << 23).to(tl.float32, bitcast=True)


@triton.jit
def _scale_byte(magnitude, BITS: tl.constexpr):
    """`[GROUPS, 32]` -> `[GROUPS]`: by the EVEN rule for 4 bits, rounded down for 8."""
    bits = tl.max(magnitude, 1).to(tl.int32, bitcast=True)
    if BITS == 4:
        byte = (bits >> 23) - 2 + tl.where((bits & 0x7FFFFF) >= 0x600000, 1, 0)
    else:
        byte = (bits >> 23) - 8
    return tl.minimum(tl.maximum(byte, 0), 252)


@triton.jit
def _on_grid(ratio, BITS: tl.constexpr):
    """A magnitude over its scale, rounded to E2M1 or E4M3, the largest at most."""
    LEAST: tl.constexpr = 127 if BITS == 4 else 121  # exponent field of the smallest normal number
    MANTISSA: tl.constexpr = 1 if BITS == 4 else 3
    LARGEST: tl.constexpr = 6.0 if BITS == 4 else 448.0
    ratio = tl.minimum(ratio, LARGEST)
    field = tl.maximum(ratio.to(tl.int32, bitcast=True) >> 23, LEAST) - MANTISSA
    far = (field << 23).to(tl.float32, bitcast=True) * 12582912.0
    return (ratio + far) - far


@triton.jit(do_not_specialize=["groups"])
def _encode(weight, given, packed, scales, groups, GIVEN: tl.constexpr, GROUPS: tl.constexpr):
    g = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    inside = g < groups
    place = g[:, None] * 32 + tl.arange(0, 32)[None, :]
    value = tl.load(weight + place, mask=inside[:, None], other=0.0).to(tl.float32)
    magnitude = tl.abs(value)
    if GIVEN:
        byte = tl.load(given + g, mask=inside, other=0).to(tl.int32)
    else:
        byte = _scale_byte(magnitude, 4)
    tl.store(scales + g, byte.to(tl.uint8), mask=inside)
    rounded = _on_grid(magnitude * _power(254 - byte)[:, None], 4)
    code = (rounded * 1.1754943508222875e-38).to(tl.int32, bitcast=True) >> 22
    code |= (value.to(tl.int32, bitcast=True) >> 28) & 8
    low, high = tl.split(tl.reshape(code, [GROUPS, 16, 2]))
    place = g[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(packed + place, (low | high << 4).to(tl.uint8), mask=inside[:, None])


@triton.jit
def _value(code, scale):
    """Codes of E2M1 times their scale: a magnitude in bits 24..22 is 2^-126 times its value in fp32."""
    bits = (code & 7) << 22 | (code & 8) << 28
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37 * scale


@triton.jit(do_not_specialize=["groups"])
def _decode(packed, scales, out, groups, GROUPS: tl.constexpr):
    g = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    inside = g < groups
    place = g[:, None] * 16 + tl.arange(0, 16)[None, :]
    byte = tl.load(packed + place, mask=inside[:, None], other=0).to(tl.int32)
    scale = _power(tl.load(scales + g, mask=inside, other=0).to(tl.int32))[:, None]
    value = tl.reshape(tl.join(_value(byte, scale), _value(byte >> 4, scale)), [GROUPS, 32])
    place = g[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=["groups"])
def _round(x, out, groups, BITS: tl.constexpr, GROUPS: tl.constexpr):
    g = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    inside = (g < groups)[:, None]
    place = g[:, None] * 32 + tl.arange(0, 32)[None, :]
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    magnitude = tl.abs(value)
    byte = _scale_byte(magnitude, BITS)
    rounded = _on_grid(magnitude * _power(254 - byte)[:, None], BITS) * _power(byte)[:, None]
    sign = value.to(tl.int32, bitcast=True) & -2147483648
    rounded = (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    tl.store(out + place, rounded.to(out.dtype.element_ty), mask=inside)


@kernel_operator("openk3::mxfp4_encode")
def _encode_op(weight: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    weight = weight.contiguous()
    *rows, columns = weight.shape
    packed = weight.new_empty(*rows, columns // 2, dtype=torch.uint8)
    scales = weight.new_empty(*rows, columns // 32, dtype=torch.uint8)
    groups = scales.numel()
    if groups:
        given = None if scale is None else scale.contiguous()
        _encode[(triton.cdiv(groups, GROUPS),)](
            weight, given, packed, scales, groups, GIVEN=scale is not None, GROUPS=GROUPS, num_warps=WARPS
        )
    return packed, scales


@_encode_op.register_fake
def _(weight: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    *rows, columns = weight.shape
    return (
        weight.new_empty(*rows, columns // 2, dtype=torch.uint8),
        weight.new_empty(*rows, columns // 32, dtype=torch.uint8),
    )


@kernel_operator("openk3::mxfp4_decode")
def _decode_op(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    packed, scale = packed.contiguous(), scale.contiguous()
    out = packed.new_empty(*packed.shape[:-1], 2 * packed.shape[-1], dtype=dtype)
    if groups := scale.numel():
        _decode[(triton.cdiv(groups, GROUPS),)](packed, scale, out, groups, GROUPS=GROUPS, num_warps=WARPS)
    return out


@_decode_op.register_fake
def _(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return packed.new_empty(*packed.shape[:-1], 2 * packed.shape[-1], dtype=dtype)


@kernel_operator("openk3::mx_round")
def _round_op(x: Tensor, bits: int) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    if groups := x.numel() // 32:
        _round[(triton.cdiv(groups, GROUPS),)](x, out, groups, BITS=bits, GROUPS=GROUPS, num_warps=WARPS)
    return out


@_round_op.register_fake
def _(x: Tensor, bits: int) -> Tensor:
    return x.new_empty(x.shape)


def encode(weight: Tensor, scale: Tensor) -> Tensor:
    """See `openk3.ops.mx.encode_mxfp4`; the packed bytes alone."""
    packed: Tensor = torch.ops.openk3.mxfp4_encode(weight, scale)[0]
    return packed


def encode_fresh(weight: Tensor) -> tuple[Tensor, Tensor]:
    """See `openk3.ops.mx.encode_mxfp4`, with scales of its own, from one read of the weight."""
    packed, scale = torch.ops.openk3.mxfp4_encode(weight, None)
    return packed, scale


def decode(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """See `openk3.ops.mx.decode_mxfp4`; bfloat16 or float32."""
    out: Tensor = torch.ops.openk3.mxfp4_decode(packed, scale, dtype)
    return out


def rounded(x: Tensor, bits: int) -> Tensor:
    """See `openk3.ops.mx.rounding`."""
    out: Tensor = torch.ops.openk3.mx_round(x, bits)
    return out
