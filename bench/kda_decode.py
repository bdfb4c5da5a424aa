"""Rows of bench/kda.py that continue sequences: one token of each, and verification of draft tokens.

Ours include the convolution, the output norm and its gate; the peer's kernel has none of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import kda_fla
import torch
from gpu import Call, Ceilings, milliseconds_in_graph
from kda_inputs import Tokens, decode_work
from rows import row

HEADS, K = 96, 128


@dataclass(frozen=True)
class Work:
    name: str
    sequences: int
    pools: int  # of states, used in turn: together several times the L2 cache of 50 MB
    window: int = 1


DECODE = [
    Work("kda_decode_n1", 1, 24),
    Work("kda_decode_n32", 32, 3),
    Work("kda_decode_n256", 256, 1),
]
VERIFY = [
    Work("kda_verify_w4_n32", 32, 3, window=4),
    Work("kda_verify_w4_n256", 256, 1, window=4),
    Work("kda_verify_w8_n32", 32, 3, window=8),
]


def measure_decode(work: Work, limits: Ceilings, peer: bool) -> list[dict[str, object]]:
    """One token of each sequence, the states updated in place."""
    ours = milliseconds_in_graph([_our_step(work, seed) for seed in range(work.pools)])
    fla = milliseconds_in_graph([_fla_step(work, seed) for seed in range(work.pools)]) if peer else None
    return _row(work, limits, ours, fla)


def measure_verify(work: Work, limits: Ceilings, peer: bool) -> list[dict[str, object]]:
    """`window` draft tokens of each sequence after the accepted ones of the window before."""
    ours = milliseconds_in_graph([_our_window(work, seed) for seed in range(work.pools)])
    fla = milliseconds_in_graph([_fla_window(work, 0)]) if peer else None
    return _row(work, limits, ours, fla)


def _row(work: Work, limits: Ceilings, ours: float, fla: float | None) -> list[dict[str, object]]:
    floor = limits.floor(*decode_work(work.sequences, HEADS, work.window))
    peers = {} if fla is None else {"fla": fla}
    print(f"{work.name}: ours {ours:.4g} ms, peers {peers}, floor {floor:.4g} ms", flush=True)
    shape = f"N={work.sequences} W={work.window} H={HEADS} K=V={K} bf16, fp32 states; ours with conv and norm"
    return [row(work.name, ours, "ms", "lower", peers=peers, floor=floor, shape=shape)]


def _states(count: int) -> torch.Tensor:
    return torch.randn(count, HEADS, K, K, device="cuda")


def _our_step(work: Work, seed: int) -> Call:
    raise ImportError("the decode kernel does not exist yet")


def _our_window(work: Work, seed: int) -> Call:
    raise ImportError("the verify kernel does not exist yet")


def _fla_step(work: Work, seed: int) -> Call:
    return kda_fla.decode(Tokens.draw(work.sequences, HEADS, K, seed), _states(work.sequences))


def _fla_window(work: Work, seed: int) -> Call:
    count = work.sequences * work.window
    accepted = torch.randint(1, work.window + 1, (work.sequences,), device="cuda", dtype=torch.int32)
    return kda_fla.verify(Tokens.draw(count, HEADS, K, seed), work.window, _states(count), accepted)
