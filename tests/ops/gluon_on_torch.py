"""Runs the text of Gluon kernels on torch, program by program, because Triton's interpreter runs no Gluon.

Layouts mean nothing here, copies and products happen at once, and bf16 is fp32. So it finds wrong offsets,
masks, sums, and stages that are read before they are complete or by a wrong parity; it finds no race.
"""

from __future__ import annotations

import math
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

Tensor = torch.Tensor


def _tensor(x: Any) -> Tensor:
    return x if isinstance(x, Tensor) else torch.tensor(x)


class Pointer:
    """Into a flat tensor; `offset` is a number or a tensor of them."""

    def __init__(self, flat: Tensor, offset: Any = 0) -> None:
        self.flat, self.offset = flat, offset

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.flat, self.offset + more)


class Boxes:
    """A descriptor: boxes of a matrix whose rows are those of `x` `[T, ...]`, zero outside."""

    def __init__(self, x: Tensor, tokens: int, columns: int) -> None:
        width = sum((n - 1) * stride for n, stride in zip(x.shape[1:], x.stride()[1:], strict=True)) + 1
        self.matrix = torch.as_strided(x, (len(x), width), (x.stride(0), 1), x.storage_offset())
        self.size, self.layout = (tokens, columns), None
        self.block_type = SimpleNamespace(nbytes=2 * tokens * columns)


class Shared:
    """Shared memory, or a view of it; nothing is there before it is written."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def index(self, i: Any) -> Shared:
        return Shared(self.values[int(i)])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.values.permute(order))

    def load(self, layout: None) -> Tensor:
        return self.values.clone()

    def store(self, values: Tensor) -> None:
        self.values.copy_(values)


class Machine:
    """What a kernel's module calls, for one program at a time."""

    def __init__(self) -> None:
        self.program = (0, 0)
        self.barriers: dict[int, SimpleNamespace] = {}

    def run(self, kernel: Any, grid: tuple[int, int], *args: Any, **options: Any) -> None:
        for x in range(grid[0]):
            for y in range(grid[1]):
                self.program, self.barriers = (x, y), {}
                kernel(*args, **options)

    def replace(self, module: ModuleType, monkeypatch: Any) -> None:
        """Every name of `module` that means something to the card alone; kernels become plain functions."""
        names = {
            "gl": self._language(),
            "tma": SimpleNamespace(async_copy_global_to_shared=self._copy),
            "mbarrier": SimpleNamespace(
                MBarrierLayout=lambda: None, init=self._init, expect=self._expect, wait=self._wait
            ),
            "warpgroup_mma": self._product,
            "warpgroup_mma_init": lambda x: x,
            "warpgroup_mma_wait": lambda outstanding, deps: deps[0] if len(deps) == 1 else tuple(deps),
            "fence_async_shared": lambda: None,
            "short_exp2": torch.exp2,
            "short_sigmoid": torch.sigmoid,
            "DTYPE": torch.float32,
        }
        for name, value in list(vars(module).items()):
            if name in names:
                monkeypatch.setattr(module, name, names[name])
            elif type(value).__name__ == "constexpr":
                monkeypatch.setattr(module, name, value.value)
            elif hasattr(value, "fn") and value.fn.__module__ == module.__name__:
                monkeypatch.setattr(module, name, value.fn)

    def _language(self) -> SimpleNamespace:
        def nothing(*_: Any, **__: Any) -> None:
            return None

        def zeros(shape: list[int], dtype: Any, layout: None = None) -> Tensor:
            return torch.zeros(shape)

        return SimpleNamespace(
            bfloat16=torch.float32, float32=torch.float32, int32=torch.int64, int64=torch.int64,
            NVMMADistributedLayout=nothing, DotOperandLayout=nothing,
            BlockedLayout=nothing, SliceLayout=nothing,
            num_warps=lambda: 8, static_range=range, thread_barrier=nothing, zeros=zeros,
            program_id=lambda axis: torch.tensor(self.program[axis]),
            maximum=lambda a, b: torch.maximum(_tensor(a), _tensor(b)),
            minimum=lambda a, b: torch.minimum(_tensor(a), _tensor(b)),
            arange=lambda start, end, layout=None: torch.arange(start, end),
            full=lambda shape, value, dtype, layout=None: torch.full(shape, value),
            convert_layout=lambda x, layout: x,
            where=lambda c, a, b: torch.where(_tensor(c), _tensor(a), _tensor(b)),
            sum=lambda x, axis: x.sum(axis), max=_largest, log2=torch.log2, load=_load, store=_store,
            allocate_shared_memory=lambda dtype, shape, layout: Shared(torch.full(shape, math.nan)),
        )  # fmt: skip

    def _init(self, barrier: Shared, count: int) -> None:
        self.barriers[barrier.values.data_ptr()] = SimpleNamespace(wanted=0, arrived=0, phase=-1)

    def _expect(self, barrier: Shared, size: int) -> None:
        state = self.barriers[barrier.values.data_ptr()]
        if state.wanted == state.arrived:
            state.wanted, state.arrived, state.phase = 0, 0, state.phase + 1
        state.wanted += size

    def _wait(self, barrier: Shared, parity: Any) -> None:
        state = self.barriers[barrier.values.data_ptr()]
        assert state.wanted == state.arrived > 0, "waits for bytes that nobody sends"
        assert state.phase % 2 == int(parity), "waits for the other phase"

    def _copy(self, boxes: Boxes, at: list[Any], barrier: Shared, tile: Shared) -> None:
        row, column = int(at[0]), int(at[1])
        part = boxes.matrix[row : row + boxes.size[0], column : column + boxes.size[1]]
        tile.values.zero_()
        tile.values[: part.shape[0], : part.shape[1]] = part
        self.barriers[barrier.values.data_ptr()].arrived += boxes.block_type.nbytes

    @staticmethod
    def _product(a: Any, b: Shared, acc: Tensor, *, use_acc: bool = True, is_async: bool = False) -> Tensor:
        product: Tensor = (a.values if isinstance(a, Shared) else a) @ b.values
        return acc + product if use_acc else product


def _largest(x: Tensor, axis: int) -> Tensor:
    return (x.nan_to_num(-math.inf, math.inf, -math.inf) if x.is_floating_point() else x).amax(axis)


def _load(pointer: Pointer, mask: Any = True, other: float = 0.0) -> Tensor:
    offset, mask = torch.broadcast_tensors(_tensor(pointer.offset), _tensor(mask))
    found = pointer.flat[torch.where(mask, offset, 0)]
    return torch.where(mask, found, torch.tensor(other, dtype=found.dtype))


def _store(pointer: Pointer, values: Any, mask: Any = True) -> None:
    parts = (_tensor(pointer.offset), _tensor(values), _tensor(mask))
    offset, values, mask = torch.broadcast_tensors(*parts)
    pointer.flat[offset[mask]] = values[mask].to(pointer.flat.dtype)
