"""The global random number generators as plain state: Python's, NumPy's, and torch's on the CPU.

A run draws the same numbers after `restore_rng(saved)` as the saved one would have drawn next. Generators
that a module owns are that module's state, not ours. A GPU's is left out, so that a run can move between
devices: who draws there owns a generator. The streams differ from rank to rank, so that in a process group
each rank saves this under a part of its own (`f"rng-{rank}"`).
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def capture_rng() -> dict[str, Any]:
    """The state of every global generator, a part of what `CheckpointStore.save` takes."""
    version, internal, gauss_next = random.getstate()
    legacy: dict[str, Any] = np.random.get_state(legacy=False)
    return {
        "python": {"version": version, "internal": torch.tensor(internal), "gauss_next": gauss_next},
        "numpy": {
            "key": torch.from_numpy(legacy["state"]["key"].astype(np.int64)),
            "pos": int(legacy["state"]["pos"]),
            "has_gauss": int(legacy["has_gauss"]),
            "gauss": float(legacy["gauss"]),
        },
        "torch": torch.get_rng_state(),
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Continue every generator where `capture_rng` left it."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["internal"].tolist()), python["gauss_next"]))
    np.random.set_state(
        {
            "bit_generator": "MT19937",
            "state": {"key": numpy["key"].numpy().astype(np.uint32), "pos": numpy["pos"]},
            "has_gauss": numpy["has_gauss"],
            "gauss": numpy["gauss"],
        }
    )
    torch.set_rng_state(state["torch"])
