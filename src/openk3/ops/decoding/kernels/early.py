"""How kernels of a decoding step follow each other, and what their launches share.

On Hopper a kernel starts before the one in front of it has ended (programmatic dependent launch): it lets the
next one start at once, asks for its weights, which no kernel writes, and only then waits for all before it.
Small kernels leave the memory idle: meanwhile the L2 cache may be filled with what a later one reads.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import, assignment, misc"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from openk3.ops.triton_math import PTX

Tensor = torch.Tensor

FEW = 4  # rows that each program of a product prepares again, and that go to experts one by one
OVERLAP = True  # start early on Hopper
ASKED = 4  # tensors that a kernel asks for beside its own
LARGEST_CHUNK = 2**20 - 16  # of bytes that a thread can ask for at once


@triton.jit
def let_next(EARLY: tl.constexpr):
    """The next kernel may start."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait(EARLY: tl.constexpr):
    """Until all kernels before have ended; what they write may be read from here on, and be written over."""
    if EARLY:
        gdc_wait()


@triton.jit
def ask_for(x, size, chunk, program, thread):
    """This program's chunk of bytes, of those [0, size) of x, into the L2 cache: a hint to the card.

    One thread asks, all at once. size and chunk are multiples of 16.
    """
    start = program.to(tl.int64) * chunk
    length = tl.minimum(tl.maximum(size - start, 0), chunk).to(tl.int32)
    tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .u32 t;
        mov.u32 t, %tid.x;
        setp.eq.u32 p, t, $3;
        setp.gt.and.s32 p, $2, 0, p;
        @p cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r,r",
        [x.to(tl.int64) + start, length, thread],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def asking(tensors: list[Tensor], none: Tensor, programs: int, starts_early: bool) -> dict[str, object]:
    """Arguments of a kernel whose programs `ask_for` up to ASKED tensors; `none` stands for no tensor."""
    given = [x for x in tensors if x.numel()][:ASKED] if starts_early else []
    arguments: dict[str, object] = {"ASK": len(given)}
    for i in range(ASKED):
        size = given[i].numel() * given[i].element_size() // 16 * 16 if i < len(given) else 0
        arguments[f"ask{i}"] = given[i] if i < len(given) else none
        arguments[f"ask{i}_size"] = size
        arguments[f"ask{i}_chunk"] = min(triton.cdiv(size, 16 * programs) * 16, LARGEST_CHUNK)
    return arguments


def early(x: Tensor) -> dict[str, bool]:
    """Options of a launch beside x."""
    if OVERLAP and x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


def narrow(x: Tensor) -> bool:
    """Whether whole rows of weights fit into registers: fp32 does not. The interpreter has no end of them."""
    return x.element_size() == 2 or not PTX


def warps(values: int) -> int:
    """So that a thread has up to 64 of them."""
    return int(min(max(triton.next_power_of_2(values) // 2048, 4), 16))


def stages(x: Tensor) -> int:
    """Steps of a product that are on their way at once: fp32 takes twice the memory."""
    return 2 if x.dtype == torch.float32 else 4
