"""Compile the GPU kernels for cards that are not here, as dispatch launches them.

    python tools/compile_kernels.py [sm_86 ...]

No GPU is needed: tensors are fake and Triton is told which card it has, so that the real code picks kernels
and tiles. Prints the most that launches of a kernel take of shared memory, registers and stack, and fails
where one does not compile or takes more shared memory than a program may have. That a kernel compiles says
nothing of what it computes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton  # type: ignore[import-untyped]
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.runtime import driver  # type: ignore[import-untyped]
from triton.runtime.jit import JITFunction, MockTensor  # type: ignore[import-untyped]

# KB of shared memory that a program may have, by the CUDA C++ Programming Guide.
CARDS = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99}
TENSOR_MEMORY = 512  # columns that a program may have, on sm_100
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


@dataclass(frozen=True)
class Compiled:
    """The most that any launch of a kernel takes; `failed` says why one did not compile."""

    shared: int = 0  # bytes
    registers: int = 0
    spilled: int = 0  # bytes of stack
    failed: str = ""

    def with_one_more(self, other: Compiled) -> Compiled:
        pairs = (
            (self.shared, other.shared),
            (self.registers, other.registers),
            (self.spilled, other.spilled),
        )
        return Compiled(*(max(pair) for pair in pairs), self.failed or other.failed)


def compile_for(
    card: str,
    head_sizes: tuple[int, ...] = (64, 128),
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32),
) -> dict[str, Compiled]:
    """Every plain Triton kernel that `card` would run, by function, head size and dtype."""
    capability = int(card.removeprefix("sm_"))
    results: dict[str, Compiled] = {}
    label = ""

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if kernel.is_gluon():  # made for sm_90 alone, where they were run
            return
        name = f"{kernel.__name__.lstrip('_')} {label}"
        mocked = [_mock(x) for x in args]
        try:
            compiled = real_run(
                kernel, *mocked, grid=grid, warmup=True, **{k: _mock(x) for k, x in options.items()}
            )
            one = Compiled(compiled.metadata.shared, *_resources(compiled.asm["cubin"]))
            if (compiled.metadata.tmem_size or 0) > TENSOR_MEMORY:  # compiles to a trap
                one = Compiled(failed=f"{compiled.metadata.tmem_size} columns of tensor memory")
        except Exception as error:  # noqa: BLE001
            one = Compiled(failed=str(error).splitlines()[-1] or traceback.format_exc(limit=1))
        results[name] = results.get(name, Compiled()).with_one_more(one)

    real_run = JITFunction.run
    properties = SimpleNamespace(
        shared_memory_per_block_optin=CARDS[card] * 1024,
        shared_memory_per_block=48 * 1024,
        multi_processor_count=132,
    )
    driver.set_active(_Driver(capability))
    with (
        FakeTensorMode(),
        patch.object(JITFunction, "run", run),
        patch.object(torch.cuda, "get_device_properties", lambda *_: properties),
        patch.object(torch.cuda, "current_device", lambda: 0),
        patch.object(torch.cuda, "get_device_capability", lambda *_: divmod(capability, 10)),
        patch.object(torch.Tensor, "contiguous", lambda x, **_: x.new_empty(x.shape)),  # no CUDA to copy with
        patch("openk3.ops.kda.kernels.intra_backward._selections", _fake_selections),
        patch("openk3.ops.attnres.kernels.operator.as_rows", lambda x: x),  # asks for addresses
        patch("openk3.ops.attnres.kernels.operator.ring_launch", lambda _: None),  # Gluon
        patch("openk3.ops.attention.kernels.operator._aligned", lambda x: x),
    ):
        for dtype in dtypes:
            label = "bf16" if dtype == torch.bfloat16 else "fp32"
            _launch_attnres(9, 8192, 7168, dtype)
        label = "bf16"
        _launch_short_conv(torch.bfloat16)
        for dtype in dtypes:
            name = "bf16" if dtype == torch.bfloat16 else "fp32"
            label = f"of a gated unit {name}"
            _launch_gated_units(dtype)
            label = f"of a norm {name}"
            _launch_norms(dtype)
            label = f"of MLA {name}"
            _launch_gated_mla(8192, 96, dtype)
        label = "of the cross-entropy bf16"
        _launch_cross_entropy(torch.bfloat16)
        for dtype in dtypes:
            for H, R in ((96, 512), (8, 256)):
                label = f"H={H} R={R} {'bf16' if dtype == torch.bfloat16 else 'fp32'}"
                _launch_mla_decode(H, R, dtype)
        for dtype in dtypes:
            for n in (1, 64, 256):
                label = f"n={n} {'bf16' if dtype == torch.bfloat16 else 'fp32'}"
                _launch_decoding_step(n, dtype)
        for K in head_sizes:
            for dtype in dtypes:
                label = f"K={K} {'bf16' if dtype == torch.bfloat16 else 'fp32'}"
                _launch_gated_kda(8192, 96, K, dtype)
                if dtype == torch.bfloat16:  # few heads, so that sequences are cut into pieces
                    _launch_gated_kda(65536, 2, K, dtype)
                _launch_decoding(96, K, dtype)
    return results


class _Driver:
    """What Triton asks of a driver before it launches."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # each card has a cache of its own

    def get_current_stream(self, device: int) -> int:
        return 0


