"""MXFP4 and MXFP8 on a GPU: the bits that a CPU gives, subnormals included, without waiting.

Run with `pytest -m gpu tests/gpu`.
"""

from __future__ import annotations

import pytest
import torch

from openk3.ops.mx import decode_mxfp4, encode_mxfp4, mxfp4_rounded, mxfp8_rounded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal, the sign of zeros included."""
    actual = actual.cpu()
    return torch.equal(actual, expected) and torch.equal(torch.signbit(actual), torch.signbit(expected))


def numbers(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Groups of all magnitudes, some of few bits so that ties are common, some of zeros."""
    make = torch.Generator().manual_seed(seed)
    exponent = torch.randint(-140, 126, (3000, 1), generator=make)
    x = torch.randn(3000, 96, generator=make)
    x[::2] = (x[::2] * 8).round() / 8
    x[::97] = 0
    return torch.ldexp(x.double(), exponent).to(dtype).nan_to_num(posinf=0, neginf=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("seed", range(3))
def test_encoding_and_rounding_give_a_cpus_bits(dtype, seed):
    x = numbers(dtype, seed)
    on_gpu = x.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed, scale = encode_mxfp4(on_gpu, implementation="triton")
        given, _ = encode_mxfp4(on_gpu, scale, implementation="triton")
        four = mxfp4_rounded(on_gpu, implementation="triton")
        eight = mxfp8_rounded(on_gpu, implementation="triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected, expected_scale = encode_mxfp4(x)
    assert torch.equal(scale.cpu(), expected_scale)
    assert torch.equal(packed.cpu(), expected) and torch.equal(given, packed)
    assert same_bits(four, mxfp4_rounded(x)) and same_bits(eight, mxfp8_rounded(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_byte_under_every_scale_decodes_exactly(dtype):
    packed = torch.arange(256, dtype=torch.uint8).repeat(253, 1)
    scale = torch.arange(253, dtype=torch.uint8).unsqueeze(1).repeat(1, 16)
    decoded = decode_mxfp4(packed.cuda(), scale.cuda(), dtype, implementation="triton")
    assert same_bits(decoded, decode_mxfp4(packed, scale, dtype))
