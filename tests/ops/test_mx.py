"""MXFP4: against the definition in exact fractions, a published vector, and its own bytes there and back."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.errors import InvalidInput, KernelUnavailable
from openk3.ops.mx import decode_mxfp4, encode_mxfp4, mxfp4_linear, mxfp4_scales

BOTH = ["reference", "eager"]
MAGNITUDES = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]
EXTREME = [0, 1, 2, 64, 119, 126, 127, 128, 200, 251, 252]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def value_of(code: int, scale: int) -> float:
    """Every value is a double, so that the conversion from the fraction is exact."""
    sign = -1.0 if code & 8 else 1.0
    return sign * float(MAGNITUDES[code & 7] * Fraction(2) ** (scale - 127))


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal, the sign of zeros included."""
    return torch.equal(actual, expected) and torch.equal(torch.signbit(actual), torch.signbit(expected))


def random_packed(*shape: int) -> torch.Tensor:
    return torch.randint(256, shape, dtype=torch.uint8)


# --------------------------------------------------------------------------------------------------- decode


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_byte_under_scales_from_the_least_to_the_largest_decodes_exactly(implementation, dtype):
    packed = torch.arange(256, dtype=torch.uint8).expand(len(EXTREME), 256).contiguous()
    scale = torch.tensor(EXTREME, dtype=torch.uint8).unsqueeze(1).repeat(1, 16)
    expected = [[value_of(c, s) for b in range(256) for c in (b & 15, b >> 4)] for s in EXTREME]
    decoded = decode_mxfp4(packed, scale, dtype, implementation=implementation)
    assert decoded.dtype == dtype
    assert same_bits(decoded.double(), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("implementation", BOTH)
def test_the_published_bytes_of_the_release_decode_to_the_published_values(implementation):
    """Layer 1, expert 0, w1, row 0 of the released checkpoint."""
    packed = torch.tensor([22, 185, 206, 35] + 12 * [0], dtype=torch.uint8)
    scale = torch.tensor([121], dtype=torch.uint8)
    published = [0.0625, 0.0078125, -0.0078125, -0.0234375, -0.0625, -0.03125, 0.0234375, 0.015625]
    assert decode_mxfp4(packed, scale, implementation=implementation)[:8].tolist() == published


@pytest.mark.parametrize("columns", [32, 96])
@pytest.mark.parametrize("leading", [(), (3,), (2, 300), (0,), (2, 0, 3)])
def test_the_table_decodes_as_the_definition_does_in_any_shape(leading, columns):
    packed = random_packed(*leading, columns // 2)
    scale = torch.randint(100, 140, (*leading, columns // 32), dtype=torch.uint8)
    decoded = decode_mxfp4(packed, scale)
    assert decoded.shape == (*leading, columns)
    assert same_bits(decoded, decode_mxfp4(packed, scale, implementation="reference"))


def test_bytes_need_not_be_contiguous():
    packed = random_packed(48, 300).T
    scale = torch.randint(100, 140, (3, 300), dtype=torch.uint8).T
    expected = decode_mxfp4(packed.contiguous(), scale.contiguous(), torch.float32)
    assert torch.equal(decode_mxfp4(packed, scale, torch.float32), expected)
    x = torch.randn(2, 96)
    whole = mxfp4_linear(x, packed.contiguous(), scale.contiguous())
    assert torch.equal(mxfp4_linear(x, packed, scale), whole)
    weight = torch.randn(64, 5).T
    for mine, expected in zip(encode_mxfp4(weight), encode_mxfp4(weight.contiguous()), strict=True):
        assert torch.equal(mine, expected)


# --------------------------------------------------------------------------------------------------- scales


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("largest", "byte"),
    [
        (1.0, 125),
        (1.5, 125),
        (1.7421875, 125),  # the bfloat16 below 1.75
        (1.75, 126),
        (1.9921875, 126),
        (2.0, 126),
        (6.0, 127),
        (7.0, 128),
        (0.0, 0),
        (2.0**-133, 0),  # a subnormal of bfloat16
        (2.0**-126, 0),
        (2.0**-125, 0),
        (1.75 * 2.0**-125, 1),
        (2.0**-124, 1),
        (1.5 * 2.0**127, 252),
        (1.9921875 * 2.0**127, 252),  # the rule alone would say 253, under which 4 is infinite
    ],
)
def test_scales_follow_the_even_rule_from_zero_to_the_largest_number(implementation, dtype, largest, byte):
    group = torch.zeros(32, dtype=torch.float64)
    group[[5, 17]] = torch.tensor([-largest, largest / 3], dtype=torch.float64)
    assert mxfp4_scales(group.to(dtype), implementation=implementation).tolist() == [byte]


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32, max_size=32),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)
@settings(max_examples=60, deadline=None)
def test_scales_and_codes_are_those_of_the_definition_for_any_numbers(numbers, dtype):
    weight = torch.tensor(numbers, dtype=torch.float64).to(dtype).nan_to_num(posinf=0, neginf=0)
    assert torch.equal(mxfp4_scales(weight), mxfp4_scales(weight, implementation="reference"))
    packed, scale = encode_mxfp4(weight)
    expected, _ = encode_mxfp4(weight, scale, implementation="reference")
    assert torch.equal(packed, expected)


# --------------------------------------------------------------------------------------------------- encode


def codes_of(packed: torch.Tensor) -> list[int]:
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten().tolist()


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("scale", [0, 1, 120, 127, 252])
def test_halves_go_to_the_even_code_and_their_neighbours_to_the_nearest(implementation, scale):
    ties = [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6)]
    numbers, expected = [], []
    for k, (tie, code) in enumerate(ties):
        below, above = tie * (1 - 2.0**-20), tie * (1 + 2.0**-20)
        numbers += [below, tie, above, -tie]
        expected += [k, code, k + 1, code + 8]
    numbers += [0.0, -0.0, 6.0, -1e3]
    expected += [0, 8, 7, 15]
    weight = torch.tensor(numbers, dtype=torch.float64) * 2.0 ** (scale - 127)
    weight = weight.clamp(-3e38, 3e38).float()
    packed, kept = encode_mxfp4(
        weight, torch.tensor([scale], dtype=torch.uint8), implementation=implementation
    )
    if scale in (0, 1):  # float32 itself has no room for the neighbours of ties among its subnormals
        wanted = {i: code for i, code in enumerate(expected) if i % 4 in (1, 3) or i >= 28}
    else:
        wanted = dict(enumerate(expected))
    assert {i: code for i, code in enumerate(codes_of(packed)) if i in wanted} == wanted
    assert kept.tolist() == [scale]


