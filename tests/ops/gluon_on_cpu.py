"""Runs a kernel in Gluon for Hopper on a CPU, program after program: what it computes and what it breaks.

Layouts and lanes do not exist here: a tile is a float64 tensor. What the card does late is done as late as it
may be, so that reading too early or overwriting too early gives NaN or an error:

    a copy by threads           makes its tile NaN when it starts, and fills it when its group is waited for
    a copy by the copy engine   makes its tile NaN when it starts, and fills it when its barrier is waited for
    a warpgroup product         reads its operands when it is waited for

Partitions (`warp_specialize`) run one at a time and change at waits, arrivals and barriers, drawn by a seed.

Errors: waiting for a phase that nobody completes, another number of bytes than expected, a product's result
taken before it is waited for, reading by products what no fence and barrier of the threads published, and
copies over a tile that some warp may still be reading, of another partition too: then an arrival after its
reading must have been waited for.
"""

from __future__ import annotations

import random
import threading
import types
from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor


class Pointer:
    """Into a contiguous tensor; `pointer + offsets`."""

    def __init__(self, data: Tensor, offset: Any = 0) -> None:
        self.data, self.offset = data, offset
        self.dtype = types.SimpleNamespace(element_ty=torch.float64)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.data, self.offset + more)


class Shared:
    """A tile of shared memory, or a ring of them."""

    def __init__(self, machine: Machine, data: Tensor) -> None:
        self.machine, self.data = machine, data
        self.unpublished = False
        self.read_in: dict[int, int] = {}  # by partition: after which of its barriers a product last read it
        self.parts: dict[int, Any] = {}

    def index(self, i: Any) -> Any:
        return self.parts.setdefault(int(i), Shared(self.machine, self.data[int(i)]))

    def permute(self, order: tuple[int, ...]) -> View:
        return View(self, order)

    def _reinterpret(self, dtype: Any, shape: list[int], layout: object) -> Shared:
        return Shared(self.machine, self.data.view(shape))

    def store(self, value: Tensor) -> None:
        self.data.copy_(value)
        self.unpublished = True
        self.machine.partition.stored.append(self)

    def load(self, layout: object) -> Tensor:
        self.read_in[self.machine.partition.number] = self.machine.barriers_passed
        return self.data.clone()


class View:
    def __init__(self, tile: Shared, order: tuple[int, ...]) -> None:
        self.tile, self.order = tile, order

    def load(self, layout: object) -> Tensor:
        return self.tile.load(layout).permute(self.order)


class Barrier:
    def __init__(self) -> None:
        self.expected = self.phases = self.arrived = 0
        self.count = 1
        self.copies: list[tuple[Shared, Tensor]] = []
        self.carries: dict[int, int] = {}  # of partitions that arrived: how many barriers they had passed

    def passed(self, phase: int) -> bool:
        return self.phases > 0 and (self.phases - 1) & 1 == phase


class Ring:
    """Barriers, one a stage."""

    def __init__(self, number: int) -> None:
        self.barriers = [Barrier() for _ in range(number)]

    def index(self, i: Any) -> Barrier:
        return self.barriers[int(i)]


class Product:
    """A warpgroup product under way; `value` when it is done."""

    def __init__(self, left: Any, right: Any, acc: Any) -> None:
        self.operands, self.acc = (left, right), acc
        self.value: Tensor | None = None


class Partition:
    """Warps that share their barrier, and what is under way for them."""

    def __init__(self, number: int) -> None:
        self.number, self.barriers_passed = number, 0
        self.under_way: list[Product] = []
        self.stored: list[Shared] = []
        self.fenced = False
        self.knows: dict[int, int] = {}  # barriers of other partitions that its waits have seen


class StoppedError(Exception):
    """Another partition failed."""


