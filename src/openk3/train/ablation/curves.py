"""A recall probe as a picture: answers right against the length of the sequence, a curve for each variant.

Beside the curves stand the two levels that need no recall: a guess out of the alphabet, and a guess out of
what was shown (`openk3.data.probes`). Imports matplotlib: this module is imported where pictures are made.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from openk3.train.ablation.config import AblationSet, Group
from openk3.train.ablation.plot import DOTS_PER_INCH, FAINT, GRID, INK, NAMES, png
from openk3.train.ablation.results import ACCURACY, Result
from openk3.train.ablation.summary import Line
from openk3.train.config import ProbeData

_COLORS = ("#3b4f9e", "#d0743c", "#3d8a6a", "#8a4f9e", "#a8893a", "#5b6478")
_SPREAD = 0.012
"""Variants stand side by side: a step in the decimal logarithm of the length, so that bars do not overlap."""


def curves_picture(
    ablation: AblationSet, group: Group, lines: Sequence[Line], results: Sequence[Result]
) -> bytes:
    """PNG of a group whose data is a probe; see `curves_figure`."""
    return png(curves_figure(ablation, group, lines, results))


def curves_figure(
    ablation: AblationSet, group: Group, lines: Sequence[Line], results: Sequence[Result]
) -> Figure:
    """A panel for each way to compare.

    Means have their standard errors over seeds; every run is a dot. Lengths up to the longest training
    sequence are shaded.
    """
    figure = Figure(figsize=(5.6 * len(group.equal), 3.6), dpi=DOTS_PER_INCH)
    grid = figure.subplots(1, len(group.equal), sharey=True, squeeze=False)
    config = ablation.config(
        group, group.baseline, ablation.seeds[0], 0 if group.baseline.candidates else None
    )
    assert isinstance(config.data, ProbeData)
    for axes, equal in zip(grid[0], group.equal, strict=True):
        own = [line for line in lines if (line.group, line.equal) == (group.name, equal)]
        lengths = sorted({n for line in own for n in _lengths(line)})
        _frame(axes, lengths, max(config.data.lengths or (config.train.context,)))
        levels = [100 * config.data.probe.unbound(n) for n in lengths]
        chance = [100 * config.data.probe.chance] * len(lengths)
        axes.plot(lengths, levels, "--", color=FAINT, linewidth=1, label="knows what was shown, not where")
        axes.plot(lengths, chance, ":", color=FAINT, linewidth=1, label="guesses")
        for place, line in enumerate(own):
            runs = [r for r in results if (r.group, r.equal, r.variant) == (group.name, equal, line.variant)]
            _curve(axes, line, runs, place, 10 ** (_SPREAD * (place - (len(own) - 1) / 2)))
        if len(group.equal) > 1:
            axes.set_title(f"at {NAMES[equal]}", fontsize=8, color=INK)
    grid[0][0].set_ylabel("answers right, %", fontsize=8, color=INK)
    grid[0][-1].legend(fontsize=7, frameon=False, labelcolor=INK, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle(f"{ablation.name}: {group.name}", x=0.01, ha="left", fontsize=10, color=INK)
    figure.tight_layout()
    return figure


def _lengths(line: Line) -> list[int]:
    return sorted(int(name.removeprefix(ACCURACY)) for name in line.values if name.startswith(ACCURACY))


def _frame(axes: Axes, lengths: Sequence[int], trained: int) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
    axes.minorticks_off()
    axes.set_ylim(-3, 103)
    axes.set_xlabel("tokens of a sequence", fontsize=8, color=INK)
    axes.tick_params(labelsize=8, colors=INK, length=0)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.axvspan(min(lengths) / 1.2, trained, color=GRID, alpha=0.5, linewidth=0, label="trained")
    axes.set_xlim(min(lengths) / 1.2, max(lengths) * 1.2)


def _curve(axes: Axes, line: Line, runs: Sequence[Result], place: int, shift: float) -> None:
    lengths, color = _lengths(line), _COLORS[place % len(_COLORS)]
    means = [line.values[f"{ACCURACY}{n}"] for n in lengths]
    for run in runs:
        dots = [100 * run.measured[f"{ACCURACY}{n}"] for n in lengths]
        axes.plot([n * shift for n in lengths], dots, ".", color=color, alpha=0.35, markersize=4)
    axes.errorbar(
        [n * shift for n in lengths],
        [100 * mean.value for mean in means],
        yerr=None if line.runs < 2 else [100 * (mean.error or 0.0) for mean in means],
        fmt="o-",
        markersize=4.5,
        capsize=2.5,
        linewidth=1.2,
        color=color,
        label=line.variant,
    )
