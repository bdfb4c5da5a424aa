"""Routed experts on a CPU: ours beside a loop over experts with autograd, for one layer of a small model.

    OMP_NUM_THREADS=2 python bench/moe.py

The floor is the time of the matrix products alone, measured as one plain product of all rows: three forward,
nine with the backward, to which recomputing gate and up adds two. The loop keeps every intermediate.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from rows import merge, row

from openk3.ops.activation import Activation
from openk3.ops.moe import expert_ffn, plan, route

T, K, LATENT, WIDTH = 8192, 4, 96, 64
Tensor = torch.Tensor


def loop_over_experts(x: Tensor, weights: Tensor, ids: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
    """The usual eager form: for each expert, pick its tokens, run it, add to the sum."""
    u = torch.zeros_like(x)
    for e in range(len(w1)):
        token, slot = torch.where(ids == e)
        rows = x[token]
        out = Activation()(rows @ w1[e].T, rows @ w3[e].T) @ w2[e].T
        u = u.index_add(0, token, weights[token, slot, None] * out)
    return u


def milliseconds(function: Callable[[], object], repeats: int = 9) -> float:
    """The least of several: what the work takes when nothing else disturbs it."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def measure(experts: int) -> list[dict[str, object]]:
    torch.manual_seed(0)
    x = torch.randn(T, LATENT, requires_grad=True)
    w1, w3 = (torch.randn(experts, WIDTH, LATENT).div_(LATENT**0.5).requires_grad_() for _ in range(2))
    w2 = torch.randn(experts, LATENT, WIDTH).div_(WIDTH**0.5).requires_grad_()
    d_u = torch.randn(T, LATENT)
    ids, weights, _, _ = route(torch.randn(T, experts), torch.zeros(experts), K)
    weights.requires_grad_()

    def ours(recompute: bool) -> Tensor:
        return expert_ffn(x, weights, plan(ids, experts), w1, w3, w2, Activation(), recompute=recompute)

    def loop() -> Tensor:
        return loop_over_experts(x, weights, ids, w1, w3, w2)

    def both_ways(forward: Callable[[], Tensor]) -> object:
        return torch.autograd.grad(forward(), [x, weights, w1, w3, w2], d_u)

    rows, matrix = torch.randn(T * K, LATENT), torch.randn(LATENT, WIDTH)
    product = milliseconds(lambda: rows @ matrix)
    there, there_and_back = milliseconds(loop), milliseconds(lambda: both_ways(loop))
    shape = f"T={T} k={K} E={experts} l={LATENT} F={WIDTH} fp32, threads={torch.get_num_threads()}"
    results = []
    for work, peer, products, run in (
        ("forward", there, 3, lambda: ours(True)),
        ("forward and backward", there_and_back, 11, lambda: both_ways(lambda: ours(True))),
        ("forward and backward, gate and up kept", there_and_back, 9, lambda: both_ways(lambda: ours(False))),
    ):
        mine = milliseconds(run)
        floor = products * product
        print(f"E={experts} {work}: ours {mine:.1f} ms, loop {peer:.1f} ms, products {floor:.1f} ms")
        results.append(
            row(
                f"expert_ffn {work}, {experts} experts",
                mine,
                "ms",
                "lower",
                peers={"loop over experts": peer},
                floor=floor,
                shape=shape,
            )
        )
    return results


def main() -> None:
    print("merged into", merge(measure(32) + measure(256), "cpu"))


if __name__ == "__main__":
    main()
