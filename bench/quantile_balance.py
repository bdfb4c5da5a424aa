"""Quantile Balancing beside the sign rule on a synthetic 896-expert top-16 router that drifts, step by step.

    python bench/quantile_balance.py

Every rule routes the same tokens with the bias that it made from the batches before, as in training: step 0
is the unbalanced router for all of them. Two speeds of drift, since an average over steps lags little at one
and a lot at the other. Draws docs/images/quantile_balance.svg, and merges maxvio (largest load / mean load
- 1), dead experts and the cost of an update into bench/results/cpu.json.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from matplotlib import pyplot
from rows import merge, row

from openk3.ops.moe.route import select_experts
from openk3.ops.quantile_balance import (
    average_bias,
    bias_from_histogram,
    exact_bias,
    required_bias_histogram,
    sign_update,
)

TOKENS, EXPERTS, TOP, WIDTH, STEPS, LAST = 8192, 896, 16, 64, 40, 10
MEAN_LOAD = TOKENS * TOP / EXPERTS
DRIFTS = {"slow": 0.01, "fast": 0.1}  # what a step adds to a logit, where its standard deviation is 1.4
IMAGE = Path(__file__).parents[1] / "docs" / "images" / "quantile_balance.svg"
Tensor = torch.Tensor


class Router:
    """Scores of random tokens; an expert's row and its popularity (mean logit) walk, at constant variance."""

    def __init__(self, drift: float) -> None:
        self.drift = drift
        self.random = torch.Generator().manual_seed(0)
        self.rows = self.normal(EXPERTS, WIDTH) / WIDTH**0.5
        self.popularity = self.normal(EXPERTS)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def step(self) -> Tensor:
        """Drift once and score a fresh batch, `[TOKENS, EXPERTS]`."""
        keep = (1 - self.drift**2) ** 0.5
        self.rows = keep * self.rows + self.drift * self.normal(EXPERTS, WIDTH) / WIDTH**0.5
        self.popularity = keep * self.popularity + self.drift * self.normal(EXPERTS)
        return torch.sigmoid(self.normal(TOKENS, WIDTH) @ self.rows.T + self.popularity)


@dataclass
class Batch:
    """What a rule may look at: one routed batch, and how many came before."""

    scores: Tensor
    cutoff: Tensor
    load: Tensor
    step: int


@dataclass
class Run:
    """One rule on one router: its bias, and what came of it step by step."""

    update: Callable[[Tensor, Batch], Tensor]
    bias: Tensor = field(default_factory=lambda: torch.zeros(EXPERTS))
    maxvio: list[float] = field(default_factory=list)
    dead: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def step(self, scores: Tensor) -> None:
        ids, cutoff = select_experts(scores + self.bias, TOP)
        load = torch.bincount(ids.flatten(), minlength=EXPERTS)
        self.maxvio.append(float(load.max()) / MEAN_LOAD - 1)
        self.dead.append(float((load == 0).double().mean()))
        start = time.perf_counter()
        self.bias = self.update(self.bias, Batch(scores, cutoff, load, len(self.seconds)))
        self.seconds.append(time.perf_counter() - start)

    def settled(self) -> float:
        return sum(self.maxvio[-LAST:]) / LAST


def by_histogram(bias: Tensor, batch: Batch) -> Tensor:
    return bias_from_histogram(required_bias_histogram(batch.scores, batch.cutoff, bias), bias, TOP)


RULES: dict[str, Callable[[Tensor, Batch], Tensor]] = {
    "sign rule 0.001": lambda bias, batch: sign_update(bias, batch.load, 1e-3),
    "sign rule 0.01": lambda bias, batch: sign_update(bias, batch.load, 1e-2),
    "QB exact": lambda bias, batch: exact_bias(batch.scores, batch.cutoff, TOP),
    "QB histogram": by_histogram,
    "QB histogram, EMA 0.9": lambda bias, batch: average_bias(
        bias, by_histogram(bias, batch), batch.step, 0.9
    ),
}
LOOKS = dict(
    zip(
        RULES,
        [
            ("#aaaaaa", "-", 1.6),
            ("#555555", "-", 1.6),
            ("#56b4e9", "-", 4.0),
            ("#d55e00", "-", 1.4),
            ("#009e73", "-", 1.4),
        ],
        strict=True,
    )
)


