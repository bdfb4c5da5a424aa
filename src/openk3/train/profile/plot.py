"""Steps as stacked bars, a colour for each part, the floors beside them.

matplotlib is slow to import: this module is imported where pictures are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from openk3.errors import InvalidInput
from openk3.train.profile import parts
from openk3.train.profile.result import Profile

DOTS_PER_INCH = 150
INK, FAINT, GRID = "#1f2430", "#6a7080", "#e4e6ec"
IDLE = "idle"
LEAST = 0.015
"""Share of the longest bar from which a part has its own colour in the picture; smaller ones go together."""
SMALLER = "smaller parts"

COLORS = {
    parts.KDA_RECURRENCE: "#1c3f7c",
    parts.KDA_PROJECTIONS: "#3f6db5",
    parts.KDA_CONVOLUTION: "#7ba0d6",
    parts.KDA_NORM: "#b3cbed",
    parts.MLA_ATTENTION: "#4a2b7a",
    parts.MLA_PROJECTIONS: "#8c6bc0",
    parts.EXPERT_PRODUCTS: "#1d6b4b",
    parts.EXPERT_DISPATCH: "#46a077",
    parts.EXPERT_COMBINE: "#83c7a5",
    parts.SHARED: "#a9c94f",
    parts.ROUTER: "#cfe08f",
    parts.DENSE: "#6f8f1f",
    parts.HEAD: "#b0482f",
    parts.EMBEDDING: "#e0926f",
    parts.MTP: "#f0c4ad",
    parts.ATTNRES: "#c9962b",
    parts.NORMS: "#e5c676",
    parts.RESIDUAL: "#f3e3b5",
    parts.NEWTON_SCHULZ: "#7d2f5e",
    parts.UPDATE: "#b9689a",
    parts.GRADIENT_SUMS: "#dba4c6",
    parts.CLIPPING: "#edd0e2",
    parts.QK_CLIP: "#d8bfd0",
    parts.BALANCE: "#c9b3c3",
    parts.COPIES: "#5f6a70",
    parts.OTHER: "#98a2a8",
    SMALLER: "#c3cacd",
    IDLE: "#ffffff",
}

Bar = Mapping[str, float]
"""Seconds by what a segment stands for."""


def draw(profiles: Mapping[str, Profile], path: str | Path) -> tuple[Path, Path]:
    """Write `path` as PNG and as SVG, whichever ending it has, and return both paths.

    Args:
        profiles: by what stands under the bar, such as "before" and "after". Behind the last one stands its
            floor.

    Raises:
        InvalidInput: nothing is there to draw.
    """
    bars = {label: time_bar(profile) for label, profile in profiles.items() if profile.measured}
    if profiles:
        label, last = list(profiles.items())[-1]
        if floor := floor_bar(last):
            bars["floor" if len(bars) < 2 else f"floor, {label}"] = floor
    if not bars:
        raise InvalidInput("plot: there is neither a time nor a floor to draw")
    figure = _figure(grouped(bars), list(profiles.values())[-1])
    stem = Path(path).with_suffix("") if Path(path).suffix in (".png", ".svg") else Path(path)
    png, svg = stem.with_name(stem.name + ".png"), stem.with_name(stem.name + ".svg")
    with mpl.rc_context({"svg.hashsalt": "openk3"}):  # equal profiles, equal bytes
        FigureCanvasSVG(figure).print_svg(svg, metadata={"Date": None})  # type: ignore[no-untyped-call]
    FigureCanvasAgg(figure).print_png(png)  # type: ignore[no-untyped-call]
    return png, svg


def time_bar(profile: Profile) -> Bar:
    """Seconds by part, and idle time."""
    bar = dict.fromkeys(parts.PARTS, 0.0)
    for item in profile.items:
        bar[item.part] = bar.get(item.part, 0.0) + (item.seconds or 0.0)
    if profile.measured:
        bar[IDLE] = profile.measured.idle
    return {part: seconds for part, seconds in bar.items() if seconds}


def floor_bar(profile: Profile) -> Bar:
    """The floors by part; empty where none is known."""
    bar = dict.fromkeys(parts.PARTS, 0.0)
    for item in profile.items:
        bar[item.part] = bar.get(item.part, 0.0) + (item.floor or 0.0)
    return {part: seconds for part, seconds in bar.items() if seconds}


def grouped(bars: Mapping[str, Bar], least: float = LEAST) -> dict[str, Bar]:
    """Parts that are small in every bar as one segment, the same in all bars."""
    longest = max(sum(bar.values()) for bar in bars.values())
    names = dict.fromkeys(name for bar in bars.values() for name in bar)
    large = {n for n in names if n == IDLE or any(bar.get(n, 0) >= least * longest for bar in bars.values())}
    together = {
        label: {name: seconds for name, seconds in bar.items() if name in large}
        | {SMALLER: sum(seconds for name, seconds in bar.items() if name not in large)}
        for label, bar in bars.items()
    }
    return {label: {n: s for n, s in bar.items() if s} for label, bar in together.items()}


def _figure(bars: Mapping[str, Bar], last: Profile) -> Figure:
    figure = Figure(figsize=(2.6 + 1.7 * len(bars), 7.0), dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots()
    for spine in ("top", "right", "left"):
        axes.spines[spine].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)
    order = [name for name in COLORS if any(name in bar for bar in bars.values())]
    totals = {label: sum(bar.values()) for label, bar in bars.items()}
    longest = max(totals.values())
    for x, (label, bar) in enumerate(bars.items()):
        at = 0.0
        for name in order:
            height = bar.get(name, 0.0)
            if not height:
                continue
            edge = FAINT if name == IDLE else "white"
            axes.bar(
                x, 1e3 * height, 0.62, 1e3 * at, color=COLORS[name], edgecolor=edge, linewidth=0.6,
                hatch="///" if name == IDLE else None,
            )  # fmt: skip
            if height >= 0.03 * longest:
                axes.text(
                    x, 1e3 * (at + height / 2), _number(1e3 * height), ha="center", va="center", fontsize=7,
                    color="white" if _is_dark(COLORS[name]) else INK,
                )  # fmt: skip
            at += height
        axes.text(
            x, 1e3 * (totals[label] + 0.01 * longest), f"{_number(1e3 * totals[label])} ms", ha="center",
            fontsize=9, color=INK,
        )  # fmt: skip
    axes.set_xticks(range(len(bars)), list(bars), color=INK)
    axes.set_xlim(-0.6, len(bars) - 0.4)
    axes.tick_params(length=0, labelcolor=INK)
    axes.set_ylabel("ms per step", color=INK)
    axes.set_title(f"{last.recipe} on {last.device}\n{last.shape}", loc="left", fontsize=8, color=FAINT)
    handles = [
        Patch(facecolor=COLORS[n], edgecolor=FAINT if n == IDLE else "white", label=n,
              hatch="///" if n == IDLE else None)
        for n in reversed(order)
    ]  # fmt: skip
    figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize=8, labelcolor=INK)
    return figure


def _is_dark(color: str) -> bool:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 140


def _number(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"
