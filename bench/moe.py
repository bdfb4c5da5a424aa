"""Routed experts on a CPU: ours beside a loop over experts with autograd, for one layer of a small model.

    OMP_NUM_THREADS=2 python bench/moe.py

The floor is the time of the matrix products alone, measured as plain products of the same total size: three
forward, eleven with the backward (gate and up are multiplied out again there).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from rows import merge, row

from openk3.ops.activation import Activation
from openk3.ops.moe import expert_ffn, plan, route

T, K, E, LATENT, WIDTH = 8192, 4, 32, 96, 64
Tensor = torch.Tensor


def loop_over_experts(x: Tensor, weights: Tensor, ids: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
    """The usual eager form: for each expert, pick its tokens, run it, add to the sum."""
    u = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(ids == e)
        rows = x[token]
        out = Activation()(rows @ w1[e].T, rows @ w3[e].T) @ w2[e].T
        u = u.index_add(0, token, weights[token, slot, None] * out)
    return u


def milliseconds(function: Callable[[], object], repeats: int = 15) -> float:
    """The least of several: what the work takes when nothing else disturbs it."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(T, LATENT, requires_grad=True)
    w1, w3 = (torch.randn(E, WIDTH, LATENT).div_(LATENT**0.5).requires_grad_() for _ in range(2))
    w2 = torch.randn(E, LATENT, WIDTH).div_(WIDTH**0.5).requires_grad_()
    logits, d_u = torch.randn(T, E), torch.randn(T, LATENT)
    ids, weights, _, _ = route(logits, torch.zeros(E), K)
    weights.requires_grad_()
    leaves = [x, weights, w1, w3, w2]

    def ours() -> Tensor:
        return expert_ffn(x, weights, plan(ids, E), w1, w3, w2, Activation())

    def loop() -> Tensor:
        return loop_over_experts(x, weights, ids, w1, w3, w2)

    rows_in, matrix = torch.randn(T * K, LATENT), torch.randn(LATENT, WIDTH)
    product = milliseconds(lambda: rows_in @ matrix)
    shape = f"T={T} k={K} E={E} l={LATENT} F={WIDTH} fp32, {torch.get_num_threads()} threads"
    results = []
    for name, products, run in (
        ("forward", 3, lambda f: f().detach()),
        ("forward and backward", 11, lambda f: torch.autograd.grad(f(), leaves, d_u)),
    ):
        peer = milliseconds(lambda run=run: run(loop))
        mine = milliseconds(lambda run=run: run(ours))
        print(
            f"{name}: ours {mine:.1f} ms, loop over experts {peer:.1f} ms, products {products * product:.1f}"
        )
        results.append(
            row(
                f"moe expert_ffn {name}",
                mine,
                "ms",
                "lower",
                shape=shape,
                peers={"torch": peer},
                floor=products * product,
            )
        )
    print("merged into", merge(results, "cpu"))


if __name__ == "__main__":
    main()
