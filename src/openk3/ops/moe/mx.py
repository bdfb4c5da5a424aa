"""Routed experts in MXFP4, stored once in the order in which the kernels read them.

A tile is 64 features by 128 inputs: 64 rows of 16 words, 4 KB side by side, and a word of scales for each.
A row's words are four for each of the four lanes that hold it as an operand of the matrix unit, lane t taking
inputs 2t and 2t + 1 of every eight; so a lane reads 16 bytes and shifts its own operand out of them, and the
inputs keep their order. Two tiles follow each other: gate and up of the same features, or neighbouring
features of the down projection.

    word 4t + 2h + q    low half inputs 64h + 32q + 8i + 2t, high half the ones after those, i = 0..3
    in a half           i = 0: sign 15, magnitude 8..6    1: 12, 5..3    2: 13, 2..0    3: 14, 11..9
    word of scales      byte 2h + q: that of inputs 64h + 32q on, + 126

A magnitude in bits 8..6 is the bf16 number of 2^-126 times its value, and a byte of scales the exponent of a
bf16 number 2^126 times the scale: one multiplication gives the value, exactly. That reaches up to scale byte
128, weights of 12 in magnitude; larger ones are refused. (The released checkpoint has 110 to 123.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from openk3.errors import InvalidInput, KernelUnavailable
from openk3.ops.activation import Activation
from openk3.ops.dispatch import Implementation, Kernel, choose
from openk3.ops.inputs import check_floating
from openk3.ops.moe.plan import DispatchPlan
from openk3.ops.mx import GROUP, decode_mxfp4
from openk3.ops.precision import own_dtypes

Tensor = torch.Tensor

KERNEL = Kernel("mx_expert_ffn", takes="bf16, compute capability 9.0 or more", checked_on="H200 (sm_90)")

FEATURES = 64
INPUTS = 128
LARGEST_SCALE = 128
_BIAS = 126
_SIGN = (15, 12, 13, 14)
_MAGNITUDE = (6, 3, 0, 9)


@dataclass(frozen=True)
class MxExperts:
    """E experts, gate and up `[F, l]`, down `[l, F]`; 32 divides l and F, and zeros fill the tiles up.

    w13: int32 `[E, F / 64, l / 128, 2, 64, 16]`, gate before up.
    w2: int32 `[E, l / 128, F / 128, 2, 64, 16]`.
    s13, s2: their scales, int32, the same without the last axis. Quotients are rounded up.
    width: l. features: F.
    """

    w13: Tensor
    s13: Tensor
    w2: Tensor
    s2: Tensor
    width: int
    features: int

    @classmethod
    def from_checkpoint(
        cls, w1: Tensor, w1_scale: Tensor, w3: Tensor, w3_scale: Tensor, w2: Tensor, w2_scale: Tensor
    ) -> MxExperts:
        """The release's tensors of all experts, stacked (`openk3.ops.mx` says what is in them), reordered.

        Works expert by expert, so that little more than the result is allocated. It looks at the scales:
        on a GPU it waits for the device, once.

        Args:
            w1, w3: uint8 `[E, F, l / 2]`; w2: uint8 `[E, l, F / 2]`.
            w1_scale, w3_scale: uint8 `[E, F, l / 32]`; w2_scale: uint8 `[E, l, F / 32]`.

        Raises:
            InvalidInput: a shape or dtype does not fit, or a scale is above 128.
        """
        given = {
            "w1": w1, "w1_scale": w1_scale, "w3": w3, "w3_scale": w3_scale, "w2": w2, "w2_scale": w2_scale
        }  # fmt: skip
        width, features = _check(given)
        E = len(w1)
        halves = _blocks(features, FEATURES), _blocks(width, INPUTS)
        w13, s13 = _empty(E, *halves, w1.device)
        whole = _blocks(width, 2 * FEATURES), _blocks(features, INPUTS)
        down, s2 = _empty(E, *whole, w1.device)
        for e in range(E):
            for side, (packed, scale) in enumerate(((w1, w1_scale), (w3, w3_scale))):
                w13[e, :, :, side] = _words(packed[e], halves)
                s13[e, :, :, side] = _scales(scale[e], halves)
            split = whole[0] * 2, whole[1]
            down[e] = _words(w2[e], split).view(whole[0], 2, whole[1], FEATURES, -1).transpose(1, 2)
            s2[e] = _scales(w2_scale[e], split).reshape(whole[0], 2, whole[1], FEATURES).transpose(1, 2)
        return cls(w13, s13, down, s2, width, features)

    def decoded(self, e: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """w1, w3 `[F, l]` and w2 `[l, F]` of one expert, exactly; bfloat16, float32 or float64."""
        w1, w3 = (
            _decoded(self.w13[e, :, :, side], self.s13[e, :, :, side], self.features, self.width, dtype)
            for side in (0, 1)
        )
        words, scales = (w[e].transpose(1, 2).flatten(0, 1) for w in (self.w2, self.s2))
        return w1, w3, _decoded(words, scales, self.width, self.features, dtype)


@own_dtypes
def mx_expert_ffn(
    x: Tensor,
    weights: Tensor,
    plan: DispatchPlan,
    experts: MxExperts,
    activation: Activation,
    *,
    implementation: Implementation | None = None,
) -> Tensor:
    """`openk3.ops.moe.expert_ffn` from MXFP4 weights, for inference: there is no backward.

    Args:
        x: `[T, l]`, bfloat16, or float32 or float64 without the kernels. Weights are never rounded.
        weights: `[T, k]` router weights.
        plan: of the same `[T, k]` ids.
        experts: in the kernels' order.
        activation: the gated unit; computed in at least fp32.
        implementation: force "reference", "eager" or "triton".

    Returns:
        `[T, l]` in x's dtype, summed over slots in at least fp32 from slot 0 on. Equal calls give equal bits.

    Raises:
        InvalidInput: a shape or dtype does not fit, or autograd would want a gradient.
        KernelUnavailable: the forced implementation does not exist.
    """
    _check_call(x, weights, plan, experts)
    problem = _kernel_problem(x)
    if implementation == "triton" and problem:
        raise KernelUnavailable(f"mx_expert_ffn: {problem}; ask for implementation='eager'")
    match choose("mx_expert_ffn", x, implementation, kernels=problem is None, by_default=KERNEL.checked):
        case "reference":
            from openk3.ops.moe.mx_eager import mx_expert_ffn_reference as run
        case "triton":
            from openk3.ops.moe.kernels.mx_operator import mx_expert_ffn as run
        case _:
            from openk3.ops.moe.mx_eager import mx_expert_ffn as run
    return run(x, weights, plan, experts, activation)


def _check_call(x: Tensor, weights: Tensor, plan: DispatchPlan, experts: MxExperts) -> None:
    if x.dim() != 2 or x.shape[1] != experts.width or x.device != experts.w13.device:
        raise InvalidInput(
            f"mx_expert_ffn: x is {tuple(x.shape)} on {x.device}; "
            f"want [T, {experts.width}] on {experts.w13.device}"
        )
    wanted = {
        "weights": (weights, plan.rows.shape),
        "plan.rows": (plan.rows, (len(x), *plan.rows.shape[1:])),
        "plan.offsets": (plan.offsets, (len(experts.w13) + 1,)),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor.shape != shape:
            raise InvalidInput(f"mx_expert_ffn: {name} is {tuple(tensor.shape)}; want {tuple(shape)}")
    check_floating("mx_expert_ffn", x=x, weights=weights)
    if x.dtype not in (torch.bfloat16, torch.float32, torch.float64):
        raise InvalidInput(f"mx_expert_ffn: x is {x.dtype}; want bfloat16, float32 or float64")
    if torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad):
        raise InvalidInput("mx_expert_ffn: an input requires a gradient, but there is no backward")


def _kernel_problem(x: Tensor) -> str | None:
    """Why the kernels do not take x, or None. fp32 is for their tests in Triton's interpreter."""
    if x.dtype != torch.bfloat16 and (x.is_cuda or x.dtype != torch.float32):
        return f"x is {x.dtype}; kernels take bfloat16"
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < (9, 0):
        return "kernels are for compute capability 9.0"
    return None


