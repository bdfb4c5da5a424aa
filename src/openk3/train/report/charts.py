"""The drawings of the report: matplotlib figures as inline SVG that takes its colours from the page.

Figures are drawn in placeholder colours, which become CSS variables in the SVG text, so that one drawing is
right in light and in dark; text stays text, in the page's typeface. A drawing knows series, not what they
mean.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import Colormap, LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from openk3.train.report.run import Numbers, Series

# Placeholder -> CSS variable. No other drawn colour may use one of these values.
INK, FAINT, GRID = "#010101", "#020202", "#030303"
PALETTE = tuple(f"#0{i}0{i}ff" for i in range(1, 7))
_VARIABLES = {INK: "--ink", FAINT: "--faint", GRID: "--grid"} | {
    color: f"--c{i}" for i, color in enumerate(PALETTE, start=1)
}

POINTS = 600
"""Points a line has at most: about one per pixel."""

# Both read on light and dark ground. LOAD is centred on the fair share: blue starves, red is overloaded.
WEIGHT = LinearSegmentedColormap.from_list("weight", ["#1c2340", "#3b4f9e", "#2f9c95", "#b8d96b", "#fff7c2"])
LOAD = LinearSegmentedColormap.from_list("load", ["#23406e", "#6f9fce", "#efe9dc", "#e58a5b", "#a3212b"])


@dataclass(frozen=True)
class Line:
    """One line of a chart. `faint`: drawn thin behind the others. `dots`: a mark at each point."""

    series: Series
    label: str = ""
    color: int = 0
    faint: bool = False
    dots: bool = False


def lines(
    drawn: Sequence[Line],
    *,
    log: bool = False,
    percent: bool = False,
    floor: float | None = None,
    ceiling: float | None = None,
    level: float | None = None,
) -> str:
    """A line chart over steps.

    Args:
        log: logarithmic values; those that are not positive are left out.
        percent: write shares as percentages.
        floor, ceiling: ends of the value axis, such as 0 for a share.
        level: a dashed horizontal line.
    """
    figure, axes = _canvas(5.4, 2.15)
    for line in drawn:
        series = line.series.binned(POINTS)
        values = np.where(series.values > 0, series.values, np.nan) if log else series.values
        axes.plot(
            series.steps,
            values,
            color=PALETTE[line.color % len(PALETTE)],
            linewidth=0.7 if line.faint else 1.5,
            alpha=0.35 if line.faint else 1.0,
            marker="o" if line.dots or len(series) == 1 else None,
            markersize=3.2,
            label=line.label or None,
            solid_joinstyle="round",
        )
    if log:
        axes.set_yscale("log")
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    if level is not None:
        axes.axhline(level, color=FAINT, linewidth=0.9, linestyle=(0, (4, 3)))
    if floor is not None:
        flat = all(np.all(line.series.values == floor) for line in drawn)
        axes.set_ylim(bottom=floor, top=floor + 1 if flat else None)
    if ceiling is not None:
        axes.set_ylim(top=ceiling)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if any(line.label for line in drawn):
        _legend(axes, len([line for line in drawn if line.label]))
    return _svg(figure)


def heat_map(
    values: Numbers,
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    colormap: Colormap = WEIGHT,
    limits: tuple[float, float],
    annotate: bool = False,
    x_label: str = "",
    y_label: str = "",
    wide: bool = False,
) -> str:
    """A matrix `[rows, columns]` as colours; NaN is left blank.

    Args:
        limits: values of the ends of `colormap`.
        annotate: write the number into each cell.
        wide: fill the page instead of half of it.
    """
    width, highest = (11.2, 7.0) if wide else (5.4, 2.6)
    height = min(highest, max(1.3, 0.6 + 0.19 * len(rows)))
    figure, axes = _canvas(width, height)
    image = axes.imshow(
        np.ma.masked_invalid(values),
        cmap=colormap,
        vmin=limits[0],
        vmax=limits[1],
        aspect="auto",
        interpolation="none",
    )
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.grid(False)
    _label_cells(axes.set_yticks, rows, most=int(7 * height))
    _label_cells(axes.set_xticks, columns, most=14)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.tick_params(length=0)
    bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.015, aspect=28)
    bar.outline.set_visible(False)
    bar.ax.set_facecolor("none")
    bar.ax.tick_params(length=0, labelsize=8, labelcolor=FAINT)
    bar.locator = MaxNLocator(4)
    bar.update_ticks()
    if annotate:
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                share = (value - limits[0]) / ((limits[1] - limits[0]) or 1.0)
                axes.text(
                    column,
                    row,
                    f"{value:.2f}".lstrip("0") if value < 1 else f"{value:.1f}",
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="#15171c" if _is_light(colormap, share) else "#f6f4ee",
                )
    return _svg(figure)


def padded(vectors: Mapping[str, Sequence[float]]) -> Numbers:
    """Vectors of different lengths as rows of one matrix, NaN where a row has ended."""
    width = max((len(v) for v in vectors.values()), default=0)
    out = np.full((len(vectors), width), np.nan)
    for row, vector in enumerate(vectors.values()):
        out[row, : len(vector)] = vector
    return out


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of `width` x `height` in units of 100 page pixels."""
    style: Any = {
        "font.size": 8.5,
        "text.color": INK,
        "axes.facecolor": "none",
        "axes.edgecolor": GRID,
        "axes.labelcolor": FAINT,
        "axes.labelsize": 8.5,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.formatter.useoffset": False,
        "grid.color": GRID,
        "grid.linewidth": 0.7,
        "xtick.color": GRID,
        "ytick.color": GRID,
        "xtick.labelcolor": FAINT,
        "ytick.labelcolor": FAINT,
        "ytick.major.size": 0,
        "ytick.minor.size": 0,
        "xtick.major.size": 3,
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=(width, height), dpi=100, layout="constrained", facecolor="none")
        axes = figure.add_subplot()
    axes.margins(x=0.01)
    return figure, axes


def _legend(axes: Axes, entries: int) -> None:
    axes.legend(
        frameon=False,
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
        ncols=min(entries, 8),
        fontsize=8,
        labelcolor=FAINT,
        handlelength=1.1,
        handletextpad=0.5,
        columnspacing=1.2,
        borderpad=0,
    )


def _label_cells(set_ticks: object, names: Sequence[str], *, most: int) -> None:
    """Name at most `most` evenly spaced cells of an axis."""
    step = max(1, -(-len(names) // most))
    at = list(range(0, len(names), step))
    set_ticks(at, [names[i] for i in at])  # type: ignore[operator]


def _is_light(colormap: Colormap, share: float) -> bool:
    red, green, blue = (int(to_hex(colormap(share))[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue > 140


def _svg(figure: Figure) -> str:
    """The figure as an `<svg>` element that scales to its container and follows the page's colours."""
    buffer = io.StringIO()
    # A fixed salt: one run, one page, byte for byte.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "openk3"}):
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None, "Creator": None})  # type: ignore[no-untyped-call]
    text = buffer.getvalue()
    opening, rest = text[text.index("<svg") :].split(">", 1)
    rest = re.sub(r"<metadata>.*?</metadata>", "", rest, count=1, flags=re.DOTALL)
    rest = re.sub(r'<g id="[^"]*"', "<g", rest)  # the same in every drawing of a page
    for placeholder, variable in _VARIABLES.items():
        rest = rest.replace(placeholder, f"var({variable})")
    return re.sub(r' (width|height)="[^"]*"', "", opening) + ">" + rest
