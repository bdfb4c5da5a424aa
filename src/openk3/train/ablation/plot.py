"""Results on text as pictures: means with standard errors, and every run behind them as a dot.

matplotlib is slow to import: this module is imported where pictures are made. Knows lines and results, not
where they come from.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from openk3.train.ablation.config import AblationSet, Equal, Group
from openk3.train.ablation.results import Result
from openk3.train.ablation.summary import Line, Mean, comparisons

DOTS_PER_INCH = 150
INK, FAINT, GRID = "#1f2430", "#8a90a0", "#e4e6ec"
_COLORS: dict[Equal, str] = {"tokens": "#3b4f9e", "flops": "#d0743c"}
NAMES: dict[Equal, str] = {"tokens": "equal tokens", "flops": "equal training FLOPs"}
_ROW, _HEAD = 0.34, 1.15
"""Inches of a row, and of what stands above and below the rows."""


@dataclass(frozen=True)
class _Panel:
    name: str
    title: str
    scale: float = 1.0
    difference: bool = False
    """Of the differences to the baseline; or of the values."""
    least: float | None = None
    """The axis begins at zero and reaches at least this; None leaves it to the numbers."""


_DIFFERENCE = _Panel("bits_per_byte", "difference to the baseline", difference=True)
_OVERVIEW = _Panel("bits_per_byte", "bits per byte more than the baseline", difference=True)


def group_picture(
    ablation: AblationSet, group: Group, lines: Sequence[Line], results: Sequence[Result]
) -> bytes:
    """PNG of one group: a row for each variant, a panel for each number."""
    own = [line for line in lines if line.group == group.name]
    panels = _panels(own)
    variants = [v.name for v in group.variants if any(line.variant == v.name for line in own)]
    figure = Figure(figsize=(2.2 + 2.4 * len(panels), _HEAD + _ROW * len(variants)), dpi=DOTS_PER_INCH)
    equals = comparisons(group, own)
    for axes, panel in zip(_axes(figure, len(panels), variants), panels, strict=True):
        _dress(axes, panel)
        for line in own:
            means = line.differences if panel.difference else line.values
            if line.equal in equals and panel.name in means:
                y = variants.index(line.variant) + _shift(equals, line.equal)
                _mark(axes, panel, means[panel.name], _singles(panel, group, line, results), y, line.equal)
        if panel.least is not None:
            top = max(axes.get_xlim()[1], panel.least)
            axes.set_xlim(-0.04 * top, top)  # a mark at zero is whole
    _finish(figure, f"{ablation.name}: {group.name}", equals)
    return png(figure)


def overview_picture(ablation: AblationSet, lines: Sequence[Line], results: Sequence[Result]) -> bytes | None:
    """PNG of the whole set: what each variant differs from its baseline by, in bits per byte.

    None where there is no such difference.
    """
    shown = [line for line in lines if _DIFFERENCE.name in line.differences]
    if not shown:
        return None
    groups = {group.name: group for group in ablation.groups}
    equals = {name: comparisons(g, [x for x in lines if x.group == name]) for name, g in groups.items()}
    rows = list(dict.fromkeys((line.group, line.variant) for line in shown))
    figure = Figure(figsize=(7.0, _HEAD + _ROW * len(rows)), dpi=DOTS_PER_INCH)
    (axes,) = _axes(figure, 1, [f"{group}: {variant}" for group, variant in rows])
    _dress(axes, _OVERVIEW)
    for line in shown:
        if line.equal in equals[line.group]:
            y = rows.index((line.group, line.variant)) + _shift(equals[line.group], line.equal)
            dots = _singles(_DIFFERENCE, groups[line.group], line, results)
            _mark(axes, _DIFFERENCE, line.differences[_DIFFERENCE.name], dots, y, line.equal)
    _finish(figure, ablation.name, max(equals.values(), key=len))
    return png(figure)


def _panels(lines: Sequence[Line]) -> list[_Panel]:
    names = {name for line in lines for name in line.values}
    if "bits_per_byte" not in names:
        return [_Panel("train_loss", "training loss")]
    panels = [_Panel("bits_per_byte", "bits per byte"), _DIFFERENCE]
    if "maxvio" in names:
        panels.append(_Panel("maxvio", "maxvio", least=0.5))
        panels.append(_Panel("dead_experts", "dead experts, %", scale=100, least=1.0))
    return panels


def _axes(figure: Figure, columns: int, rows: Sequence[str]) -> list[Axes]:
    axes = list(figure.subplots(1, columns, sharey=True, squeeze=False)[0])
    axes[0].set_yticks(range(len(rows)), rows)
    axes[0].set_ylim(len(rows) - 0.5, -0.5)
    return axes


def _dress(axes: Axes, panel: _Panel) -> None:
    axes.set_title(panel.title, fontsize=8, color=INK)
    axes.tick_params(labelsize=8, colors=INK, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)
    if panel.difference:
        axes.axvline(0, color=FAINT, linewidth=0.8)


def _shift(equals: Sequence[Equal], equal: Equal) -> float:
    """Where in its row a comparison is drawn."""
    return 0.28 * (equals.index(equal) - (len(equals) - 1) / 2)


def _mark(axes: Axes, panel: _Panel, mean: Mean, dots: Sequence[float], y: float, equal: Equal) -> None:
    axes.plot(dots, [y] * len(dots), ".", color=_COLORS[equal], alpha=0.35, markersize=5)
    axes.errorbar(
        mean.value * panel.scale,
        y,
        xerr=None if mean.error is None else mean.error * panel.scale,
        fmt="o",
        markersize=4.5,
        capsize=2.5,
        linewidth=1.2,
        color=_COLORS[equal],
    )


def _singles(panel: _Panel, group: Group, line: Line, results: Sequence[Result]) -> list[float]:
    """The single runs behind a mean."""
    here = [r for r in results if (r.group, r.equal) == (line.group, line.equal)]
    own = {r.seed: r.measured[panel.name] for r in here if r.variant == line.variant}
    if not panel.difference:
        return [panel.scale * value for value in own.values()]
    baseline = {r.seed: r.measured[panel.name] for r in here if r.variant == group.baseline.name}
    return [panel.scale * (own[seed] - baseline[seed]) for seed in own.keys() & baseline.keys()]


def _finish(figure: Figure, title: str, equals: Sequence[Equal]) -> None:
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.3 / figure.get_figheight()))
    top = 1 - 0.08 / figure.get_figheight()
    figure.text(0.01, top, title, va="top", fontsize=10, color=INK)
    for number, equal in enumerate(reversed(equals) if len(equals) > 1 else ()):
        figure.text(
            0.99 - 0.13 * number * 12 / figure.get_figwidth(),
            top,
            f"\N{BLACK CIRCLE} {NAMES[equal]}",
            va="top",
            ha="right",
            fontsize=8,
            color=_COLORS[equal],
        )


def png(figure: Figure) -> bytes:
    """A finished figure as the bytes of a PNG file."""
    out = io.BytesIO()
    FigureCanvasAgg(figure)  # drawn without a display
    figure.savefig(out, format="png")
    return out.getvalue()
