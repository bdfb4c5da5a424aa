"""The table of GPU targets beyond KDA's, from one command: every row is measured, then set beside its bar.

    python bench/targets.py h200                            all of it, about ten minutes
    python bench/targets.py h200 --only attnres.py moe_mx   some scripts
    python bench/targets.py h200 --show                     the table of what was measured before

Scripts run one after the other; each measures ours and its peers in one process and merges its rows. Kernels
are compiled before, by all scripts at once into a file of results that is thrown away (`--compiled`: they
have been). A bar "of" a peer is a factor of that peer's time, or of another row.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
THROWN_AWAY = "compiling"

# Scripts, seconds after which they start nothing more, and what to give them to compile alone.
SCRIPTS: tuple[tuple[str, int, str], ...] = (
    ("attnres.py {device}", 30, "--ours-alone"),
    ("elementwise.py {device}", 0, ""),
    ("moe_gpu.py {device}", 40, "--ours-alone"),
    ("moe_mx.py {device}", 40, "--ours-alone"),
    ("mla_decode.py {device}", 35, "--ours-alone"),
    ("cross_entropy.py {device}", 0, ""),
    ("decode_r1.py {device}", 30, "--ours-alone"),
    ("train_mfu.py {device} bare", 60, "--ours-alone --repeat 1 --accumulation 2"),
    ("train_r1.py {device} bare", 25, "--repeat 1"),
    ("train_r1.py {device} run", 330, ""),
)


@dataclass(frozen=True)
class Target:
    """A row's bar and aim: its own unit, or times the time of `peer`."""

    work: str
    bar: float
    aim: float | None
    peer: str | None = None

    def reached(self, row: dict[str, Any], other: dict[str, dict[str, Any]]) -> float | None:
        if self.peer is None:
            return float(row["ours"])
        if self.peer in other:  # another row
            return float(row["ours"]) / float(other[self.peer]["ours"])
        peers = [value for name, value in row["peers"].items() if name.startswith(self.peer)]
        return float(row["ours"]) / min(peers) if peers else None


TARGETS = (
    Target("attnres_fwd_9x8192x7168", 0.33, 0.30),
    Target("attnres_fwdbwd_9x8192x7168", 1.2, 1.0),
    Target("attnres_12query_9x8192x7168", 1.0, 0.7),
    Target("situ_fwd_131072x6144", 0.65, 0.60),
    Target("moe_fwd_8192x16of896", 20, 18.5),
    Target("moe_fwd_mxfp4_8192x16of896", 19, 17),
    Target("moe_fwdbwd_r1", 0.4, 0.25, peer="torch bmm"),
    Target("moe_decode_mxfp4_1", 0.13, 0.09),
    Target("moe_decode_mxfp4_32", 2.6, 2.0),
    Target("moe_decode_mxfp4_256", 6.0, 4.6),
    Target("mla_decode_32x64k", 1.15, 0.95),
    Target("linear_ce_131072x512x163840", 0.6, 0.45, peer="torch chunked"),
    Target("r1_train_tokens_per_s", 250_000, 400_000),
    Target("r1_train_tokens_per_s", 0.85, None, peer="r1_bare_tokens_per_s"),
    Target("train_mfu_1b", 0.35, 0.45),
    Target("r1_decode_b1", 0.25, 0.4),
    Target("r1_decode_b64", 0.6, 0.8),
    Target("r1_decode_b256", 0.6, 0.8),
)


def arguments_of(script: str, budget: int, device: str, more: str = "") -> list[str]:
    name, *rest = script.format(device=device).split()
    rest += ["--budget", str(budget)] if budget else []
    return [sys.executable, str(HERE / name), *rest, *more.split()]


