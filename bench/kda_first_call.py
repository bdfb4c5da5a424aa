"""Seconds that first calls of KDA functions take on one GPU, all kernels compiled anew, one by one.

    PYTHONPATH=src python bench/kda_first_call.py [h200]

What K3 needs to train and to serve goes into results/<device>.json. Other models have another gate or head
size, and need as much of their own. The first call of all starts Triton.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable

import torch
from rows import merge, row

SHAPES = {"whole heads": (2048, 96, 128), "pieces": (65536, 4, 128), "heads of 64": (2048, 8, 64)}


def _calls() -> dict[str, Callable[[], object]]:
    from kda_decode import DECODE, VERIFY, C, _our_step, _our_window
    from kda_inputs import Chunkwise, Tokens

    from openk3.ops.kda import gated_kda
    from openk3.ops.short_conv import short_conv

    def forward(x: Chunkwise, bound: float | None) -> tuple[torch.Tensor, torch.Tensor]:
        o, state = gated_kda(x.q, x.k, x.v, x.z, x.b, x.A_log, x.dt_bias, x.cu_seqlens, lower_bound=bound)
        return o, state

    def both(x: Chunkwise, bound: float | None) -> object:
        x = x.asking_for_gradients()
        o, state = forward(x, bound)
        return torch.autograd.grad(o.float().sum() + state.sum(), list(x.leaves().values()))

    calls: dict[str, Callable[[], object]] = {}
    for bound in (-5.0, None):
        gate = "bounded" if bound else "unbounded"
        for name, (T, H, K) in SHAPES.items():
            x = Chunkwise.pack((T,), Tokens.draw(T, H, K))
            calls[f"forward, {gate}, {name}"] = lambda x=x, bound=bound: forward(x, bound)  # type: ignore[misc]
            calls[f"backward, {gate}, {name}"] = lambda x=x, bound=bound: both(x, bound)  # type: ignore[misc]
    calls["decode"] = _our_step(DECODE[0], 0)
    for work in (VERIFY[0], VERIFY[2]):
        calls[f"verify, windows of {work.window}"] = _our_window(work, 0)
    channels = torch.randn(2048, C, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    taps, offsets = (
        torch.randn(C, 4, device="cuda"),
        torch.tensor([0, 2048], device="cuda", dtype=torch.int32),
    )
    calls["convolution, both ways"] = lambda: torch.autograd.grad(
        short_conv(channels, taps, offsets)[0].float().sum(), channels
    )
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", nargs="?", default="h200", help="names the file of results")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/kda_first_call.py needs a CUDA device")
        return
    with tempfile.TemporaryDirectory() as empty:
        os.environ["TRITON_CACHE_DIR"] = empty
        seconds: dict[str, float] = {}
        for name, call in _calls().items():
            torch.cuda.synchronize()
            begun = time.perf_counter()
            call()
            torch.cuda.synchronize()
            seconds[name] = time.perf_counter() - begun
            print(f"{name:40s} {seconds[name]:6.2f} s", flush=True)
    of_k3 = sum(s for name, s in seconds.items() if "unbounded" not in name and "heads of 64" not in name)
    print(f"K3's: {of_k3:.1f} s; {sum(seconds.values()):.1f} s in all")
    shape = "K3's: forward and backward with whole heads and in pieces, decode, verify, convolution"
    merge([row("kda_first_calls", of_k3, "s", "lower", shape=shape)], arguments.device)


if __name__ == "__main__":
    main()