def simulate(drift: float) -> dict[str, Run]:
    router, runs = Router(drift), {name: Run(update) for name, update in RULES.items()}
    for step in range(STEPS):
        scores = router.step()
        for run in runs.values():
            run.step(scores)
        print(
            f"drift {drift} step {step:2}",
            *(f"{name} {run.maxvio[-1]:.2f}" for name, run in runs.items()),
            sep="  ",
        )
    return runs


def sampling_floor() -> float:
    """Mean maxvio of a router without any preference: what a batch of this size shows at best."""
    random = torch.Generator().manual_seed(1)
    loads = (
        torch.bincount(torch.rand(TOKENS, EXPERTS, generator=random).topk(TOP, dim=1).indices.flatten())
        for _ in range(5)
    )
    return sum(float(load.max()) / MEAN_LOAD - 1 for load in loads) / 5


def draw(results: dict[str, dict[str, Run]], floor: float) -> None:
    pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "quantile_balance", "font.size": 10})
    figure, grid = pyplot.subplots(
        2, len(results), figsize=(9, 5.6), sharex=True, sharey="row", height_ratios=[2, 1], squeeze=False
    )
    for (speed, runs), (upper, lower) in zip(results.items(), grid.T, strict=True):
        for name, run in runs.items():
            colour, line, width = LOOKS[name]
            upper.plot(run.maxvio, line, color=colour, linewidth=width, label=name)
            lower.plot(run.dead, line, color=colour, linewidth=width)
        upper.axhline(floor, color="black", linewidth=0.9, linestyle=":", label="sampling noise")
        upper.set_yscale("log")
        upper.set_yticks(
            [0.2, 0.5, 1, 2, 5, 10, 20, 50], labels=["0.2", "0.5", "1", "2", "5", "10", "20", "50"]
        )
        upper.minorticks_off()
        upper.set_title(f"{speed} drift: logits move by {DRIFTS[speed]} a step", fontsize=10)
        lower.set_xlabel("step")
        lower.yaxis.set_major_formatter("{x:.0%}")
        lower.set_ylim(bottom=0)
        for axes in (upper, lower):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", color="#e8e8e8", linewidth=0.6)
            axes.set_xlim(0, STEPS - 1)
    grid[0, 0].set_ylabel("maxvio: max load / mean - 1")
    grid[1, 0].set_ylabel("dead experts")
    figure.suptitle(f"Load of {EXPERTS} experts, top {TOP}, {TOKENS:,} tokens a step", fontsize=11)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), frameon=False, ncols=3, loc="lower center")
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    IMAGE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(IMAGE, metadata={"Date": None})


def main() -> None:
    results = {speed: simulate(drift) for speed, drift in DRIFTS.items()}
    floor = sampling_floor()
    draw(results, floor)
    rows = []
    for speed, runs in results.items():
        shape = f"T={TOKENS} E={EXPERTS} k={TOP}, drift {DRIFTS[speed]}, {STEPS} steps"
        ours, peers = (
            runs["QB histogram"],
            {name: run for name, run in runs.items() if name != "QB histogram"},
        )
        for work, measure, least in (
            (f"maxvio, {speed} drift, last {LAST} steps", Run.settled, floor),
            (f"maxvio, {speed} drift, after one update", lambda run: run.maxvio[1], floor),
            (f"dead experts, {speed} drift, last step", lambda run: run.dead[-1], 0.0),
        ):
            rows.append(
                row(
                    f"quantile_balance {work}",
                    measure(ours),
                    "share",
                    "lower",
                    peers={name: measure(run) for name, run in peers.items()},
                    floor=least,
                    shape=shape,
                )
            )
    slow = results["slow"]
    rows.append(
        row(
            "quantile_balance update of one layer",
            1e3 * min(slow["QB histogram"].seconds),
            "ms",
            "lower",
            peers={"QB exact": 1e3 * min(slow["QB exact"].seconds)},
            shape=f"T={TOKENS} E={EXPERTS} k={TOP} fp32, threads={torch.get_num_threads()}",
        )
    )
    print("drew", IMAGE, "and merged into", merge(rows, "cpu"))


if __name__ == "__main__":
    main()