def _check(given: dict[str, Tensor]) -> tuple[int, int]:
    """l and F."""
    w1 = given["w1"]
    if w1.dim() != 3:
        raise InvalidInput(f"MxExperts: w1 is {tuple(w1.shape)}; want [E, F, l / 2]")
    E, F, width = w1.shape[0], w1.shape[1], 2 * w1.shape[2]
    if width % GROUP or F % GROUP or not E * F * width:
        raise InvalidInput(
            f"MxExperts: w1 is {tuple(w1.shape)}; want F and l in multiples of {GROUP}, above 0"
        )
    for name, tensor in given.items():
        rows, columns = (width, F) if name.startswith("w2") else (F, width)
        wanted = (E, rows, columns // (GROUP if name.endswith("_scale") else 2))
        if tensor.shape != wanted or tensor.dtype != torch.uint8 or tensor.device != w1.device:
            raise InvalidInput(
                f"MxExperts: {name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; "
                f"want uint8 {wanted} on {w1.device}"
            )
    names = [name for name in given if name.endswith("_scale")]
    largest = torch.stack([given[name].amax() for name in names]).tolist()
    for name, byte in zip(names, largest, strict=True):
        if byte > LARGEST_SCALE:
            raise InvalidInput(f"MxExperts: {name} has a byte {byte}; want at most {LARGEST_SCALE}")
    return width, F


def _blocks(length: int, size: int) -> int:
    return -(-length // size)


def _empty(E: int, rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    words = torch.empty(E, rows, columns, 2, FEATURES, INPUTS // 8, dtype=torch.int32, device=device)
    return words, torch.empty(E, rows, columns, 2, FEATURES, dtype=torch.int32, device=device)


def _padded(bytes_: Tensor, rows: int, columns: int) -> Tensor:
    padded = bytes_.new_zeros(rows, columns)
    padded[: bytes_.shape[0], : bytes_.shape[1]] = bytes_
    return padded


def _words(packed: Tensor, tiles: tuple[int, int]) -> Tensor:
    """uint8 `[n, K / 2]` -> int32 `[n / 64, K / 128, 64, 16]`."""
    rows, columns = tiles
    packed = _padded(packed, rows * FEATURES, columns * INPUTS // 2)
    codes = packed.view(rows, FEATURES, columns, 2, 2, 4, 4).int()  # ..., h, q, i, t
    low, high = _half(codes & 15), _half(codes >> 4)
    words = (low | (high << 16)).permute(0, 2, 1, 5, 3, 4)  # tile, tile, row, t, h, q
    return words.reshape(rows, columns, FEATURES, INPUTS // 8)


def _half(codes: Tensor) -> Tensor:
    """Four codes `[..., i, t]` in 16 bits `[..., t]`."""
    sign, magnitude = codes >> 3, codes & 7
    half = torch.zeros_like(codes[..., 0, :])
    for i, (s, m) in enumerate(zip(_SIGN, _MAGNITUDE, strict=True)):
        half |= (sign[..., i, :] << s) | (magnitude[..., i, :] << m)
    return half


def _scales(scale: Tensor, tiles: tuple[int, int]) -> Tensor:
    """uint8 `[n, K / 32]` -> int32 `[n / 64, K / 128, 64]`."""
    rows, columns = tiles
    scale = _padded(scale, rows * FEATURES, columns * INPUTS // GROUP) + _BIAS
    return scale.view(torch.int32).view(rows, FEATURES, columns).transpose(1, 2)


def _decoded(words: Tensor, scales: Tensor, n: int, K: int, dtype: torch.dtype) -> Tensor:
    """`_words` and `_scales` back, `[n, K]`."""
    rows, columns = words.shape[:2]
    words = words.reshape(rows, columns, FEATURES, 4, 2, 2).permute(0, 2, 1, 4, 5, 3)  # ..., h, q, t
    bytes_ = _codes(words) | _codes(words >> 16) << 4  # ..., h, q, i, t
    packed = bytes_.to(torch.uint8).reshape(rows * FEATURES, columns * INPUTS // 2)
    scales = scales.transpose(1, 2).clone(memory_format=torch.contiguous_format)
    scale = scales.view(torch.uint8).view(rows * FEATURES, columns * INPUTS // GROUP) - _BIAS
    return decode_mxfp4(packed[:n, : K // 2].contiguous(), scale[:n, : K // GROUP].contiguous(), dtype)


def _codes(halves: Tensor) -> Tensor:
    """`_half` back: `[..., t]` -> `[..., i, t]`."""
    bits = [(halves >> s & 1) << 3 | halves >> m & 7 for s, m in zip(_SIGN, _MAGNITUDE, strict=True)]
    return torch.stack(bits, dim=-2)
