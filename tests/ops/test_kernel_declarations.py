"""What `KERNELS` says that kernels take, against what dispatch lets through; and what they compile for."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from openk3.cli.doctor import _kernel_line
from openk3.errors import InvalidInput, KernelUnavailable
from openk3.ops import attention, glu, kda, norm, short_conv, situ
from openk3.ops.dispatch import Kernel
from openk3.ops.kda import DraftWindow, MixerWeights, gated, kda_decode, kda_verify

ROOT = Path(__file__).resolve().parents[2]
COMPILER = ROOT / "tools/compile_kernels.py"
bf16, fp32, fp64, fp16 = torch.bfloat16, torch.float32, torch.float64, torch.float16


def declared(kernels: tuple[Kernel, ...], function: str) -> str:
    return next(kernel.takes for kernel in kernels if kernel.function == function)


def chosen_by_gated_kda(
    monkeypatch, K: int, dtype: torch.dtype, *, trained: bool, bound=-5.0, V=None
) -> bool:
    """Whether dispatch finds that kernels take such inputs on a CUDA device."""

    class Chosen(Exception):  # noqa: N818
        pass

    def choose(operator, x, wanted, *, kernels=True):
        raise Chosen(kernels)

    monkeypatch.setattr(gated, "choose", choose)
    with FakeTensorMode():
        make = lambda *shape: torch.empty(*shape, dtype=dtype, device="cuda")  # noqa: E731
        q, k, z = (make(8, 2, K) for _ in range(3))
        q.requires_grad_(trained)
        cu_seqlens = torch.empty(2, dtype=torch.int32, device="cuda")
        A_log, dt_bias = (torch.empty(*shape, device="cuda") for shape in ((2,), (2, K)))
        with pytest.raises(Chosen) as chosen:
            gated.gated_kda(
                q, k, make(8, 2, V or K), z, make(8, 2), A_log, dt_bias, cu_seqlens, lower_bound=bound
            )
    return bool(chosen.value.args[0])


def test_gated_kda_takes_what_it_declares(monkeypatch):
    takes = declared(kda.KERNELS, "gated_kda")
    assert takes == "K = V in {64, 128}, the bounded gate, bf16 or fp32; gradients: bf16"
    for dtype in (bf16, fp32):
        for K in (64, 128):
            assert chosen_by_gated_kda(monkeypatch, K, dtype, trained=False)
            assert chosen_by_gated_kda(monkeypatch, K, dtype, trained=True) == (dtype == bf16)
        assert not chosen_by_gated_kda(monkeypatch, 96, dtype, trained=False)
        assert not chosen_by_gated_kda(monkeypatch, 64, dtype, trained=False, V=128)
    for dtype in (fp16, fp64):
        assert not chosen_by_gated_kda(monkeypatch, 64, dtype, trained=False)


def test_a_gate_without_a_bound_is_taken_as_declared(monkeypatch):
    rows = [kernel.takes for kernel in kda.KERNELS if kernel.function == "gated_kda"]
    unbounded = any("without a bound" in takes for takes in rows)
    assert chosen_by_gated_kda(monkeypatch, 64, bf16, trained=False, bound=None) == unbounded


def decode_inputs(K: int, taps: int, W: int = 0, bound: float | None = -5.0):
    N, C, rows = 1, 3 * K, (1, W) if W else (1,)
    weights = MixerWeights(
        torch.zeros(taps, C), torch.zeros(1), torch.zeros(1, K), torch.ones(K), 1e-6, bound
    )
    tokens = torch.zeros(*rows, C), torch.zeros(*rows, 1, K), torch.zeros(*rows, 1), torch.zeros(*rows, 1, K)
    return tokens, torch.zeros(N, 1, K, K), torch.zeros(N, 3, C), torch.zeros(N, dtype=torch.int32), weights


@pytest.mark.parametrize(
    ("K", "taps", "taken"), [(64, 4, True), (128, 4, True), (32, 4, False), (64, 3, False)]
)
@pytest.mark.parametrize("bound", [-5.0, None])
def test_kda_decode_takes_what_it_declares(K, taps, taken, bound):
    assert declared(kda.KERNELS, "kda_decode") == "K = V in {64, 128}, 4 taps, either gate"
    tokens, state, tail, slots, weights = decode_inputs(K, taps, bound=bound)
    if taken:
        assert kda_decode(*tokens, state, tail, slots, weights).shape == (1, K)
    else:
        with pytest.raises(InvalidInput):
            kda_decode(*tokens, state, tail, slots, weights)


@pytest.mark.parametrize(("W", "taken"), [(1, True), (8, True), (9, False)])
def test_kda_verify_takes_what_it_declares(W, taken):
    assert declared(kda.KERNELS, "kda_verify") == "as kda_decode, windows of 1 to 8 tokens"
    tokens, state, tail, slots, weights = decode_inputs(64, 4, W)
    past = DraftWindow.empty(1, W, 1, 64, fp32, "cpu")
    arguments = *tokens, state, tail, past, torch.zeros(1, dtype=torch.int32), slots, weights
    if taken:
        assert kda_verify(*arguments).shape == (1, W, 64)
    else:
        with pytest.raises(InvalidInput):
            kda_verify(*arguments)


@pytest.mark.parametrize("taps", range(1, 10))
@pytest.mark.parametrize("dtype", [bf16, fp16, fp32, fp64])
def test_short_conv_takes_what_it_declares(taps, dtype):
    assert declared(short_conv.KERNELS, "short_conv") == "2 to 8 taps, bf16, fp16 or fp32"
    problem = short_conv._kernel_problem(torch.zeros(1, 4, dtype=dtype), torch.zeros(4, taps, dtype=dtype))
    assert (problem is None) == (2 <= taps <= 8 and dtype != fp64)
    if problem:
        x, cu_seqlens = torch.zeros(1, 4, dtype=dtype), torch.tensor([0, 1], dtype=torch.int32)
        with pytest.raises(KernelUnavailable):
            short_conv.short_conv(x, torch.zeros(4, taps, dtype=dtype), cu_seqlens, implementation="triton")


@pytest.mark.parametrize("dtype", [bf16, fp16, fp32, fp64])
@pytest.mark.parametrize("d", [0, 1, 8192, 8193])
@pytest.mark.parametrize("function", ["rms_norm", "gated_rms_norm", "l2_norm"])
def test_norms_take_what_they_declare(function, d, dtype):
    takes = declared(norm.KERNELS, function)
    assert takes == "rows of 1 to 8192 values, which may lie apart; bf16, fp16 or fp32"
    x = torch.ones(2, d, dtype=dtype)
    arguments = {"rms_norm": (x[0], 1e-5), "gated_rms_norm": (x, x[0], 1e-5), "l2_norm": ()}[function]
    if 1 <= d <= 8192 and dtype != fp64:
        assert getattr(norm, function)(x, *arguments, implementation="triton").shape == x.shape
    else:
        with pytest.raises(KernelUnavailable):
            getattr(norm, function)(x, *arguments, implementation="triton")


@pytest.mark.parametrize("dtype", [bf16, fp16, fp32, fp64])
@pytest.mark.parametrize("unit", [situ.situ_glu, glu.swiglu, glu.glu])
def test_gated_units_take_what_they_declare(unit, dtype):
    kernels = situ.KERNELS if unit is situ.situ_glu else glu.KERNELS
    assert declared(kernels, unit.__name__) == "any shape, rows may lie apart; bf16, fp16 or fp32"
    gate, up = torch.ones(2, 3, 2, dtype=dtype).unbind(2)
    if dtype != fp64:
        assert unit(gate, up, implementation="triton").shape == (2, 3)
    else:
        with pytest.raises(KernelUnavailable):
            unit(gate, up, implementation="triton")


@pytest.mark.parametrize(
    ("capability", "says"),
    [
        ((9, 0), ""),
        ((8, 6), ", compiles for sm_86, not run there"),
        ((7, 5), ", never compiled for sm_75, not run there"),
    ],
)
def test_doctor_says_what_only_compiles(monkeypatch, capability, says):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    assert _kernel_line(kda.KERNELS[0], torch.device("cuda")) == "gated_kda" + says


def compiled(statement: str) -> str:
    """What a new process prints that has the compiler as `c`: in this one kernels are interpreted."""
    code = (
        f"import sys; sys.path.insert(0, {str(COMPILER.parent)!r}); import compile_kernels as c; {statement}"
    )
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


@needs_triton
def test_declared_cards_are_those_that_are_compiled_for():
    cards = set(compiled("print(*c.CARDS)").split())
    operators = (attention, kda, short_conv, situ, glu, norm)
    for kernel in (kernel for operator in operators for kernel in operator.KERNELS):
        if kernel.compiles_for:
            assert set(kernel.compiles_for) == cards - {"sm_90"}


REPORT = (
    "r = c.compile_for({card!r}{rest}); print(len(r)); "
    "print(*(n for n, k in r.items() if k.failed or k.shared > c.CARDS[{card!r}] * 1024), sep='; ')"
)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("card", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_kernels_compile_for_every_declared_card(card):
    count, bad = compiled(REPORT.format(card=card, rest="")).split("\n")[:2]
    assert int(count) >= 25
    assert not bad
