"""Rows of bench/kda.py over whole sequences: forward, and forward with backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import kda_fla
import torch
from gpu_timing import Ceilings, first_call_seconds, milliseconds, peak_gib
from kda_inputs import Chunkwise, Tokens, forward_work, training_work
from rows import row

AGREEMENT = 5e-2  # relative L2 to the peer beyond which a time means nothing; both err by less than 1e-2


Operator = Callable[[Chunkwise], tuple[torch.Tensor, torch.Tensor | None]]
Results = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Work:
    name: str
    lengths: tuple[int, ...]
    heads: int
    training: bool = False


CHUNKWISE = [
    Work("kda_fwd_t8192_h96", (8192,), 96),
    Work("kda_fwd_8x1024_h96", (1024,) * 8, 96),
    Work("kda_fwdbwd_t8192_h96", (8192,), 96, training=True),
    Work("kda_fwdbwd_t65536_h96", (65536,), 96, training=True),
    Work("kda_fwd_t65536_h12", (65536,), 12),
    Work("kda_fwdbwd_t131072_h4", (4096,) * 32, 4, training=True),
]


def ours(x: Chunkwise) -> tuple[torch.Tensor, torch.Tensor]:
    """o and the final states, by our operator."""
    from openk3.ops.kda.gated import gated_kda

    raw = (x.q, x.k, x.v, x.z, x.b, x.A_log, x.dt_bias)
    o, state = gated_kda(*raw, x.cu_seqlens, lower_bound=x.lower_bound, initial_state=x.initial_state)
    return o, state


def measure_chunkwise(work: Work, limits: Ceilings, peer: bool) -> list[dict[str, object]]:
    """Ours, the peer's if asked for, agreement of the two, the floor; for training the peak memory too."""
    T, H = sum(work.lengths), work.heads
    x = Chunkwise.pack(work.lengths, Tokens.draw(T, H))
    call = training_call(x) if work.training else inference_call(x)
    first = first_call_seconds(lambda: call(ours))
    time, peak = milliseconds(lambda: call(ours)), peak_gib(lambda: call(ours))
    print(f"{work.name}: ours {time:.4g} ms, peak +{peak:.3g} GiB, first call {first:.1f} s", flush=True)
    times: dict[str, float] = {}
    peaks: dict[str, float] = {}
    if peer:
        difference = disagreement(call(ours), call(kda_fla.chunkwise))
        times["fla"], peaks["fla"] = (
            milliseconds(lambda: call(kda_fla.chunkwise)),
            peak_gib(lambda: call(kda_fla.chunkwise)),
        )
        print(f"{work.name}: fla {times['fla']:.4g} ms, peak +{peaks['fla']:.3g} GiB, error {difference:.1e}")
        if not difference < AGREEMENT:
            raise RuntimeError(f"ours and fla differ by {difference:.1e}, no time is worth reporting")
    packed = "" if x.is_one_sequence else f" in {len(work.lengths)} sequences of {work.lengths[0]}"
    shape = f"T={T}{packed} H={H} K=V=128 bf16"
    floor = limits.floor(*(training_work if work.training else forward_work)(T, H))
    rows = [row(work.name, time, "ms", "lower", peers=times, floor=floor, shape=shape)]
    if work.training:
        rows.append(
            row(f"{work.name}_peak", peak, "GiB", "lower", peers=peaks, shape=f"{shape}, beyond inputs")
        )
    return rows


def inference_call(x: Chunkwise) -> Callable[[Operator], Results]:
    """A call of an operator that keeps nothing for a backward; returns its output."""

    def call(operator: Operator) -> Results:
        with torch.inference_mode():
            return (operator(x)[0],)

    return call


def training_call(x: Chunkwise) -> Callable[[Operator], Results]:
    """A forward and a backward of an operator; returns its output and the gradients to all inputs."""
    x = x.asking_for_gradients()
    leaves, d_o = list(x.leaves().values()), torch.randn_like(x.v)

    def call(operator: Operator) -> Results:
        o = operator(x)[0]
        return o.detach(), *torch.autograd.grad(o, leaves, d_o)

    return call


def disagreement(these: Results, those: Results) -> float:
    """The largest relative L2 difference of two results."""
    pairs = zip(these, those, strict=True)
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)
