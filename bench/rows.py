"""Results of benchmarks as rows of `bench/results/<device>.json`, one row for each piece of work.

`work` is the key: a newer row replaces the older one, rows of other scripts stay. Documentation takes its
numbers from these files only.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from pathlib import Path
from typing import Literal

import torch

RESULTS = Path(__file__).parent / "results"


def row(
    work: str,
    ours: float,
    unit: str,
    better: Literal["lower", "higher"],
    *,
    shape: str,
    peers: dict[str, float] | None = None,
    floor: float | None = None,
) -> dict[str, object]:
    """One result. Times in ms, shares and MFU as fractions with unit "share", rates per second.

    peers: the same work by others in the same run, by name. floor: what hardware or sampling noise allows at
    best, in the same unit.
    """
    return {
        "work": work,
        "ours": _short(ours),
        "unit": unit,
        "better": better,
        "peers": {name: _short(value) for name, value in (peers or {}).items()},
        "floor": None if floor is None else _short(floor),
        "shape": shape,
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.orig_argv[1:]]),
    }


def merge(rows: list[dict[str, object]], device: str) -> Path:
    """Replace or add `rows` in `bench/results/<device>.json`, sorted by work, and return the file's path."""
    path = RESULTS / f"{device}.json"
    old = json.loads(path.read_text()) if path.exists() else []
    by_work = {str(r["work"]): r for r in [*old, *rows]}
    lines = ",\n".join(json.dumps(by_work[work]) for work in sorted(by_work))
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".json.part")
    fresh.write_text(f"[\n{lines}\n]\n")
    os.replace(fresh, path)
    return path


def _short(value: float) -> float:
    """Four significant digits: more is noise."""
    return float(f"{value:.4g}")
