"""Held-out bits per byte of a finished run beside general compressors on the same bytes.

    python bench/held_out.py [FOLDER]    # a quickstart (by default runs/quickstart) or a training run

The runs measure their model themselves, at their end, on all of the held-out text; this records.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from rows import merge, row

from openk3.data import open_dataset
from openk3.data.baselines import gzip_bits_per_byte, xz_bits_per_byte
from openk3.train.data import open_data
from openk3.train.recipes import load_recipe


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/quickstart")
    if (folder / "summary.json").exists():
        summary = json.loads((folder / "summary.json").read_text())
        result = _row(
            "quickstart: held-out standard library",
            summary["val_bits_per_byte"],
            {"gzip -9": summary["gzip_bits_per_byte"], "xz -9": summary["xz_bits_per_byte"]},
            summary["train_tokens"],
            summary["seconds"],
        )
    elif (folder / "config.toml").exists():
        result = _of_run(folder)
    else:
        sys.exit(f"{folder}: neither a quickstart nor a training run")
    print(json.dumps(result, indent=1))
    print(merge([result], "cpu"))


def _of_run(folder: Path) -> dict[str, Any]:
    config = load_recipe(folder / "config.toml")
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    if last["step"] != config.train.total_steps:
        sys.exit(f"{folder}: stands at step {last['step']} of {config.train.total_steps}; finish it first")
    (split,) = open_data(config, lambda stage, done, total: None).validation
    text = open_dataset(split.folder).validation_bytes()
    return _row(
        f"{folder.name}: held-out standard library",
        last["bits_per_byte"],
        {"gzip -9": gzip_bits_per_byte(text), "xz -9": xz_bits_per_byte(text)},
        last["tokens"],
        last["seconds"],
    )


def _row(work: str, ours: float, peers: dict[str, float], tokens: int, seconds: float) -> dict[str, Any]:
    shape = f"nano, {tokens:,} tokens, {seconds:.0f} s, {os.cpu_count()} cores"
    return row(work, ours, "bits per byte", "lower", peers=peers, shape=shape)


if __name__ == "__main__":
    main()
