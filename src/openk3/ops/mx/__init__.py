"""MXFP4, the format of K3's routed experts: encode, decode, and multiply without expanding (report §4.1.4).

A weight `[..., out, in]` is stored as in the release: packed `uint8 [..., out, in / 2]`, column 2j of a row
in the low nibble of byte j and column 2j + 1 in the high one, each a sign bit above the index of a magnitude
0, 0.5, 1, 1.5, 2, 3, 4, 6 (E2M1); and `uint8 [..., out, in / 32]`, byte s for the scale 2^(s - 127) of 32
neighbouring columns (E8M0). A value is magnitude times scale.

Knows nothing of checkpoints, of experts, or of quantised activations.
"""

from __future__ import annotations

import torch

from openk3.errors import InvalidInput
from openk3.ops.dispatch import Implementation, Kernel, choose
from openk3.ops.mx.rounding import KERNEL as ROUNDING_KERNEL
from openk3.ops.mx.rounding import mxfp4_rounded, mxfp8_rounded
from openk3.ops.precision import own_dtypes

__all__ = [
    "GROUP",
    "decode_mxfp4",
    "encode_mxfp4",
    "mxfp4_linear",
    "mxfp4_rounded",
    "mxfp4_scales",
    "mxfp8_rounded",
]

Tensor = torch.Tensor

GROUP = 32
"""Neighbouring columns that share a scale."""
LARGEST_SCALE = 252
"""Under larger scale bytes 6 times the scale is beyond bfloat16; 255 is NaN."""
_EXACT = (torch.bfloat16, torch.float32, torch.float64)

KERNEL = Kernel(
    "encode_mxfp4, decode_mxfp4",
    takes="bf16, fp16 or fp32; decoded to bf16 or fp32",
    checked_on="H200 (sm_90)",
)
KERNELS = (KERNEL, ROUNDING_KERNEL)


@own_dtypes
def mxfp4_scales(weight: Tensor, *, implementation: Implementation | None = None) -> Tensor:
    """The scale bytes of a weight by the EVEN rule, byte for byte those of compressed-tensors.

    A group's largest magnitude is rounded to one mantissa bit (from 1.75 on to the next power of two); its
    exponent less two, biased by 127, is the byte. Over its scale the largest element is then 3.5 to 7, and
    what exceeds 6 saturates. Groups too small for any scale, those of zeros among them, have byte 0; at the
    other end 252 is the largest, since 6 times the next scale overflows.

    Args:
        weight: `[..., in]` floating, in a multiple of 32. Only a CPU looks whether all are finite; on a GPU
            the look would stall the stream, and a group with one that is not comes out as anything.

    Returns:
        uint8 `[..., in / 32]`.

    Raises:
        InvalidInput: the shape or dtype does not fit, or an element is not finite in float32.
    """
    _check_weight("mxfp4_scales", weight)
    match choose("mxfp4_scales", weight, implementation, kernels=False):
        case "reference":
            from openk3.ops.mx.reference import scales as run
        case _:
            from openk3.ops.mx.eager import scales as run
    return run(weight)


@own_dtypes
def encode_mxfp4(
    weight: Tensor, scale: Tensor | None = None, *, implementation: Implementation | None = None
) -> tuple[Tensor, Tensor]:
    """A weight in MXFP4: each element over its scale, to the nearest code, ties to the even one, 6 at most.

    The sign of a zero is kept. A decoded weight encoded with the scale it had gives its bytes back; with
    fresh scales it need not, since a group's largest code may be small.

    Args:
        weight: `[..., in]` floating, in a multiple of 32, finite as for `mxfp4_scales`.
        scale: uint8 `[..., in / 32]`, each at most 252; None takes `mxfp4_scales(weight)`.

    Returns:
        packed uint8 `[..., in / 2]`, and the scale.

    Raises:
        InvalidInput: a shape, dtype or scale does not fit, or an element is not finite in float32.
    """
    _check_weight("encode_mxfp4", weight)
    chosen = choose("encode_mxfp4", weight, implementation, by_default=KERNEL.checked)
    if scale is None:
        if chosen == "triton":
            from openk3.ops.mx.kernels import encode_fresh

            return encode_fresh(weight)
        scale = mxfp4_scales(weight, implementation=implementation)
    else:
        _check_scale("encode_mxfp4", scale, weight.shape[:-1], weight.shape[-1], weight.device)
    match chosen:
        case "reference":
            from openk3.ops.mx.reference import encode as run
        case "triton":
            from openk3.ops.mx.kernels import encode as run
        case _:
            from openk3.ops.mx.eager import encode as run
    return run(weight, scale), scale


