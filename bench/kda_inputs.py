"""Random inputs of the KDA benchmarks, and the bytes and FLOPs of their work at the least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch

Tensor = torch.Tensor
CHUNK = 64  # rows of the dense tiles that FLOPs are counted in


@dataclass(frozen=True)
class Tokens:
    """What a KDA layer has after its convolution; bf16, A_log and dt_bias fp32."""

    q: Tensor  # [T, H, K]
    k: Tensor  # [T, H, K]
    v: Tensor  # [T, H, K]
    z: Tensor  # [T, H, K] decay logits
    b: Tensor  # [T, H] beta logits
    A_log: Tensor  # [H]
    dt_bias: Tensor  # [H, K]
    lower_bound: float

    @classmethod
    def draw(cls, T: int, H: int, K: int = 128, seed: int = 0, gate: float = 0.0) -> Tokens:
        """Standard normal, decay logits around `gate`."""
        g = torch.Generator("cuda").manual_seed(seed)
        q, k, v, z = (torch.randn(T, H, K, device="cuda", generator=g) for _ in range(4))
        b = torch.randn(T, H, device="cuda", generator=g)
        A_log, dt_bias = (
            torch.randn(H, device="cuda", generator=g),
            torch.randn(H, K, device="cuda", generator=g),
        )
        half = (x.bfloat16() for x in (q, k, v, z + gate, b))
        return cls(*half, 0.2 * A_log, 0.5 * dt_bias, -5.0)


@dataclass(frozen=True)
class Chunkwise(Tokens):
    """Packed sequences of such tokens."""

    lengths: tuple[int, ...]
    cu_seqlens: Tensor  # int32 [N + 1]
    long_offsets: Tensor  # the same in int64, for the peer
    host_offsets: Tensor  # the same on the host, for the peer
    initial_state: Tensor | None  # fp32 [N, H, K, K]

    @classmethod
    def pack(cls, lengths: Sequence[int], tokens: Tokens, initial_state: Tensor | None = None) -> Chunkwise:
        host = torch.tensor([0, *lengths]).cumsum(0)
        offsets = host.cuda()
        parts = {field.name: getattr(tokens, field.name) for field in fields(Tokens)}
        return cls(**parts, lengths=tuple(lengths), cu_seqlens=offsets.int(), long_offsets=offsets,
                   host_offsets=host, initial_state=initial_state)  # fmt: skip

    @property
    def is_one_sequence(self) -> bool:
        return len(self.lengths) == 1

    def leaves(self) -> dict[str, Tensor]:
        """The tensors that have gradients."""
        names = ("q", "k", "v", "z", "b", "A_log", "dt_bias", "initial_state")
        return {name: x for name in names if (x := getattr(self, name)) is not None}

    def asking_for_gradients(self) -> Chunkwise:
        return replace(self, **{name: x.detach().requires_grad_() for name, x in self.leaves().items()})


def forward_work(T: int, H: int, K: int = 128) -> tuple[float, float]:
    """Bytes and FLOPs of a forward: q, k, v, z, b read and o written once in bf16; dense tiles of 64 rows."""
    return T * H * (5 * K + 1) * 2, T * H * (6 * K * K + 10 * CHUNK * K)


def training_work(T: int, H: int, K: int = 128) -> tuple[float, float]:
    """Of forward and backward: inputs and d_o read, gradients written; recompute, then twice the forward."""
    moved, flops = forward_work(T, H, K)
    return moved + T * H * (9 * K + 2) * 2, 3 * flops + T * H * (4 * K * K + 8 * CHUNK * K)


def decode_work(N: int, H: int, window: int = 1, K: int = 128) -> tuple[float, float]:
    """Of `window` tokens of each of N sequences: the fp32 state read and written once, tokens in bf16."""
    return N * H * (2 * K * K * 4 + window * 5 * K * 2), N * window * H * 8 * K * K