def test_each_element_becomes_the_nearest_representable_value():
    """Brute force over all sixteen codes, in float64, for elements within the range of their scale."""
    weight = torch.randn(40, 64) * torch.logspace(-6, 3, 40).unsqueeze(1)
    scale = mxfp4_scales(weight) + 1  # one more, so that nothing saturates
    decoded = decode_mxfp4(*encode_mxfp4(weight, scale), torch.float64)
    values = torch.tensor([value_of(c, 127) for c in range(16)], dtype=torch.float64)
    grid = values * scale.double().sub(127).exp2().repeat_interleave(32, dim=1).unsqueeze(-1)
    nearest = (grid - weight.double().unsqueeze(-1)).abs().min(dim=-1).values
    assert torch.equal((decoded - weight.double()).abs(), nearest)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_decoding_and_encoding_with_the_same_scales_gives_every_byte_back(dtype):
    packed = torch.arange(256, dtype=torch.uint8).repeat(
        253, 1
    )  # -0 among the codes, subnormals among the values
    scale = torch.arange(253, dtype=torch.uint8).unsqueeze(1).repeat(1, 16)
    again, kept = encode_mxfp4(decode_mxfp4(packed, scale, dtype), scale)
    assert torch.equal(again, packed)
    assert kept is scale


@given(st.lists(st.integers(0, 3), max_size=3), st.integers(0, 4), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_bytes_survive_the_round_trip_in_any_shape(leading, groups, seed):
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(256, (*leading, 16 * groups), dtype=torch.uint8, generator=generator)
    scale = torch.randint(253, (*leading, groups), dtype=torch.uint8, generator=generator)
    again, _ = encode_mxfp4(decode_mxfp4(packed, scale), scale)
    assert torch.equal(again, packed)


# --------------------------------------------------------------------------------------------------- linear


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 6e-3)]
)
@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (255, 64), (256, 96), (600, 192)])
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_a_product_with_packed_weights_equals_the_product_with_decoded_ones(
    tokens, rows, columns, dtype, limit
):
    x = torch.randn(tokens, columns).to(dtype)
    packed, scale = encode_mxfp4(torch.randn(rows, columns) * torch.logspace(-3, 3, rows).unsqueeze(1))
    weight = decode_mxfp4(packed, scale, torch.float64, implementation="reference")
    product = mxfp4_linear(x, packed, scale)
    assert (product.shape, product.dtype) == ((tokens, rows), dtype)
    # Each element may err in proportion to the magnitudes that it sums, not to what they cancel to.
    error = (product.double() - x.double() @ weight.T).abs()
    assert bool((error <= limit * (x.double().abs() @ weight.abs().T)).all())
    reference = mxfp4_linear(x.double(), packed, scale, implementation="reference")
    assert torch.equal(reference, x.double() @ weight.T)


