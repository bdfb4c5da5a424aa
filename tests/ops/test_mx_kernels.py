"""MXFP4 and MXFP8 kernels in Triton's interpreter, and rounding in all forms, to the definition's bits."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.errors import InvalidInput
from openk3.ops.dispatch import triton_problem
from openk3.ops.mx import decode_mxfp4, encode_mxfp4, mxfp4_rounded, mxfp8_rounded

interpreted = pytest.mark.skipif(
    triton_problem("cpu") is not None or torch.cuda.is_available(), reason="for Triton's interpreter"
)
KERNELS = pytest.param("triton", marks=interpreted)
ROUNDED = {4: mxfp4_rounded, 8: mxfp8_rounded}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal, the sign of zeros included."""
    return torch.equal(actual, expected) and torch.equal(torch.signbit(actual), torch.signbit(expected))


def all_magnitudes(dtype: torch.dtype) -> torch.Tensor:
    """`[rows, 32]`: numbers of all exponents, neighbours of ties among them, both signs, rows of zeros."""
    mantissa = torch.tensor([1, 1.25, 1.5, 1.75, 1.875, 1.0625, 1.1875, 1.9375], dtype=torch.float64)
    rows = []
    for exponent in range(-126, 127):
        row = torch.cat([mantissa * 2.0**exponent, mantissa * 2.0 ** (exponent - 1)])
        rows.append(torch.cat([row, -row * 2.0 ** -torch.randint(4, (1,)).item()]))
    rows += [torch.zeros(32, dtype=torch.float64), -torch.zeros(32, dtype=torch.float64)]
    return torch.stack(rows).to(dtype)


def without_subnormals(x: torch.Tensor) -> torch.Tensor:
    """The interpreter makes zeros of bfloat16's (of float32's it does not)."""
    return x[16:] if x.dtype == torch.bfloat16 else x


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_encoding_gives_the_definitions_bytes(dtype):
    for weight in (torch.randn(9, 96).to(dtype), without_subnormals(all_magnitudes(dtype))):
        packed, scale = encode_mxfp4(weight, implementation="triton")
        expected = encode_mxfp4(weight, implementation="reference")
        assert torch.equal(scale, expected[1]) and torch.equal(packed, expected[0])
        shifted = (scale + 1).clamp(max=252)
        assert torch.equal(
            encode_mxfp4(weight, shifted, implementation="triton")[0],
            encode_mxfp4(weight, shifted, implementation="reference")[0],
        )


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_byte_under_every_scale_decodes_exactly(dtype):
    packed = torch.arange(256, dtype=torch.uint8).expand(253, 256)
    scale = torch.arange(253, dtype=torch.uint8).unsqueeze(1).expand(253, 16)
    packed, scale = packed[2 * (dtype == torch.bfloat16) :], scale[2 * (dtype == torch.bfloat16) :]
    decoded = decode_mxfp4(packed, scale, dtype, implementation="triton")
    assert same_bits(decoded, decode_mxfp4(packed, scale, dtype, implementation="reference"))


def e4m3() -> list[Fraction]:
    """Magnitudes by code, from the format's definition: exponent bias 7, three bits, NaN at the end."""
    table = []
    for code in range(127):
        exponent, mantissa = code >> 3, Fraction(code & 7, 8)
        table.append((mantissa if exponent == 0 else 1 + mantissa) * Fraction(2) ** (max(exponent, 1) - 7))
    return table


def rounded_by_fractions(numbers: list[float], bits: int) -> list[float]:
    """One group by exact arithmetic."""
    grid = e4m3() if bits == 8 else [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]
    largest = max(abs(Fraction(n)) for n in numbers)
    exponent = 0
    if largest:
        exponent = math.frexp(float(largest))[1] - 1
        exponent += bits == 4 and largest / Fraction(2) ** exponent >= Fraction(7, 4)
        exponent -= 2 if bits == 4 else 8
    scale = Fraction(2) ** min(max(exponent, -127), 125)
    out = []
    for n in numbers:
        ratio = min(abs(Fraction(n)) / scale, grid[-1])
        code = min(range(len(grid)), key=lambda c: (abs(grid[c] - ratio), c % 2))
        out.append(math.copysign(float(grid[code] * scale), n))
    return out


@pytest.mark.parametrize("implementation", ["reference", "eager", KERNELS])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_exact_arithmetic_at_all_magnitudes(dtype, bits, implementation):
    x = all_magnitudes(dtype)
    x = without_subnormals(x) if implementation == "triton" else x
    expected = torch.tensor([rounded_by_fractions(row.tolist(), bits) for row in x.double()])
    mine = ROUNDED[bits](x, implementation=implementation)
    assert mine.dtype == dtype
    assert same_bits(mine, expected.to(dtype))


@pytest.mark.parametrize("bits", [4, 8])
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32, max_size=32),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)
@settings(max_examples=60, deadline=None)
def test_rounding_any_numbers_is_the_definitions(bits, numbers, dtype):
    x = torch.tensor(numbers, dtype=torch.float64).to(dtype).nan_to_num(posinf=0, neginf=0)
    expected = torch.tensor(rounded_by_fractions(x.double().tolist(), bits), dtype=torch.float64).to(dtype)
    assert same_bits(ROUNDED[bits](x), expected)
    assert same_bits(ROUNDED[bits](x, implementation="reference"), expected)


@interpreted
@pytest.mark.parametrize("shape", [(0, 32), (3, 5, 64), (130, 32)])
def test_shapes_and_layouts_do_not_matter(shape):
    x = torch.randn(*shape)
    packed, scale = encode_mxfp4(x, implementation="triton")
    assert packed.shape == (*shape[:-1], shape[-1] // 2) and scale.shape == (*shape[:-1], shape[-1] // 32)
    decoded = decode_mxfp4(packed, scale, torch.float32, implementation="triton")
    assert torch.equal(decoded, mxfp4_rounded(x, implementation="triton"))
    turned = x.transpose(0, -1).contiguous().transpose(0, -1)
    assert torch.equal(mxfp8_rounded(turned, implementation="triton"), mxfp8_rounded(x))


@interpreted
def test_torch_sees_operators():
    x = torch.randn(4, 64)
    packed, scale = torch.ops.openk3.mxfp4_encode(x, None)
    torch.library.opcheck(torch.ops.openk3.mxfp4_encode.default, (x, None))
    torch.library.opcheck(torch.ops.openk3.mxfp4_encode.default, (x, scale))
    torch.library.opcheck(torch.ops.openk3.mxfp4_decode.default, (packed, scale, torch.float32))
    torch.library.opcheck(torch.ops.openk3.mx_round.default, (x, 8))


def test_what_does_not_fit_is_refused():
    for rounded in ROUNDED.values():
        with pytest.raises(InvalidInput, match="multiple of 32"):
            rounded(torch.randn(2, 33))
        with pytest.raises(InvalidInput, match="floating point"):
            rounded(torch.zeros(2, 32, dtype=torch.int32))
        with pytest.raises(InvalidInput, match="no backward"):
            rounded(torch.randn(2, 32, requires_grad=True))
