"""Kimi Delta Attention on one GPU: time, memory and accuracy of our kernels beside fla 0.6.0, in one run.

    PYTHONPATH=src python bench/kda.py h200                       all rows, merged into results/h200.json
    PYTHONPATH=src python bench/kda.py h200 --only kda_decode_n1 kda_fwd_t8192_h96
    PYTHONPATH=src python bench/kda.py h200 --accuracy            errors against a float64 recurrence

Both get raw inputs (logits of decay and beta, queries and keys before their norm) in bf16, and do gate, norm
and sigmoid inside. Times are medians in ms: by CUDA events with the L2 cache flushed, for decoding by replays
of a CUDA graph that rotates over several pools of states. Floors are the bytes and FLOPs of `kda_inputs` over
the ceilings that the same run measures. The peer returns no final state here, ours always does.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial

import torch
from rows import merge, row

Rows = list[dict[str, object]]


class Deadline:
    """Says when to stop, so that what is done is written before a time limit ends the process."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def passed(self) -> bool:
        return time.monotonic() > self.end


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", nargs="?", default="h200", help="names the file of results")
    parser.add_argument("--only", nargs="+", metavar="ROW", help="rows to measure, by `work`")
    parser.add_argument("--accuracy", action="store_true", help="print errors instead of measuring times")
    parser.add_argument("--budget", type=float, default=540, metavar="SECONDS", help="start nothing later")
    parser.add_argument("--ours-alone", action="store_true", help="without the peer; nothing is merged")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/kda.py needs a CUDA device")
        return 0
    deadline = Deadline(arguments.budget)

    from kda_fla import compile_candidates_together

    compile_candidates_together()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    if arguments.accuracy:
        from kda_accuracy import report

        return report(arguments.device, arguments.only, deadline.passed, peer=not arguments.ours_alone)

    from gpu_timing import ceilings
    from kda_chunkwise import CHUNKWISE, measure_chunkwise
    from kda_decode import DECODE, VERIFY, measure_decode, measure_verify

    limits = ceilings()
    print(
        f"copy {limits.bandwidth / 1e9:.0f} GB/s, bf16 product {limits.flops / 1e12:.0f} TFLOP/s", flush=True
    )
    jobs: dict[str, Callable[..., Rows]] = {
        **{work.name: partial(measure_chunkwise, work) for work in CHUNKWISE},
        **{work.name: partial(measure_decode, work) for work in DECODE},
        **{work.name: partial(measure_verify, work) for work in VERIFY},
    }
    if unknown := set(arguments.only or ()) - set(jobs):
        parser.error(f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(jobs)}")

    done: Rows = [
        row("device copy", limits.bandwidth / 1e9, "GB/s", "higher", shape="2 GiB read and written"),
        row("bf16 product", limits.flops / 1e12, "TFLOP/s", "higher", shape="8192^3, sustained"),
    ]
    failed = 0
    for name in arguments.only or jobs:
        if deadline.passed():
            print(f"{name}: not started, out of time")
            failed += 1
            continue
        try:
            done += jobs[name](limits, peer=not arguments.ours_alone)
        except ImportError as missing:
            print(f"{name}: skipped, {missing}", flush=True)
        except Exception:  # noqa: BLE001 - one row must not cost the others
            traceback.print_exc()
            print(f"{name}: FAILED", flush=True)
            failed += 1
        torch.cuda.empty_cache()
        if not arguments.ours_alone:
            merge(done, arguments.device)
    print_table(done)
    if not arguments.ours_alone:
        from kda_plot import draw

        print("merged; plot:", draw(arguments.device))
    return 1 if failed else 0


def print_table(done: Rows) -> None:
    print("\n| work | ours | peers | floor | ours / floor |\n|---|---|---|---|---|")
    for r in done:
        peers = ", ".join(f"{name} {value}" for name, value in dict(r["peers"]).items())  # type: ignore[call-overload]
        over = f"{float(r['ours']) / float(r['floor']):.2f}" if r["floor"] else ""  # type: ignore[arg-type]
        print(f"| {r['work']} | {r['ours']} {r['unit']} | {peers} | {r['floor'] or ''} | {over} |")


if __name__ == "__main__":
    sys.exit(main())