def _mock(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(_mock(part) for part in x)
    return MockTensor(x.dtype, list(x.shape)) if isinstance(x, torch.Tensor) else x


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread, and bytes of its stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [TOOLS / "cuobjdump", "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def _fake_selections(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return _empty(3, 64, 64, dtype=dtype)  # the real one is kept from call to call


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def _launch_gated_kda(T: int, H: int, K: int, dtype: torch.dtype) -> None:
    from openk3.ops.kda.kernels import operator

    q, k, v, z = (_empty(T, H, K, dtype=dtype) for _ in range(4))
    raw = q, k, v, z, _empty(T, H, dtype=dtype), _empty(H), _empty(H, K), _empty(2, dtype=torch.int32)
    state, marks = _empty(1, H, K, K), _empty(1, dtype=torch.int32)
    forward, backward = operator._forward._init_fn, operator._backward._init_fn
    forward(*raw, state, marks, -5.0, 0.1, True)
    if dtype == torch.bfloat16:  # in fp32, gradients take the eager form
        backward(*raw, state, v, v, state, -5.0, 0.1, True)
        operator.gradient_to_states._init_fn(q, k, z, *raw[4:], v, -5.0)
    values, states = _empty(T, H, 2 * K, dtype=dtype), _empty(1, H, 2 * K, K)
    operator.last_states._init_fn(k, values, z, *raw[4:], states, -5.0)


def _launch_decoding(H: int, K: int, dtype: torch.dtype) -> None:
    from openk3.ops.kda.kernels import decode, replay

    N, C, P = 4, 3 * H * K, 8
    state, tail, slots = _empty(N, H, K, K), _empty(N, 3, C, dtype=dtype), _empty(N, dtype=torch.int32)
    weights = _empty(4, C), _empty(H), _empty(H, K), _empty(K)

    def tokens(*rows: int) -> list[torch.Tensor]:
        return [_empty(*rows, *shape, dtype=dtype) for shape in ((C,), (H, K), (H,), (H, K))]

    for bound in (-5.0, None):
        decode.decode._init_fn(*tokens(N), state, tail, slots, *weights, 1e-6, bound, 0.1)
        for W in (4, 8):
            past = tokens(N, P)[:3]
            replay.verify._init_fn(
                *tokens(N, W), state, tail, *past, slots, slots, *weights, 1e-6, bound, 0.1
            )


def _launch_attnres(S: int, T: int, d: int, dtype: torch.dtype) -> None:
    from openk3.ops.attnres.kernels import operator

    *bank, prefix = (_empty(T, d, dtype=dtype) for _ in range(S))
    vectors, queries, norms = [_empty(d)] * 2, [_empty(12, d)] * 2, (1e-5, 1e-6)
    forward, backward = operator._attnres._init_fn, operator._attnres_backward._init_fn
    forward(bank, prefix, None, *vectors, None, None, *norms, True)
    forward(bank, prefix, prefix, *vectors, vectors[0], None, *norms, False)
    forward(bank[:1], prefix, prefix, *vectors, vectors[0], _empty(T), *norms, False)
    scalars, sources = _empty(T, S, 2), [*bank, prefix]
    backward(sources, *vectors, None, scalars, prefix, None, [], None, 1e-6, False)
    backward(sources, *vectors, vectors[0], scalars, prefix, prefix, bank, prefix, 1e-6, False)
    backward(sources[:2], *vectors, vectors[0], scalars, None, prefix, [], prefix, 1e-6, True)
    operator._bank_mixes._init_fn(bank, *queries, 1e-5)


def _launch_short_conv(dtype: torch.dtype) -> None:
    from openk3.ops.short_conv import kernels

    x, weight, cu_seqlens = (
        _empty(8192, 36864, dtype=dtype),
        _empty(4, 36864).t(),
        _empty(2, dtype=torch.int32),
    )
    state = _empty(1, 3, 36864, dtype=dtype)
    kernels._short_conv._init_fn(x, weight, cu_seqlens, state, True)
    kernels._short_conv_backward._init_fn(x, weight, cu_seqlens, state, True, x, state)
    kernels._states_at._init_fn(x, cu_seqlens, state, cu_seqlens, 4)


def _launch_gated_units(dtype: torch.dtype) -> None:
    from openk3.ops import gated_unit_kernels as kernels

    for gate, up in (_empty(8192, 6144, dtype=dtype).chunk(2, dim=1), [_empty(8192, 3072, dtype=dtype)] * 2):
        for unit, gate_cap in (("situ", 4.0), ("situ", 3.0), ("swiglu", 1.0), ("glu", 1.0)):
            kernels._gated_unit._init_fn(gate, up, unit, gate_cap, 25.0)
            kernels._gated_unit_backward._init_fn(gate, up, up, unit, gate_cap, 25.0)


def _launch_norms(dtype: torch.dtype) -> None:
    from openk3.ops.norm import kernels

    for d in (64, 128, 256, 512, 1024, 1536, 3584, 7168, 8192):
        x, weight = _empty(4096, 2, 2 * d, dtype=dtype).chunk(2, dim=2)[0], _empty(d)
        for gate in (None, x):
            kernels._row_norm._init_fn(x, weight, gate, 1e-5, True)
            kernels._row_norm_backward._init_fn(x, weight, gate, 1e-5, True, x)


def _launch_gated_mla(T: int, H: int, dtype: torch.dtype) -> None:
    from openk3.ops.attention.kernels import operator

    q, kv, shared, o = (
        _empty(*shape, dtype=dtype) for shape in ((T, H, 192), (T, H, 256), (T, 64), (T, H, 128))
    )
    cu_seqlens, lse = _empty(2, dtype=torch.int32), _empty(H, T)
    for gate in (None, o):
        inputs = q, kv, shared, gate, cu_seqlens, cu_seqlens
        operator._gated_mla._init_fn(*inputs, 0.1, True, True)
        operator._gated_mla_backward._init_fn(*inputs, o.float(), lse, 0.1, o)


def _launch_cross_entropy(dtype: torch.dtype) -> None:
    from openk3.ops.cross_entropy import kernels

    logits, targets, losses = _empty(8192, 163840, dtype=dtype), _empty(8192, dtype=torch.int64), _empty(8192)
    for with_gradient in (True, False):
        kernels._softmax_rows[(8192,)](
            logits, targets, losses, logits, 163840, WITH_GRADIENT=with_gradient, **kernels.ROWS
        )


def _launch_mla_decode(H: int, R: int, dtype: torch.dtype) -> None:
    from openk3.ops.attention.kernels import paged_operator as operator

    N, pages, lengths = 4, 1024, _empty(4, dtype=torch.int32)
    cache, tables = _empty(pages, 64, R + 64, dtype=dtype), _empty(N, pages, dtype=torch.int32)
    for W in (1, 4):
        queries = _empty(N, W, H, R, dtype=dtype), _empty(N, W, H, 64, dtype=dtype)
        for split in (4096, 65536):
            operator._decode._init_fn(*queries, cache, tables, lengths, 0.1, 65536, split)
    operator._append._init_fn(cache.view(-1, R + 64), cache, _empty(pages * 64, dtype=torch.int64))


def _launch_decoding_step(n: int, dtype: torch.dtype) -> None:
    """What stands between the large operators, at the sizes of r1."""
    from openk3.ops.decoding.kernels import experts, many, products, rows, tokens

    d, E, F, latent = 512, 256, 416, 256
    x, gain = _empty(n, d, dtype=dtype), _empty(d, dtype=dtype)
    matrix, blocks = _empty(2192, d, dtype=dtype), _empty(137, 4, dtype=torch.int32)
    bank = _empty(13, n, d, dtype=dtype)
    products._mixed_products_op._init_fn(bank, gain, gain, 1e-5, True, gain, 1e-5, matrix, blocks, 1920, 256)
    products._joined_products_op._init_fn(x, matrix, blocks, 1920, 256)
    for a, b, normed, gated in ((latent, 832, True, False), (1024, 0, False, True), (0, 832, False, False)):
        units = [_empty(n, b, dtype=dtype) if b else None] * 2
        products._products_into_op._init_fn(
            x, _empty(d, a + b, dtype=dtype), _empty(n, a, dtype=dtype) if a else None, True,
            _empty(a, dtype=dtype) if normed else None, 1e-5,
            _empty(n, a, dtype=dtype) if gated else None, *units, "situ", 4.0, 25.0,
        )  # fmt: skip
    experts.choose_experts._init_fn(_empty(n, E), _empty(E), 6, 1.0, True)
    lists = _empty(E, n, dtype=torch.int32), _empty(E, dtype=torch.int32)
    experts.choose_and_list_experts._init_fn(_empty(n, E), _empty(E), 6, 1.0, True, *lists)
    ids, w1 = _empty(n, 6, dtype=torch.int64), _empty(E, F, latent, dtype=dtype)
    experts._expert_sums_op._init_fn(
        _empty(n, latent, dtype=dtype), ids, _empty(n, 6), w1, w1, _empty(E, latent, F, dtype=dtype),
        "situ", 4.0, 25.0,
    )  # fmt: skip
    if products.narrow(x) and n > products.FEW:
        weight, z = _empty(d, latent + 832, dtype=dtype), _empty(n, latent, dtype=dtype)
        many._experts_into_op._init_fn(
            x, weight, z, ids, _empty(n, 6), None, None, w1, w1, _empty(E, latent, F, dtype=dtype), True,
            _empty(latent, dtype=dtype), 1e-5, *[_empty(n, 832, dtype=dtype)] * 2, "situ", 4.0, 25.0,
        )  # fmt: skip
    tokens.most_likely._init_fn(_empty(n, 1 << 15, dtype=dtype))
    places = _empty(n, dtype=torch.int64)
    rows.append_latents._init_fn(
        _empty(n, 320, dtype=dtype), _empty(latent, dtype=dtype), 1e-6, _empty(n, 64, 320, dtype=dtype),
        places, places,
    )  # fmt: skip
    rows.start_step._init_fn(
        places,
        _empty(n, dtype=torch.int32),
        _empty(1000, d, dtype=dtype),
        _empty(n + 1, dtype=torch.int64),
        x,
    )


def main() -> int:
    wanted = sys.argv[1:] or list(CARDS)
    print(f"torch {torch.__version__}, Triton {triton.__version__}")
    bad = 0
    for card in wanted:
        for name, kernel in compile_for(card).items():
            fits = kernel.shared <= CARDS[card] * 1024 and not kernel.failed
            bad += not fits
            verdict = "" if fits else f"  {kernel.failed or 'MORE THAN THE CARD HAS'}"
            print(
                f"{card:7} {name:32} {kernel.shared / 1024:6.1f} of {CARDS[card]} KB "
                f"{kernel.registers:4} registers {kernel.spilled:5} B of stack{verdict}",
                flush=True,
            )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