def test_equal_products_have_equal_bits_and_other_rows_do_not_matter():
    x = torch.randn(3, 128)
    packed, scale = random_packed(700, 64), torch.randint(110, 130, (700, 4), dtype=torch.uint8)
    product = mxfp4_linear(x, packed, scale)
    assert torch.equal(mxfp4_linear(x, packed, scale), product)
    assert torch.equal(mxfp4_linear(x, packed[:512], scale[:512]), product[:, :512])


# --------------------------------------------------------------------------------------------------- errors


def test_numbers_that_are_not_finite_are_named_with_their_place():
    for number in (float("nan"), float("inf"), -float("inf")):
        weight = torch.zeros(4, 64)
        weight[2, 33] = number
        for encode in (mxfp4_scales, encode_mxfp4):
            with pytest.raises(
                InvalidInput, match=r"weight\[2, 33\] is -?(nan|inf); want values finite in float32"
            ):
                encode(weight)
    with pytest.raises(InvalidInput, match=r"weight\[1\] is 1e\+39; want values finite in float32"):
        mxfp4_scales(torch.tensor([0.0, 1e39] * 16, dtype=torch.float64))


def test_scales_that_overflow_or_are_nan_are_named_with_their_place():
    for byte in (253, 254, 255):
        scale = torch.full((2, 2), 120, dtype=torch.uint8)
        scale[1, 0] = byte
        for call in (
            lambda s: decode_mxfp4(random_packed(2, 32), s),
            lambda s: encode_mxfp4(torch.zeros(2, 64), s),
            lambda s: mxfp4_linear(torch.zeros(1, 64), random_packed(2, 32), s),
        ):
            with pytest.raises(InvalidInput, match=rf"scale\[1, 0\] is {byte}; want at most 252"):
                call(scale)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda p, s: mxfp4_scales(torch.zeros(2, 33)), r"weight is torch.float32 \(2, 33\).*multiple of 32"),
        (lambda p, s: mxfp4_scales(torch.tensor(1.0)), r"weight is torch.float32 \(\)"),
        (lambda p, s: encode_mxfp4(torch.zeros(2, 64, dtype=torch.int8)), r"torch.int8.*want floating point"),
        (
            lambda p, s: encode_mxfp4(torch.zeros(2, 64), s.int()),
            r"scale is torch.int32 \(2, 2\).*want uint8",
        ),
        (lambda p, s: encode_mxfp4(torch.zeros(2, 64), s[:1]), r"scale is torch.uint8 \(1, 2\).*\(2, 2\)"),
        (lambda p, s: decode_mxfp4(p.char(), s), "packed is torch.int8"),
        (lambda p, s: decode_mxfp4(p[:, :30], s), r"packed is torch.uint8 \(2, 30\).*multiple of 16"),
        (lambda p, s: decode_mxfp4(p, s[:, :1]), r"scale is torch.uint8 \(2, 1\).*want uint8 \(2, 2\)"),
        (lambda p, s: decode_mxfp4(p, s, torch.float16), "dtype is torch.float16; want bfloat16"),
        (lambda p, s: mxfp4_linear(torch.zeros(3, 32), p, s), r"x is \(3, 32\), packed is \(2, 32\)"),
        (lambda p, s: mxfp4_linear(torch.zeros(64), p, s), r"x is \(64,\)"),
        (lambda p, s: mxfp4_linear(torch.zeros(3, 64).half(), p, s), "x is torch.float16"),
        (lambda p, s: mxfp4_linear(torch.zeros(3, 64, requires_grad=True), p, s), "there is no backward"),
    ],
)
def test_shapes_and_dtypes_that_do_not_fit_are_named(call, said):
    with pytest.raises(InvalidInput, match=said):
        call(torch.zeros(2, 32, dtype=torch.uint8), torch.full((2, 2), 127, dtype=torch.uint8))


def test_there_is_no_kernel_and_asking_for_one_is_an_error():
    with pytest.raises(KernelUnavailable, match="mxfp4_scales: has no Triton kernel"):
        mxfp4_scales(torch.zeros(1, 32), implementation="triton")
    packed, scale = random_packed(1, 16), torch.zeros(1, 1, dtype=torch.uint8)
    with pytest.raises(KernelUnavailable, match="decode_mxfp4: has no Triton kernel"):
        decode_mxfp4(packed, scale, torch.float64, implementation="triton")