@own_dtypes
def decode_mxfp4(
    packed: Tensor,
    scale: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    *,
    implementation: Implementation | None = None,
) -> Tensor:
    """The values of an MXFP4 weight, exactly.

    Args:
        packed: uint8 `[..., in / 2]`.
        scale: uint8 `[..., in / 32]`, each at most 252. Only a CPU looks: on a GPU the look would stall the
            stream, and larger bytes give infinities and NaN.
        dtype: bfloat16, float32 or float64; float16 does not reach as far as the scales do.

    Returns:
        `[..., in]` in `dtype`.

    Raises:
        InvalidInput: a shape, dtype or scale does not fit; the text says where.
    """
    _check_packed("decode_mxfp4", packed, scale)
    if dtype not in _EXACT:
        raise InvalidInput(f"decode_mxfp4: dtype is {dtype}; want bfloat16, float32 or float64")
    narrow = dtype != torch.float64
    match choose("decode_mxfp4", packed, implementation, kernels=narrow, by_default=KERNEL.checked):
        case "reference":
            from openk3.ops.mx.reference import decode as run
        case "triton":
            from openk3.ops.mx.kernels import decode as run
        case _:
            from openk3.ops.mx.eager import decode as run
    return run(packed, scale, dtype)


@own_dtypes
def mxfp4_linear(
    x: Tensor, packed: Tensor, scale: Tensor, *, implementation: Implementation | None = None
) -> Tensor:
    """x times the transpose of an MXFP4 weight, of which only a block of rows is ever expanded.

    For inference: there is no backward. The blocks depend on the weight's shape alone.

    Args:
        x: `[M, in]`, bfloat16, float32 or float64; products are summed as `torch.nn.functional.linear` does.
        packed: uint8 `[out, in / 2]`.
        scale: uint8 `[out, in / 32]`, as for `decode_mxfp4`.

    Returns:
        `[M, out]` in x's dtype.

    Raises:
        InvalidInput: a shape, dtype or scale does not fit, or autograd would want a gradient of x.
    """
    _check_packed("mxfp4_linear", packed, scale)
    if packed.dim() != 2 or x.dim() != 2 or x.shape[1] != 2 * packed.shape[1]:
        raise InvalidInput(
            f"mxfp4_linear: x is {tuple(x.shape)}, packed is {tuple(packed.shape)}; "
            "want [M, in] and [out, in / 2]"
        )
    if x.dtype not in _EXACT or x.device != packed.device:
        raise InvalidInput(
            f"mxfp4_linear: x is {x.dtype} on {x.device}; "
            f"want bfloat16, float32 or float64 on {packed.device}"
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise InvalidInput(
            "mxfp4_linear: x requires a gradient, but there is no backward; use torch.no_grad()"
        )
    match choose("mxfp4_linear", x, implementation, kernels=False):
        case "reference":
            from openk3.ops.mx.reference import linear as run
        case _:
            from openk3.ops.mx.eager import linear as run
    return run(x, packed, scale)


def _check_weight(operator: str, weight: Tensor) -> None:
    if not weight.is_floating_point() or weight.dim() == 0 or weight.shape[-1] % GROUP:
        raise InvalidInput(
            f"{operator}: weight is {weight.dtype} {tuple(weight.shape)}; "
            f"want floating point with a last axis that is a multiple of {GROUP}"
        )
    single = torch.float32
    if (
        weight.device.type == "cpu"
        and weight.numel()
        and not bool(torch.isfinite(torch.stack(torch.aminmax(weight)).to(single)).all())
    ):
        at = (~torch.isfinite(weight.to(single))).nonzero()[0].tolist()
        raise InvalidInput(
            f"{operator}: weight{at} is {float(weight[tuple(at)])}; want values finite in float32"
        )


def _check_packed(operator: str, packed: Tensor, scale: Tensor) -> None:
    if packed.dtype != torch.uint8 or packed.dim() == 0 or packed.shape[-1] % (GROUP // 2):
        raise InvalidInput(
            f"{operator}: packed is {packed.dtype} {tuple(packed.shape)}; "
            f"want uint8 with a last axis that is a multiple of {GROUP // 2}"
        )
    _check_scale(operator, scale, packed.shape[:-1], 2 * packed.shape[-1], packed.device)


def _check_scale(operator: str, scale: Tensor, rows: torch.Size, columns: int, device: torch.device) -> None:
    wanted = (*rows, columns // GROUP)
    if scale.dtype != torch.uint8 or scale.shape != wanted or scale.device != device:
        raise InvalidInput(
            f"{operator}: scale is {scale.dtype} {tuple(scale.shape)} on {scale.device}; "
            f"want uint8 {wanted} on {device}"
        )
    if device.type == "cpu" and scale.numel() and int(scale.amax()) > LARGEST_SCALE:
        at = (scale > LARGEST_SCALE).nonzero()[0].tolist()
        raise InvalidInput(
            f"{operator}: scale{at} is {int(scale[tuple(at)])}; want at most {LARGEST_SCALE}, "
            "since larger scales overflow bfloat16 and 255 is NaN"
        )
