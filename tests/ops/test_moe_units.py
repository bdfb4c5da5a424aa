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
        assert worst_element(mine[None], oracle[None]) < 3e-6


def test_situ_is_finite_where_exponentials_are_not():
    from openk3.ops.moe.kernels import units

    gate, up = torch.tensor([-1e4, -200.0, 1e4, 0.0, -0.0]), torch.tensor([1e4, -1e4, -1e4, 0.0, 3.0])
    each = [torch.full_like(gate, value) for value in (1 / 4, 1 / 25, 4.0, 25.0)]
    value, *slopes = run(units.SITU_PARTIALS.value, [gate, up, *each], 3)
    assert value.tolist() == [0, 0, -100, 0, 0]
    for mine in slopes:
        assert mine.isfinite().all()
