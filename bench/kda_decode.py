"""Rows of bench/kda.py that continue sequences: one token of each, and verification of draft tokens.

Ours include the convolution, the output norm and its gate; the peer's kernel has none of them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import kda_fla
import torch
from gpu_timing import Call, Ceilings, milliseconds_in_graph
from kda_inputs import Tokens, decode_work
from rows import row

if TYPE_CHECKING:
    from openk3.ops.kda.decoding import MixerWeights

HEADS, K = 96, 128
C = 3 * HEADS * K  # channels of q, k and v


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
    from openk3.ops.kda.decoding import kda_decode

    N = work.sequences
    tokens, slots = _projections((N,), seed), _slots(N)
    memory = _states(N), torch.randn(N, 3, C, device="cuda").bfloat16()
    return lambda: kda_decode(*tokens, *memory, slots, _weights())


def _our_window(work: Work, seed: int) -> Call:
    from openk3.ops.kda.decoding import DraftWindow, kda_verify

    N, W = work.sequences, work.window
    tokens, slots = _projections((N, W), seed), _slots(N)
    memory = _states(N), torch.randn(N, 3, C, device="cuda").bfloat16()
    past = DraftWindow(*(x.clone() for x in tokens[:3]))
    return lambda: kda_verify(*tokens, *memory, past, _accepted(work), slots, _weights())


def _projections(rows: tuple[int, ...], seed: int) -> list[torch.Tensor]:
    """qkv, z, b and the logits of the output gate, bf16."""
    random = torch.Generator("cuda").manual_seed(seed)
    shapes = ((C,), (HEADS, K), (HEADS,), (HEADS, K))
    return [torch.randn(*rows, *s, device="cuda", generator=random).bfloat16() for s in shapes]


def _slots(count: int) -> torch.Tensor:
    """A place in the pool for each sequence, in no order."""
    return torch.randperm(count, device="cuda").int()


@functools.cache
def _accepted(work: Work) -> torch.Tensor:
    """How many tokens of the window before stay, 1 to all; the same for ours and the peer's."""
    random = torch.Generator("cuda").manual_seed(9)
    shape = (work.sequences,)
    return torch.randint(1, work.window + 1, shape, device="cuda", dtype=torch.int32, generator=random)


@functools.cache
def _weights() -> MixerWeights:
    from openk3.ops.kda.decoding import MixerWeights

    random = torch.Generator("cuda").manual_seed(8)
    taps = torch.randn(4, C, device="cuda", generator=random)
    A_log = 0.2 * torch.randn(HEADS, device="cuda", generator=random)
    dt_bias = 0.5 * torch.randn(HEADS, K, device="cuda", generator=random)
    return MixerWeights(taps, A_log, dt_bias, torch.ones(K, device="cuda"), norm_eps=1e-5)


def _fla_step(work: Work, seed: int) -> Call:
    return kda_fla.decode(Tokens.draw(work.sequences, HEADS, K, seed), _states(work.sequences))


def _fla_window(work: Work, seed: int) -> Call:
    count = work.sequences * work.window
    tokens = Tokens.draw(count, HEADS, K, seed)
    return kda_fla.verify(tokens, work.window, _states(count), _accepted(work))
