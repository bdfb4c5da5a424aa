"""Draws a run that bench/train_r1.py kept: losses, speed, balance of experts, first losses beside eager's.

python bench/train_plot.py          reads bench/results/r1, writes docs/images/r1-run.png and prints a summary
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from rows import RESULTS

from openk3.checkpoint.jsonl import read_jsonl

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
INK, SECOND, FAINT = "#1f5fa8", "#c9803a", "#c8d4e6"


def draw(rows: list[dict[str, Any]], firsts: dict[str, Any], picture: Path) -> None:
    from matplotlib.figure import Figure

    steps = [at["step"] for at in rows]
    figure = Figure(figsize=(11, 6.6), layout="constrained")
    (losses, speed), (balance, first) = figure.subplots(2, 2)

    losses.plot(steps, [at["loss"] for at in rows], color=INK, linewidth=0.8, label="training")
    held_out = [(at["step"], at["val_loss"]) for at in rows if "val_loss" in at]
    losses.plot(*zip(*held_out, strict=True), "o", color=SECOND, label="held out")
    losses.set(title="loss, nats a token", xlabel="step", ylim=(2, None))
    losses.legend(frameon=False)

    speed.plot(steps, [at["tokens_per_second"] / 1e3 for at in rows], color=INK, linewidth=0.8)
    speed.set(title="thousand tokens a second, of the step", xlabel="step", ylim=(0, None))

    for name, color, show in (("mean of the layers", INK, statistics.mean), ("the worst layer", FAINT, max)):
        balance.plot(steps, [show(at["maxvio"].values()) for at in rows], color=color, lw=0.8, label=name)
    balance.set(title="maxvio: fullest expert over an even share, less 1", xlabel="step", ylim=(0, None))
    dead = balance.twinx()
    dead.plot(steps, [100 * max(at["dead_experts"].values()) for at in rows], color=SECOND, linewidth=1)
    dead.set_ylabel("% of experts without a token, worst layer", color=SECOND)
    dead.set_ylim(0, 100)
    balance.legend(frameon=False, loc="upper right")

    eager = firsts["eager"]
    for name, color in (("kernels", INK), ("eager, in halves", SECOND)):
        apart = [a - b for a, b in zip(firsts[name], eager, strict=False)]
        first.plot(range(1, len(apart) + 1), apart, ".-", color=color, linewidth=0.8, label=name)
    first.axhline(0, color="black", linewidth=0.6)
    first.set(title=f"first losses less those of eager, {firsts['tokens_a_step']:,} tokens", xlabel="step")
    first.legend(frameon=False)
    for axes in (losses, speed, balance, first):
        axes.spines[["top"]].set_visible(False)
    figure.savefig(picture, dpi=130)


def main() -> int:
    folder = RESULTS / "r1"
    rows = read_jsonl(folder / "metrics.jsonl")
    firsts = json.loads((folder / "first_losses.json").read_text())
    worst = max(rows, key=lambda at: max(at["dead_experts"].values()))
    print(f"steps {len(rows)}, tokens {rows[-1]['tokens']:,}, last loss {rows[-1]['loss']:.3f}")
    for at in rows:
        if "val_loss" in at:
            print(f"step {at['step']}: held out {at['val_loss']:.4f}, {at['bits_per_byte']:.4f} bits a byte")
    print(
        f"dead experts: {max(worst['dead_experts'].values()):.1%} of a layer at most, at step {worst['step']}"
    )
    spans = ((1, 20), (21, 100), (101, 250), (251, 500))
    for low, high in spans:
        part = [at for at in rows if low <= at["step"] <= high]
        dead = statistics.mean(statistics.mean(at["dead_experts"].values()) for at in part)
        vio = statistics.mean(statistics.mean(at["maxvio"].values()) for at in part)
        print(f"steps {low} to {high}: {dead:.2%} dead, maxvio {vio:.2f}, means of layers and steps")
    try:
        IMAGES.mkdir(parents=True, exist_ok=True)
        draw(rows, firsts, IMAGES / "r1-run.png")
    except ImportError:
        print("no picture: matplotlib is not installed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