def compile_together(chosen: Sequence[tuple[str, int, str]], logs: Path, seconds: int) -> None:
    """Every script at once: their times mean nothing, the kernels stay compiled."""
    running = []
    for script, budget, alone in chosen:
        if " run" in script:
            continue
        log = (logs / f"compiling-{script.split('.')[0]}.log").open("w")
        command = arguments_of(script, budget and max(budget, seconds), THROWN_AWAY, alone)
        running.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
    end = time.monotonic() + seconds
    for process in running:
        try:
            process.wait(max(end - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    (HERE / "results" / f"{THROWN_AWAY}.json").unlink(missing_ok=True)


def measure(chosen: Sequence[tuple[str, int, str]], device: str, logs: Path) -> list[str]:
    """Names of the scripts that ended with an error."""
    failed = []
    for number, (script, budget, _) in enumerate(chosen):
        began = time.monotonic()
        log = logs / f"{number:02}-{script.replace('.py {device}', '').replace(' ', '-')}.log"
        with log.open("w") as out:
            command = arguments_of(script, budget, device)
            code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False).returncode
        print(f"{script.format(device=device)}: {time.monotonic() - began:.0f} s, {log}", flush=True)
        if code:
            failed.append(script.format(device=device))
    return failed


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown: each target, what was reached, and whether that is enough."""
    by_work = {row["work"]: row for row in rows}
    lines = ["| work | ours | bar | aim | floor | peers | date | |", "|---|---|---|---|---|---|---|---|"]
    for target in TARGETS:
        row = by_work.get(target.work)
        of = "" if target.peer is None else f" of {target.peer}"
        bar = f"{target.bar:g}{of}"
        aim = "" if target.aim is None else f"{target.aim:g}"
        reached = None if row is None else target.reached(row, by_work)
        if row is None or reached is None:
            lines.append(f"| `{target.work}` | not measured | {bar} | {aim} | | | | |")
            continue
        more = row["better"] == "higher"
        met = reached >= target.bar if more else reached <= target.bar
        beyond = aim and (reached >= target.aim if more else reached <= target.aim)  # type: ignore[operator]
        verdict = "aim" if beyond else "bar" if met else "missed"
        ours = f"{row['ours']:g} {row['unit']}" + ("" if target.peer is None else f", {reached:.3f}")
        peers = "; ".join(f"{name} {value:g}" for name, value in row["peers"].items())
        floor = "" if row["floor"] is None else f"{row['floor']:g}"
        lines.append(
            f"| `{target.work}` | {ours} | {bar} | {aim} | {floor} | {peers} | {row['date']} | {verdict} |"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", nargs="?", default="h200", help="names the file of results")
    parser.add_argument("--only", nargs="+", metavar="SCRIPT", help="scripts whose command begins so")
    parser.add_argument("--without", nargs="+", metavar="SCRIPT", default=[], help="leave these out")
    parser.add_argument("--compiled", action="store_true", help="do not run everything once before")
    parser.add_argument("--compile-seconds", type=int, default=120, metavar="SECONDS")
    parser.add_argument("--logs", type=Path, default=Path("/tmp/openk3-targets"), help="folder of outputs")
    parser.add_argument("--show", action="store_true", help="print the table of what was measured before")
    arguments = parser.parse_args()
    failed: list[str] = []
    if not arguments.show:
        import torch

        if not torch.cuda.is_available():
            print("bench/targets.py needs a CUDA device; --show prints what was measured")
            return 0
        chosen = [
            script
            for script in SCRIPTS
            if (not arguments.only or script[0].format(device="").startswith(tuple(arguments.only)))
            and not any(script[0].format(device="").startswith(name) for name in arguments.without)
        ]
        arguments.logs.mkdir(parents=True, exist_ok=True)
        if not arguments.compiled:
            compile_together(chosen, arguments.logs, arguments.compile_seconds)
        failed = measure(chosen, arguments.device, arguments.logs)
    results = HERE / "results" / f"{arguments.device}.json"
    if not results.exists():
        print(f"{results}: nothing was measured")
        return 1
    print("\n".join(table(json.loads(results.read_text()))))
    if failed:
        print("with errors: " + "; ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