class Turns:
    """Threads of which one runs at a time."""

    def __init__(self, machine: Machine, seed: int) -> None:
        self.machine, self.draw = machine, random.Random(seed)
        self.change = threading.Condition()
        self.wants: dict[int, Callable[[], bool] | None] = {}  # of those alive: what each waits for
        self.running = -1
        self.failure: BaseException | None = None

    def choose(self) -> None:
        able = [n for n, ready in self.wants.items() if ready is None or ready()]
        if self.wants and not able and self.failure is None:
            self.failure = AssertionError("this wait never ends")
        self.running = self.draw.choice(able) if able else -1
        self.change.notify_all()

    def pause(self, number: int, ready: Callable[[], bool] | None) -> None:
        """Lets others go on, and comes back when `ready`."""
        with self.change:
            self.wants[number] = ready
            self.choose()
            self.change.wait_for(lambda: self.failure is not None or self.running == number)
            if self.failure is not None:
                raise StoppedError
            self.wants[number] = None
        self.machine.partition = self.machine.partitions[number]

    def work(self, number: int, call: Callable[[], None]) -> None:
        try:
            with self.change:
                self.change.wait_for(lambda: self.failure is not None or self.running == number)
            self.machine.partition = self.machine.partitions[number]
            if self.failure is None:
                call()
        except StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001
            self.failure = self.failure or error
        with self.change:
            del self.wants[number]
            self.choose()

    def run(self, calls: list[Callable[[], None]]) -> None:
        self.wants = dict.fromkeys(range(len(calls)))
        threads = [threading.Thread(target=self.work, args=item) for item in enumerate(calls)]
        for thread in threads:
            thread.start()
        with self.change:
            self.choose()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure


