"""Held-out bits per byte of a finished quickstart beside general compressors on the same bytes.

`openk3 quickstart` measures; this records: `python bench/held_out.py [FOLDER]`, by default runs/quickstart.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from rows import merge, row


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/quickstart")
    file = folder / "summary.json"
    if not file.exists():
        sys.exit(f"{file}: not there; run `openk3 quickstart --out {folder}` first")
    summary = json.loads(file.read_text())
    result = row(
        "quickstart: held-out standard library",
        summary["val_bits_per_byte"],
        "bits per byte",
        "lower",
        peers={"gzip -9": summary["gzip_bits_per_byte"], "xz -9": summary["xz_bits_per_byte"]},
        shape=f"nano, {summary['train_tokens']:,} tokens, {summary['seconds']:.0f} s, {os.cpu_count()} cores",
    )
    print(json.dumps(result, indent=1))
    print(merge([result], "cpu"))


if __name__ == "__main__":
    main()
