"""The PTX of the gated units, which no CPU runs: read here line by line and computed in fp32."""

from __future__ import annotations

import re
import struct

import numpy as np
import pytest
import torch
from closeness import worst_element

from openk3.ops.activation import Activation
from openk3.ops.dispatch import triton_problem

pytestmark = pytest.mark.skipif(triton_problem("cpu") is not None, reason="needs the triton package")

OPERATIONS = {
    "mul": np.multiply,
    "add": np.add,
    "sub": np.subtract,
    "abs": np.abs,
    "neg": np.negative,
    "min": np.minimum,
    "ex2": np.exp2,
    "rcp": lambda x: np.float32(1) / x,
    "fma": lambda x, y, z: x * y + z,
    "copysign": lambda sign, x: np.copysign(x, sign),
    "setp": np.less,
    "selp": lambda yes, no, which: np.where(which, yes, no),
}


def run(ptx: str, arguments: list[torch.Tensor], results: int) -> list[torch.Tensor]:
    """What `ptx` leaves in $0.. for arguments in the registers after those, each instruction in fp32."""
    values = {f"${results + i}": x.numpy() for i, x in enumerate(arguments)}
    for line in re.findall(r"[^;{}]+", re.sub(r"\.reg[^;]*;", "", ptx)):
        if not line.strip():
            continue
        name, operands = line.split(None, 1)
        target, *sources = (word.strip() for word in operands.split(","))
        read = [
            np.float32(struct.unpack(">f", bytes.fromhex(source[2:]))[0])
            if source.startswith("0f")
            else values[source]
            for source in sources
        ]
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            values[target] = OPERATIONS[name.split(".")[0]](*read)
    return [torch.from_numpy(values[f"${i}"]) for i in range(results)]


@pytest.mark.parametrize(
    ("scale", "caps"), [(1e-3, (4, 25)), (0.1, (1, 0.5)), (3, (4, 25)), (3, (1, 0.5)), (100, (4, 25))]
)
def test_situ_and_its_derivatives_are_those_of_float64(scale, caps):
    from openk3.ops.moe.kernels import units

    gate, up = (torch.randn(2000) * scale for _ in range(2))
    each = [torch.full_like(gate, value) for value in (1 / caps[0], 1 / caps[1], *caps)]
    exact = Activation("situ", *caps).partials(gate.double(), up.double())
    partials = run(units.SITU_PARTIALS.value, [gate, up, *each], 3)
    for mine, oracle in zip(partials, exact, strict=True):
        # An exponent of up to 126 is rounded to 2^-24 of itself: 5e-6 of the power, of three powers.
        assert worst_element(mine[None], oracle[None]) < (2e-5 if scale == 100 else 3e-6)


def test_situ_is_finite_where_exponentials_are_not():
    from openk3.ops.moe.kernels import units

    gate, up = torch.tensor([-1e4, -200.0, 1e4, 0.0, -0.0]), torch.tensor([1e4, -1e4, -1e4, 0.0, 3.0])
    each = [torch.full_like(gate, value) for value in (1 / 4, 1 / 25, 4.0, 25.0)]
    value, *slopes = run(units.SITU_PARTIALS.value, [gate, up, *each], 3)
    assert value.tolist() == [0, 0, -100, 0, 0]
    for mine in slopes:
        assert mine.isfinite().all()


def short_partials(gate: torch.Tensor, up: torch.Tensor, caps: tuple[float, float]) -> list[torch.Tensor]:
    from openk3.ops.moe.kernels import units

    factors = (-2 * np.log2(np.e) / cap for cap in caps)
    each = [torch.full_like(gate, value) for value in (*factors, *caps)]
    return run(units.SITU_PARTIALS_SHORT.value, [gate, up, *each], 3)


@pytest.mark.parametrize(
    ("scale", "caps"), [(1e-2, (4, 25)), (0.1, (1, 0.5)), (3, (4, 25)), (3, (1, 0.5)), (100, (4, 25))]
)
def test_the_short_form_errs_by_roundings_of_the_caps(scale, caps):
    gate, up = (torch.randn(2000) * scale for _ in range(2))
    exact = Activation("situ", *caps).partials(gate.double(), up.double())
    largest = caps[0] * caps[1], caps[1], caps[0]  # of a value, of its slope by gate, by up
    for mine, oracle, most in zip(short_partials(gate, up, caps), exact, largest, strict=True):
        assert ((mine - oracle).abs() <= 1e-6 * oracle.abs() + 3e-7 * most).all()


def test_the_short_form_is_finite_where_exponentials_are_not_and_keeps_nan():
    nan, inf = float("nan"), float("inf")
    gate = torch.tensor([-1e4, -200.0, 1e4, 0.0, -0.0, inf, -inf, nan, 1.0])
    up = torch.tensor([1e4, -1e4, -1e4, 0.0, 3.0, inf, -inf, 1.0, nan])
    parts = short_partials(gate, up, (4.0, 25.0))
    torch.testing.assert_close(parts[0][:7], torch.tensor([0.0, 0, -100, 0, 0, 100, 0]), rtol=1e-6, atol=1e-9)
    for mine in parts:
        assert mine[:7].isfinite().all()
    assert parts[0][7:].isnan().all()