class Machine:
    """One program's view of the card, under the names that kernels use."""

    BYTES = 2  # of an element as the kernel counts them

    def __init__(self, program: int, programs: int = 1, seed: int = 0, warps: int = 8) -> None:
        self.program, self.programs, self.seed, self.warps = program, programs, seed, warps
        self.copying: list[tuple[Shared, Tensor]] = []
        self.groups: list[list[tuple[Shared, Tensor]]] = []
        self.partition = Partition(0)
        self.partitions = [self.partition]
        self.turns: Turns | None = None

    @property
    def under_way(self) -> list[Product]:
        return self.partition.under_way

    @property
    def barriers_passed(self) -> int:
        return self.partition.barriers_passed

    @property
    def stored(self) -> list[Shared]:
        return self.partition.stored

    def pause(self, ready: Callable[[], bool] | None = None) -> None:
        if self.turns is not None:
            self.turns.pause(self.partition.number, ready)

    def warp_specialize(self, calls: list[Any], warps: list[int], registers: Any) -> None:
        self.partitions = [Partition(number) for number in range(len(calls))]
        self.turns = Turns(self, self.seed)
        self.turns.run([lambda call=call: call[0](*call[1]) for call in calls])  # type: ignore[misc]

    # memory
    def load(self, pointer: Pointer, mask: Any = None, other: float = 0.0) -> Tensor:
        offset = torch.as_tensor(pointer.offset)
        if mask is not None:
            offset, mask = torch.broadcast_tensors(offset, mask)
            offset = offset.where(mask, 0)
        value = pointer.data.flatten()[offset]
        return value if mask is None else value.where(mask, torch.as_tensor(other, dtype=value.dtype))

    def store(self, pointer: Pointer, value: Tensor, mask: Tensor) -> None:
        offset, mask, value = torch.broadcast_tensors(pointer.offset, mask, value)
        pointer.data.view(-1)[offset[mask]] = value[mask].to(pointer.data.dtype)

    def allocate_shared_memory(self, dtype: Any, shape: list[int], layout: object) -> Any:
        if dtype is torch.int64:
            return Ring(shape[0])
        return Shared(self, torch.full(shape, float("nan"), dtype=torch.float64))

    # order
    def fence_async_shared(self) -> None:
        self.partition.fenced = True

    def thread_barrier(self) -> None:
        here = self.partition
        here.barriers_passed += 1
        if here.fenced:
            for tile in here.stored:
                tile.unpublished = False
            here.stored.clear()
        here.fenced = False
        self.pause()

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.count = count

    def arrive(self, barrier: Barrier, *, pred: Any = True) -> None:
        if pred:
            barrier.carries[self.partition.number] = self.partition.barriers_passed
            barrier.arrived += 1
            if barrier.arrived == barrier.count:
                barrier.arrived = 0
                barrier.phases += 1
            self.pause()

    # copies
    def expect(self, barrier: Barrier, number: int, pred: Any = True) -> None:
        if pred:
            assert not barrier.expected and not barrier.copies, (
                "a stage is begun again before it is waited for"
            )
            barrier.expected = number

    def async_copy_global_to_shared(
        self, source: tuple[Tensor, list[int]], place: list[Any], barrier: Barrier, tile: Shared, pred: Any
    ) -> None:
        if not pred:
            return
        here = self.partition
        for number, read in tile.read_in.items():
            known = here.barriers_passed if number == here.number else here.knows.get(number, 0)
            assert read < known, "a copy overwrites what a warp may be reading"
        under_way = [product for partition in self.partitions for product in partition.under_way]
        assert not any(tile is of(o) for product in under_way for o in product.operands), "still needed"
        matrix, (height, width) = source
        row, column = (int(i) for i in place)
        block = torch.zeros(height, width, dtype=torch.float64)
        inside = matrix[row : row + height, column : column + width]
        block[: inside.shape[0], : inside.shape[1]] = inside
        tile.data.fill_(float("nan"))
        barrier.copies.append((tile, block))

    def wait(self, barrier: Barrier, phase: Any, pred: Any = True) -> None:
        if not pred:
            return
        phase = int(phase)
        if not barrier.copies and not barrier.passed(phase):
            self.pause(lambda: bool(barrier.copies) or barrier.passed(phase))
        if barrier.copies:
            assert barrier.expected == self.BYTES * sum(block.numel() for _, block in barrier.copies)
            for tile, block in barrier.copies:
                tile.data.copy_(block)
            barrier.copies, barrier.expected = [], 0
            barrier.phases += 1
        assert barrier.passed(phase), "this wait never ends"
        for number, passed in barrier.carries.items():
            self.partition.knows[number] = max(passed, self.partition.knows.get(number, 0))
        self.pause()

    # copies by the threads, whose end is waited for in the order in which groups of them were committed
    def async_copy_of_threads(self, tile: Shared, pointer: Pointer, mask: Tensor) -> None:
        tile.data.fill_(float("nan"))
        self.copying.append((tile, self.load(pointer, mask)))

    def commit_group(self) -> None:
        self.groups.append(self.copying)
        self.copying = []

    def wait_group(self, pending: int) -> None:
        while len(self.groups) > pending:
            for tile, value in self.groups.pop(0):
                tile.data.copy_(value)

    # products
    def warpgroup_mma(
        self, left: Any, right: Any, acc: Any, *, use_acc: bool = True, is_async: bool
    ) -> Product:
        product = Product(left, right, acc if use_acc else None)
        self.under_way.append(product)
        return product

    def warpgroup_mma_wait(self, pending: int, deps: tuple[Any, ...]) -> Any:
        while len(self.under_way) > pending:
            product = self.under_way.pop(0)
            left, right = (self._operand(operand) for operand in product.operands)
            product.value = left @ right
            if product.acc is not None:
                product.value = product.value + settled(product.acc)
        values = tuple(settled(d) for d in deps)
        return values[0] if len(values) == 1 else values

    def _operand(self, operand: Any) -> Tensor:
        if isinstance(operand, Tensor):
            return operand
        tile = of(operand)
        assert not tile.unpublished, "a product reads what no fence and barrier publish"
        tile.read_in[self.partition.number] = self.partition.barriers_passed
        return tile.data.permute(operand.order) if isinstance(operand, View) else tile.data


def of(operand: Any) -> Any:
    return operand.tile if isinstance(operand, View) else operand


def settled(x: Any) -> Tensor:
    value = x.value if isinstance(x, Product) else x
    assert value is not None, "a result is taken before its product is waited for"
    return value


def at_most(a: Tensor, b: Any) -> Tensor:
    return a.clamp(max=b)


LAYOUTS = (
    "NVMMADistributedLayout",
    "DotOperandLayout",
    "BlockedLayout",
    "DistributedLinearLayout",
    "NVMMASharedLayout",
    "SliceLayout",
    "SwizzledSharedLayout",
)


