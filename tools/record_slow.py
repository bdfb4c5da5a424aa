"""Turn pytest's junit report of the slow tests into `bench/results/slow.json`, which is committed.

Records what ran, when, with which seed, and how it ended, failures too. Knows nothing of the tests.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import xml.etree.ElementTree as ElementTree
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def record(report: Path, seed: int) -> dict[str, object]:
    """The counts of `report`, with today's date and what the tests ran on."""
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))

    def total(name: str) -> int:
        return sum(int(suite.get(name, 0)) for suite in suites)

    cases = [case for suite in suites for case in suite.iter("testcase")]
    unsuccessful = total("failures") + total("errors")
    per_file: dict[str, int] = {}
    for case in cases:
        name = case.get("classname", "").replace(".", "/") + ".py"
        per_file[name] = per_file.get(name, 0) + 1
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seed": seed,
        "tests": total("tests"),
        "passed": total("tests") - unsuccessful - total("skipped"),
        "failed": unsuccessful,
        "skipped": total("skipped"),
        "seconds": round(sum(float(suite.get("time", 0)) for suite in suites)),
        "python": platform.python_version(),
        "torch": version("torch"),
        "machine": platform.machine(),
        "command": "make test-slow",
        "files": dict(sorted(per_file.items())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, help="junit xml written by pytest")
    parser.add_argument("--seed", type=int, required=True, help="seed that the tests ran with")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "slow.json")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record(options.report, options.seed), indent=2) + "\n")
    print(f"slow tests: recorded in {options.out}")


if __name__ == "__main__":
    main()
