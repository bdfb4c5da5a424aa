"""Streamed generation at four budgets, beside the same checkpoint loaded whole; a process for each.

    OMP_NUM_THREADS=1 python bench/streamed.py

The checkpoint has the official layout at reduced width, MXFP4 experts and random numbers, 1.2 GB. Its files
are in the page cache, so that times are of computing and copying; a disk adds the bytes read over its speed.
Memory is the largest resident size less that after the imports. Loaded whole, weights are float32.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from rows import merge, row

sys.path.append(
    str(Path(__file__).resolve().parents[1] / "tests")
)  # the checkpoint and the process are the tests'
from checkpoint.streaming_child import spend
from checkpoint.synthetic import shaped_like_k3, write_synthetic

CONFIG = shaped_like_k3(hidden=512, layers=8, experts=256, chosen=8, width=768, latent=512, vocab=4096)
SHARES = (0.1, 0.25, 0.5, 1.0)
PROMPT, TOKENS = 60, 64


def main() -> None:
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_synthetic(Path(scratch) / "checkpoint", CONFIG)
        total = sum(shard.stat().st_size for shard in folder.glob("*.safetensors"))
        whole = spend(folder, 0, prompt=PROMPT, tokens=TOKENS)
        shape = f"{total / 1e9:.2f} GB, 7 layers of 256 MXFP4 experts, 8 a token; float32, 1 thread"
        print("| budget | experts found in memory | read per token | time per token | memory |")
        print("|---|---|---|---|---|")
        for share in SHARES:
            cost = spend(folder, int(share * total), prompt=PROMPT, tokens=TOKENS)
            results += _rows(share, cost, whole, shape)
            print(
                f"| {share:.0%}, {share * total / 1e6:.0f} MB | {cost['hit_rate']:.1%} "
                f"| {cost['bytes'] / 1e6:.1f} MB | {1e3 * cost['seconds']:.0f} ms "
                f"| {cost['memory'] / 1e6:.0f} MB |"
            )
        print(f"| loaded whole | | | {1e3 * whole['seconds']:.0f} ms | {whole['memory'] / 1e6:.0f} MB |")
    print("merged into", merge(results, "cpu"))


def _rows(share: float, cost: dict, whole: dict, shape: str) -> list[dict[str, object]]:
    work = f"streamed generation at {share:.0%} of the bytes"
    time, memory = (
        {"loaded whole": scale * whole[key]} for key, scale in (("seconds", 1e3), ("memory", 1e-6))
    )
    return [
        row(f"{work}, a token", 1e3 * cost["seconds"], "ms", "lower", shape=shape, peers=time),
        row(f"{work}, memory", cost["memory"] / 1e6, "MB", "lower", shape=shape, peers=memory),
        row(f"{work}, read a token", cost["bytes"] / 1e6, "MB", "lower", shape=shape),
        row(f"{work}, experts found", cost["hit_rate"], "share", "higher", shape=shape),
    ]


if __name__ == "__main__":
    main()