def names(machine: Machine) -> dict[str, Any]:
    """What a kernel finds under the names that it imports from Gluon."""
    no_layout = lambda *a, **k: None  # noqa: E731
    no_layout.get_default_for = no_layout  # type: ignore[attr-defined]
    gl = types.SimpleNamespace(**dict.fromkeys(LAYOUTS, no_layout))
    gl.load, gl.store, gl.thread_barrier = machine.load, machine.store, machine.thread_barrier
    gl.allocate_shared_memory = machine.allocate_shared_memory
    gl.program_id = lambda axis: torch.tensor(machine.program)
    gl.warp_specialize = machine.warp_specialize
    gl.num_warps = lambda: machine.warps
    gl.num_programs = lambda axis: torch.tensor(machine.programs)
    gl.exp, gl.rsqrt, gl.minimum, gl.maximum = torch.exp, torch.rsqrt, at_most, torch.maximum
    gl.where, gl.max, gl.zeros_like = torch.where, torch.amax, torch.zeros_like
    gl.static_range = range
    gl.arange = lambda low, high, layout: torch.arange(low, high)
    gl.zeros = lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype)
    gl.convert_layout = lambda x, layout: x
    gl.reshape, gl.permute, gl.sum = torch.reshape, torch.permute, torch.sum
    gl.split, gl.join = (lambda x: x.unbind(-1)), (lambda a, b: torch.stack([a, b], -1))
    gl.int32, gl.int64, gl.float32 = torch.int32, torch.int64, torch.float64
    return {
        "gl": gl,
        "tl": types.SimpleNamespace(load=machine.load, where=torch.where, minimum=at_most),
        "fence_async_shared": machine.fence_async_shared,
        "mbarrier": types.SimpleNamespace(
            init=machine.init,
            expect=machine.expect,
            wait=machine.wait,
            arrive=machine.arrive,
            MBarrierLayout=no_layout,
        ),
        "tma": machine,
        "async_copy": types.SimpleNamespace(
            async_copy_global_to_shared=machine.async_copy_of_threads,
            commit_group=machine.commit_group,
            wait_group=machine.wait_group,
        ),
        "warpgroup_mma": machine.warpgroup_mma,
        "warpgroup_mma_init": lambda x: x,
        "warpgroup_mma_wait": machine.warpgroup_mma_wait,
    }


def as_python(kernel: Any, found: dict[str, Any], instead: dict[str, Any]) -> Callable[..., Any]:
    """The Python function of a kernel, those it calls included, with `found` and `instead` as globals."""
    scope = {name: getattr(v, "value", v) for name, v in kernel.fn.__globals__.items()}
    function = types.FunctionType(kernel.fn.__code__, scope, kernel.fn.__name__, kernel.fn.__defaults__)
    function.__kwdefaults__ = kernel.fn.__kwdefaults__
    for name in kernel.fn.__code__.co_names:
        if hasattr(scope.get(name), "fn") and name not in instead:
            scope[name] = as_python(scope[name], found, instead)
    scope.update(found)
    scope.update(instead)
    return function


def pointed(x: Any) -> Any:
    if isinstance(x, tuple) and x and all(isinstance(part, Tensor) for part in x) and not is_descriptor(x):
        return tuple(Pointer(part) for part in x)
    return Pointer(x) if isinstance(x, Tensor) else x


def is_descriptor(x: tuple[Any, ...]) -> bool:
    return len(x) == 2 and isinstance(x[1], tuple)


def run(
    kernel: Any,
    programs: int,
    arguments: list[Any],
    instead: Callable[[Machine], dict[str, Any]],
    *,
    seed: int = 0,
    warps: int = 8,
    **more: Any,
):
    """Runs every program. Tensors become pointers, in tuples too; `(matrix, block)` is a descriptor."""
    arguments = [pointed(x) for x in arguments]
    for program in range(programs):
        machine = Machine(program, programs, seed, warps)
        as_python(kernel, names(machine), instead(machine))(*arguments, **more)
        assert not any(partition.under_way for partition in machine.partitions)
