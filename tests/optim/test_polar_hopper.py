"""Newton-Schulz of whole matrices in Gluon, on a CPU: against its equation, what is late as late as may be.

Beside what `gluon_on_cpu` checks: copies out of shared memory read it when their reading is waited for, and
are in memory when their writing is; no warp overwrites a chunk that another may still be loading from.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))
from gluon_on_cpu import Barrier, Machine, Pointer, Shared, as_python, names, of, settled

from openk3.ops.dispatch import triton_problem
from openk3.optim.newton_schulz import COEFFICIENTS, _iterate

pytestmark = pytest.mark.skipif(triton_problem("cpu") is not None, reason="needs the triton package")

Tensor = torch.Tensor


class Box:
    """A descriptor: boxes of `[1, ...]` of `x`, zero outside, where nothing is stored either."""

    def __init__(self, x: Tensor, box: list[int]) -> None:
        self.x, self.dtype, self.layout = x, torch.float64, None
        self.block_type = types.SimpleNamespace(shape=box)

    def place(self, at: list[Any]) -> Tensor:
        n, r, c = (int(i) for i in at)
        height, width = self.block_type.shape[1:]
        return self.x[n, r : r + height, c : c + width]


class Tile(Shared):
    dtype = torch.float64
    loaded_in = -1

    def index(self, i: Any) -> Any:
        return self.parts.setdefault(int(i), Tile(self.machine, self.data[int(i)]))

    def reshape(self, shape: list[int]) -> Seen:
        return Seen(self, self.data.view(shape))

    def permute(self, order: tuple[int, ...]) -> Seen:
        return Seen(self, self.data.permute(order))

    def store(self, value: Tensor) -> None:
        assert self.read_in.get(0, -1) < self.machine.barriers_passed, (
            "a product of another warp may be reading"
        )
        super().store(value)


class Seen:
    """A tile the other way round, or without its first axis."""

    def __init__(self, tile: Tile, data: Tensor) -> None:
        self.tile, self.data, self.dtype = tile, data, torch.float64

    def permute(self, order: tuple[int, ...]) -> Seen:
        return Seen(self.tile, self.data.permute(order))

    def load(self, layout: object) -> Tensor:
        self.tile.loaded_in = self.tile.machine.barriers_passed
        return self.data.clone()

    def store(self, value: Tensor) -> None:
        tile, machine = self.tile, self.tile.machine
        last = max(tile.loaded_in, tile.read_in.get(0, -1))
        assert last < machine.barriers_passed, "another warp may be loading"
        self.data.copy_(value)
        tile.unpublished = True
        machine.stored.append(tile)


class Late(Machine):
    def __init__(self, program: int) -> None:
        super().__init__(program)
        self.leaving: list[tuple[Tensor, Tile]] = []
        self.written: list[tuple[Tensor, Tensor]] = []

    def allocate_shared_memory(self, dtype: Any, shape: list[int], layout: object) -> Any:
        ring = super().allocate_shared_memory(dtype, shape, layout)
        return Tile(self, ring.data) if isinstance(ring, Shared) else ring

    def async_copy_global_to_shared(  # type: ignore[override]
        self, source: Box, at: list[Any], barrier: Barrier, tile: Tile, pred: Any
    ) -> None:
        if pred:
            assert tile.loaded_in < self.barriers_passed, "a copy overwrites what a warp may be loading"
            assert all(tile is not one for _, one in self.leaving), "a copy overwrites what is being copied"
            inside = source.place(at)
            height, width = source.block_type.shape[1:]
            matrix = torch.zeros(height, width, dtype=torch.float64)
            matrix[: inside.shape[0], : inside.shape[1]] = inside
            flat = Shared(self, tile.data[0])
            flat.read_in = tile.read_in
            assert not any(tile is of_(o) for product in self.under_way for o in product.operands)
            super().async_copy_global_to_shared((matrix, (height, width)), [0, 0], barrier, flat, pred)

    def async_copy_shared_to_global(self, target: Box, at: list[Any], tile: Tile) -> None:
        assert not tile.unpublished, "a copy reads what no fence and barrier publish"
        self.leaving.append((target.place(at), tile))

    def store_wait(self, pendings: int) -> None:
        assert pendings == 0
        for place, tile in self.leaving:
            self.written.append((place, tile.data[0, : place.shape[0], : place.shape[1]].clone()))
        self.leaving.clear()

    def finish_writing(self) -> None:
        self.store_wait(0)
        for place, values in self.written:
            place.copy_(values)
        self.written.clear()

    def warpgroup_mma_wait(self, pending: int, deps: tuple[Any, ...]) -> Any:
        """Sums that go on are not settled: whoever reads one finds no tensor."""
        going_on = self.under_way[len(self.under_way) - pending :] if pending else []
        super().warpgroup_mma_wait(pending, tuple(d for d in deps if d not in going_on) or (torch.zeros(()),))
        values = tuple(d if d in going_on else settled(d) for d in deps)
        return values[0] if len(values) == 1 else values

    def _operand(self, operand: Any) -> Tensor:
        if isinstance(operand, Seen):
            super()._operand(operand.tile)
            return operand.data
        return super()._operand(operand)


def of_(operand: Any) -> Any:
    return operand.tile if isinstance(operand, Seen) else of(operand)


def orthogonal_factors(x: Tensor, triples: Any) -> None:
    from openk3.optim.fused.polar_hopper import polar_hopper

    tall = x.shape[1] > x.shape[2]
    box = Box(x, [1, 64, 128] if tall else [1, 128, 64])
    table = Pointer(torch.tensor(triples, dtype=torch.float64))
    for program in range(len(x)):
        machine = Late(program)
        found = names(machine)
        found["gl"].where = torch.where
        instead = {"_written": machine.finish_writing}
        kernel = as_python(polar_hopper, found, instead)
        kernel(box, table, len(triples), CHUNKS=-(-max(x.shape[1:]) // 64), TALL=tall)
        assert not machine.under_way and not machine.leaving
        machine.finish_writing()


# As many chunks as there are slots, more; whole and broken ones; experts; either way round.
@pytest.mark.parametrize(
    "shape", [(416, 256), (256, 416), (256, 256), (264, 256), (256, 320), (704, 256), (256, 584)]
)
def test_every_matrix_becomes_its_factor(shape):
    triples = COEFFICIENTS["quintic"].triples[:3]
    x = torch.randn(2, *shape, dtype=torch.float64)
    x /= torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    exact = _iterate(x.mT if shape[0] > shape[1] else x, triples)
    orthogonal_factors(x, triples)
    torch.testing.assert_close(x, exact.mT if shape[0] > shape[1] else exact, rtol=1e-10, atol=1e-12)


def test_one_iteration_and_none_of_a_zero():
    x = torch.zeros(1, 416, 256, dtype=torch.float64)
    x[0, 3, 5] = 0.5
    orthogonal_factors(x, ((2.0, -1.0, 0.5),))
    exact = torch.zeros_like(x)
    exact[0, 3, 5] = 0.5 * (2.0 - 0.25 + 0.5 * 0.0625)
    torch.testing.assert_close(x, exact)
