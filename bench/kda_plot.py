"""Draws time over floor for KDA, ours and the peers', from bench/results/<device>.json.

python bench/kda_plot.py h200       writes docs/images/kda-h200.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rows import RESULTS

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
# Not of the same run: it does not install for torch 2.11. A public snapshot built for sm_90a, on a card of
# this kind on 2026-11-30, forward only, in ms; newer builds are expected to be faster.
FLASHKDA = {"kda_fwd_t8192_h96": 1.46, "kda_fwd_8x1024_h96": 1.15, "kda_fwd_t65536_h12": 7.10}
TICKS = (1, 2, 5, 10, 20, 50)
ORDER = ("fwd", "fwdbwd", "decode", "verify")


def draw(device: str) -> Path | str:
    """The path of the picture, or why there is none."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return f"none, matplotlib is not installed; run python bench/kda_plot.py {device} where it is"
    path = RESULTS / f"{device}.json"
    rows = [r for r in json.loads(path.read_text()) if _is_drawn(r)] if path.exists() else []
    if not rows:
        return f"none, {path.name} has no rows of KDA"
    rows.sort(key=lambda r: (ORDER.index(r["work"].split("_")[1]), r["floor"]), reverse=True)
    figure = Figure(figsize=(8, 0.5 * len(rows) + 1.2), layout="constrained")
    axes = figure.subplots()
    bars = [("openk3", "#1f5fa8", 0.27, [r["ours"] for r in rows])]
    bars.append(("fla 0.6.0", "#c9803a", 0.0, [r["peers"].get("fla") for r in rows]))
    bars.append(("FlashKDA snapshot, another run", "#9a9a9a", -0.27, [FLASHKDA.get(r["work"]) for r in rows]))
    for label, color, shift, times in bars:
        drawn = [
            (y + shift, t / r["floor"], t) for y, (t, r) in enumerate(zip(times, rows, strict=True)) if t
        ]
        axes.barh([y for y, _, _ in drawn], [over for _, over, _ in drawn], 0.25, color=color, label=label)
        for y, over, t in drawn:
            axes.annotate(
                f"{t:.3g} ms", (over, y), (3, 0), textcoords="offset points", va="center", fontsize=7
            )
    axes.set_xscale("log")
    axes.set_xlim(0.9, 1.5 * axes.dataLim.x1)
    axes.set_xticks(TICKS, [str(tick) for tick in TICKS])
    axes.minorticks_off()
    axes.margins(y=0.01)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [r["work"].removeprefix("kda_") for r in rows])
    axes.set_xlabel("time over the floor of ideal bytes and FLOPs (log scale, shorter is better)")
    axes.set_title(f"Kimi Delta Attention on {device.upper()}", loc="left")
    axes.legend(loc="lower right", frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    IMAGES.mkdir(parents=True, exist_ok=True)
    picture = IMAGES / f"kda-{device}.png"
    figure.savefig(picture, dpi=150)
    return picture


def _is_drawn(row: dict[str, Any]) -> bool:
    return row["work"].startswith("kda_") and row["unit"] == "ms" and bool(row["floor"])


if __name__ == "__main__":
    print("plot:", draw(sys.argv[1] if len(sys.argv) > 1 else "h200"))
