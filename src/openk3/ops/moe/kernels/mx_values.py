"""Words of MXFP4 weights to values in registers; `openk3.ops.moe.mx` says what the words hold.

A word gives four registers of two bf16 numbers, by 11 shifts and masks and 4 multiplications, and its byte of
scales takes 2 more. Every step is of one element, so the compiler keeps a word's values in the lane that
loaded it, which is where the matrix unit wants them: no word of an operand passes through shared memory.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import"
from __future__ import annotations

import triton
import triton.language as tl

from openk3.ops.triton_math import PTX


def _eight(half: int) -> tl.constexpr:
    """PTX for $0..$7 <- the eight values of word $8 under scale `half` of $9: i = 0 low, high, i = 1 ..."""
    return tl.constexpr(f"""{{ .reg .b32 t, u, s; .reg .b16 h<2>;
        mov.b32 {{h0, h1}}, $9;
        mov.b32 s, {{h{half}, h{half}}};
        and.b32 t, $8, 0x81C081C0;
        mul.bf16x2 t, t, s;
        mov.b32 {{$0, $1}}, t;
        shl.b32 t, $8, 3;
        and.b32 t, t, 0x81C081C0;
        mul.bf16x2 t, t, s;
        mov.b32 {{$2, $3}}, t;
        shl.b32 t, $8, 6;
        shl.b32 u, $8, 2;
        and.b32 t, t, 0x01C001C0;
        lop3.b32 t, u, 0x80008000, t, 0xEA;
        mul.bf16x2 t, t, s;
        mov.b32 {{$4, $5}}, t;
        shr.u32 t, $8, 3;
        shl.b32 u, $8, 1;
        and.b32 t, t, 0x01C001C0;
        lop3.b32 t, u, 0x80008000, t, 0xEA;
        mul.bf16x2 t, t, s;
        mov.b32 {{$6, $7}}, t;
    }}""")


_LOW, _HIGH = _eight(0), _eight(1)


@triton.jit
def _one(word, scale, SIGN: tl.constexpr, MAGNITUDE: tl.constexpr):
    """One value in fp32, by fp32 numbers of the same exponents."""
    bits = ((word >> SIGN) & 1) << 31 | ((word >> MAGNITUDE) & 7) << 22
    return bits.to(tl.float32, bitcast=True) * scale


@triton.jit
def _eight_values(word, scales, HIGH: tl.constexpr, DTYPE: tl.constexpr):
    """The eight values of a word, under the bf16 scale in the low or high half of `scales`."""
    if PTX and DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _HIGH if HIGH else _LOW, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [word, scales],
            dtype=(
                tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
                tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
            ), is_pure=True, pack=1,
        )  # fmt: skip
    s = (scales & -65536 if HIGH else scales << 16).to(tl.float32, bitcast=True)
    return (
        _one(word, s, 15, 6).to(DTYPE),
        _one(word, s, 31, 22).to(DTYPE),
        _one(word, s, 12, 3).to(DTYPE),
        _one(word, s, 28, 19).to(DTYPE),
        _one(word, s, 13, 0).to(DTYPE),
        _one(word, s, 29, 16).to(DTYPE),
        _one(word, s, 14, 9).to(DTYPE),
        _one(word, s, 30, 25).to(DTYPE),
    )


@triton.jit
def _four(a, b, c, d):
    """One value of the words h, q = 00, 01, 10, 11: `[F, t]` each -> `[F, t, h, q]`."""
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def mx_values(words, scales, FEATURES: tl.constexpr, DTYPE: tl.constexpr):
    """A tile, int32 `[FEATURES, 16]` and `[FEATURES]` -> `[FEATURES, 128]` in DTYPE."""
    even, odd = tl.split(tl.reshape(words, [FEATURES, 4, 2, 2]))  # by q
    w00, w10 = tl.split(even)
    w01, w11 = tl.split(odd)
    scales = tl.broadcast_to(scales[:, None], [FEATURES, 4])
    bytes_02 = (scales & 0x00FF00FF) << 7  # their exponents where bf16 has them
    bytes_13 = (scales >> 1) & 0x7F807F80
    a = _eight_values(w00, bytes_02, False, DTYPE)
    b = _eight_values(w01, bytes_13, False, DTYPE)
    c = _eight_values(w10, bytes_02, True, DTYPE)
    d = _eight_values(w11, bytes_13, True, DTYPE)
    # [F, t, h, q] for each i and half, then the two bits of i, then the half
    i02 = tl.join(_four(a[0], b[0], c[0], d[0]), _four(a[4], b[4], c[4], d[4]))
    i13 = tl.join(_four(a[2], b[2], c[2], d[2]), _four(a[6], b[6], c[6], d[6]))
    low = tl.join(i02, i13)
    i02 = tl.join(_four(a[1], b[1], c[1], d[1]), _four(a[5], b[5], c[5], d[5]))
    i13 = tl.join(_four(a[3], b[3], c[3], d[3]), _four(a[7], b[7], c[7], d[7]))
    values = tl.join(low, tl.join(i02, i13))
    return tl.reshape(tl.permute(values, [0, 2, 3, 4, 5, 1, 6]), [FEATURES, 128])
