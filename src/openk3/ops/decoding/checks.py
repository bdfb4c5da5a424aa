"""What the operators of a decoding step ask of their arguments: shapes, dtypes, devices, strides."""

from __future__ import annotations

import torch

from openk3.errors import InvalidInput
from openk3.ops.activation import Activation
from openk3.ops.inputs import check_floating

Tensor = torch.Tensor


def check_experts(
    name: str, x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor
) -> bool:
    """Whether kernels take such experts."""
    shapes = [tuple(t.shape) for t in (x, ids, weights, w1, w3, w2)]
    (E, F, L), (n, k) = (tuple(t.shape) if t.dim() == d else (-1,) * d for t, d in ((w1, 3), (ids, 2)))
    if shapes != [(n, L), (n, k), (n, k), (E, F, L), (E, F, L), (E, L, F)]:
        raise InvalidInput(
            f"{name}: got {shapes}; want x [n, l], ids and weights [n, k], w1 and w3 [E, F, l], w2 [E, l, F]"
        )
    check_floating(name, x=x, weights=weights, w1=w1, w3=w3, w2=w2)
    if not x.dtype == w1.dtype == w3.dtype == w2.dtype or ids.dtype != torch.int64 or ids.device != x.device:
        raise InvalidInput(
            f"{name}: x is {x.dtype}, experts are {w1.dtype}, {w3.dtype} and {w2.dtype}, ids are "
            f"{ids.dtype} on {ids.device}; want one dtype, and int64 on {x.device}"
        )
    return max(F, L) <= 4096 and all(t.is_contiguous() for t in (x, ids, weights, w1, w3, w2))


def check_lists(name: str, lists: tuple[Tensor, Tensor], n: int, E: int) -> None:
    found = [(x.dtype, tuple(x.shape)) for x in lists]
    if found != [(torch.int32, (E, n)), (torch.int32, (E,))] or not all(x.is_contiguous() for x in lists):
        raise InvalidInput(f"{name}: lists must be int32 [{E}, {n}] and [{E}], contiguous, got {found}")


def check_into(
    name: str,
    out: Tensor,
    weight: Tensor,
    x: Tensor | None,
    norm: tuple[Tensor, float] | None,
    gate: Tensor | None,
    unit: tuple[Tensor, Tensor, Activation] | None,
) -> None:
    a, b = 0 if x is None else x.shape[-1], 0 if unit is None else unit[0].shape[-1]
    given = [t for t in (out, x, gate, *(unit[:2] if unit else ())) if t is not None]
    if any(t.dim() != 2 for t in (*given, weight)) or not a + b:
        raise InvalidInput(f"{name}: want matrices, and x or a unit, got {[tuple(t.shape) for t in given]}")
    check_floating(name, out=out, weight=weight, x=x, gate=gate, **_pair("unit", unit))
    if any(t.dtype != out.dtype for t in (*given, weight)):
        raise InvalidInput(f"{name}: all must be {out.dtype}, got {[t.dtype for t in (*given, weight)]}")
    if (gate is not None and gate.shape[1] != a) or (unit is not None and unit[1].shape[1] != b):
        raise InvalidInput(
            f"{name}: gate must be as wide as x, up as gate of a unit, got {[tuple(t.shape) for t in given]}"
        )
    if norm is not None:
        check_vectors(name, a, norm[0])
    if weight.shape != (out.shape[1], a + b) or any(len(t) != len(out) for t in given):
        raise InvalidInput(
            f"{name}: weight is {tuple(weight.shape)} for {[tuple(t.shape) for t in given]}; "
            f"want [{out.shape[1]}, {a + b}] and equal rows"
        )
    if not all(t.is_contiguous() for t in (*given, weight)) or (norm is not None and gate is not None):
        raise InvalidInput(f"{name}: tensors must be contiguous, and x has a norm or a gate, not both")


def _pair(name: str, unit: tuple[Tensor, Tensor, Activation] | None) -> dict[str, Tensor]:
    return {} if unit is None else {f"{name}'s gate": unit[0], f"{name}'s up": unit[1]}


def check_rows(name: str, rows: Tensor, joined: Tensor) -> None:
    check_floating(name, rows=rows, joined=joined)
    if rows.dtype != joined.dtype:
        raise InvalidInput(f"{name}: rows are {rows.dtype}, joined matrices {joined.dtype}")


def check_vectors(name: str, width: int, *vectors: Tensor) -> None:
    for x in vectors:
        if x.shape != (width,) or not x.is_contiguous():
            raise InvalidInput(
                f"{name}: gains and queries must be ({width},), contiguous, got {tuple(x.shape)} "
                f"with strides {x.stride()}"
            )


def check_places(name: str, rows: Tensor, dtype: torch.dtype, **tensors: Tensor) -> None:
    """Integers that kernels take addresses from, one for each row."""
    for what, x in tensors.items():
        if x.shape != rows.shape[:1] or x.dtype != dtype or x.device != rows.device or not x.is_contiguous():
            raise InvalidInput(
                f"{name}: {what} must be {dtype} ({len(rows)},) on {rows.device}, contiguous, got {x.dtype} "
                f"{tuple(x.shape)} on {x.device}"
            )
