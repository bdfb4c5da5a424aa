"""Fail when a source file is longer than a reader can hold in the head: 500 lines, GPU kernels 700.

A file over the limit is split by idea. Counts every line of every Python file of ours.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "tests", "bench", "tools")
LIMIT = 500
KERNEL_LIMIT = 700


def limit(path: Path) -> int:
    """The most lines `path` may have; kernel files are named `kernels*.py` or lie in a folder `kernels`."""
    is_kernel = path.name.startswith("kernels") or "kernels" in path.parent.parts
    return KERNEL_LIMIT if is_kernel else LIMIT


def oversized(root: Path) -> list[str]:
    """One line for each file under `root` that is too long."""
    findings = []
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            lines = len(path.read_bytes().splitlines())
            relative = path.relative_to(root)
            if lines > limit(relative):
                findings.append(f"{relative}: {lines} lines, at most {limit(relative)}; split it by idea")
    return findings


def main() -> int:
    findings = oversized(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
    print("\n".join(findings) or "file sizes: all within their limits")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
