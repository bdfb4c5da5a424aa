"""Training of r1 on one GPU: the real run, its bare loop, its first losses beside plain PyTorch's, kernels.

    python bench/train_r1.py [h200] bare [--micro 131072 65536 16384] [--random]
    python bench/train_r1.py [h200] run [--budget SECONDS]
    python bench/train_r1.py [h200] save [--random]
    python bench/train_r1.py [h200] compare [--steps 50]
    python bench/train_r1.py [h200] profile [--random]

`run` is the recipe over 500 steps on the Python sources of this machine, with loader, optimizer, balancing,
telemetry, evaluation and checkpoints; within a budget it goes as far as it gets, and on from there when it is
started again. `r1_train_tokens_per_s` is tokens over wall time from step 21 to the end. Its log goes to
bench/results/r1/. `bare` repeats forward, backward and update on resident tokens. `save` times a checkpoint's
copy, and the steps beside its writing.
`compare` trains from the same weights on the same tokens by kernels, by the eager forms, and by the eager
forms in two micro-batches: the noise of another order of sums. `profile` counts the kernels of a step, and
the time to launch them.

Needs the released vocabulary (--vocabulary), but for --random, which draws tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from rows import RESULTS, merge, row

from openk3.checkpoint import background
from openk3.checkpoint.jsonl import read_jsonl
from openk3.checkpoint.train_state import CheckpointStore
from openk3.data import Windows
from openk3.model.sizes import count
from openk3.ops import dispatch
from openk3.train.config import TrainConfig
from openk3.train.data import TrainingData, open_data
from openk3.train.evaluate import evaluate
from openk3.train.feed import Fed
from openk3.train.loop import run
from openk3.train.profile import MadeDocuments
from openk3.train.progress import Silent
from openk3.train.recipes import load_recipe
from openk3.train.reduce import OneProcess
from openk3.train.state import TrainState, begin
from openk3.train.step import Unread, launch, read, update

STEP_TOKENS = 131_072
STEPS = 500
WARM = 20  # steps that a sustained rate leaves out
PUBLIC = {"public run": 28_900.0}  # tokens a second on one H200, shared figures of 2026
PUBLIC_BARE = {"public run": 66_900.0}
PEAK = 989e12
FOLDER = RESULTS / "r1"


def settings(
    arguments: argparse.Namespace, micro: int, step_tokens: int = STEP_TOKENS, **changes: str
) -> TrainConfig:
    overrides = {
        "data.recipe": "python-sources",
        "data.tokenizer": str(arguments.vocabulary),
        "data.cache": str(arguments.cache),
        "train.steps": str(STEPS),
        "train.micro_batch_tokens": str(micro),
        "train.accumulation": str(step_tokens // micro),
        "train.device": "cuda",
    }
    return load_recipe("r1", overrides | {name.replace("__", "."): value for name, value in changes.items()})


class Told(Silent):
    """What takes long, and a line now and then."""

    def __init__(self) -> None:
        self._began, self._stage = time.perf_counter(), ""

    def preparing(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self._stage = stage
            print(f"{time.perf_counter() - self._began:6.1f} s  {stage}", flush=True)

    def stepped(self, at: dict[str, Any]) -> None:
        if at["step"] in (1, 2, 3, 5, 10) or at["step"] % 20 == 0:
            dead, most = statistics.mean(at["dead_experts"].values()), max(at["maxvio"].values())
            print(
                f"{time.perf_counter() - self._began:6.1f} s  step {at['step']:3}  loss {at['loss']:.3f}  "
                f"{at['tokens_per_second']:9,.0f} tokens/s  mfu {at.get('mfu', 0):.3f}  dead {dead:.3f}  "
                f"maxvio {most:.2f}  norm {at['grad_norm']:.2f}  {'skipped' if at['skipped'] else ''}",
                flush=True,
            )


def opened(config: TrainConfig, arguments: argparse.Namespace) -> TrainingData:
    if arguments.random:
        documents = MadeDocuments(config.model.vocab_size, 4 * STEP_TOKENS)
        return TrainingData(Windows(documents, config.train.context, config.train.seed))
    return open_data(config, Told().preparing)


def fresh(config: TrainConfig, data: TrainingData) -> TrainState:
    return begin(config, data, CheckpointStore(Path("/nonexistent")), init_from=None, reduction=OneProcess())


class Resident:
    """A feed that gives the same step again and again."""

    def __init__(self, step: tuple[Fed, ...]) -> None:
        self._step = step

    def __next__(self) -> tuple[Fed, ...]:
        return self._step


def resident(config: TrainConfig, data: TrainingData) -> TrainState:
    state = fresh(config, data)
    with state.feed as feed:
        step = next(feed)
    torch.cuda.synchronize()
    state.feed = Resident(step)  # type: ignore[assignment]
    return state


def step(state: TrainState, config: TrainConfig, unread: Unread | None) -> Unread:
    """One step, with the one before read as the loop reads it."""
    launched = launch(state, config, OneProcess())
    if unread is not None:
        read(state, unread, None)
    return update(state, config, OneProcess(), launched)


def bare(arguments: argparse.Namespace) -> list[dict[str, object]]:
    found: dict[int, float] = {}
    end = time.perf_counter() + (arguments.budget or math.inf)
    for micro in arguments.micro:
        if time.perf_counter() > end:
            print(f"micro-batches of {micro}: not started, out of time")
            continue
        config = settings(arguments, micro)
        try:
            state = resident(config, opened(config, arguments))
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            unread = None
            for _ in range(4):
                unread = step(state, config, unread)
            torch.cuda.synchronize()
            print(f"micro-batches of {micro}: first 4 steps {time.perf_counter() - began:.1f} s", flush=True)
            began = time.perf_counter()
            for _ in range(arguments.repeat):
                unread = step(state, config, unread)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - began
            rate = arguments.repeat * STEP_TOKENS / seconds
            peak = torch.cuda.max_memory_allocated()
            print(
                f"micro-batches of {micro}: {rate:,.0f} tokens/s, {1e3 * seconds / arguments.repeat:.1f} ms "
                f"a step, {before / 2**30:.1f} GiB before, {peak / 2**30:.1f} GiB at the peak",
                flush=True,
            )
            found[micro] = rate
            merge(best_bare(arguments, found), arguments.device)
        except Exception:  # noqa: BLE001  (the next size is worth its time)
            print(f"micro-batches of {micro} failed:")
            traceback.print_exc()
        state = unread = None  # type: ignore[assignment]
        torch.cuda.empty_cache()
    return best_bare(arguments, found) if found else []


def best_bare(arguments: argparse.Namespace, found: dict[int, float]) -> list[dict[str, object]]:
    """The row of the fastest size of micro-batches so far."""
    best = max(found, key=found.__getitem__)
    tokens = "random tokens" if arguments.random else "Python sources"
    shape = f"r1, bf16, context 4096, {STEP_TOKENS // best} x {best} resident tokens a step, {tokens}"
    return [row("r1_bare_tokens_per_s", found[best], "tokens/s", "higher", shape=shape, peers=PUBLIC_BARE)]


def save(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """One checkpoint: how long its copy holds steps up, and what its writing costs those beside it."""
    config = settings(arguments, arguments.micro[0])
    state, unread = resident(config, opened(config, arguments)), None
    for _ in range(4):
        unread = step(state, config, unread)
    for _ in range(2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        kept = background._Kept(state.tree())
        torch.cuda.synchronize()
        copied = time.perf_counter()
        kept.on_the_host()
        fetched = time.perf_counter() - copied
        print(f"copied in {copied - began:.3f} s, to the host in {fetched:.2f} s", flush=True)
    folder = arguments.cache / "one-save"
    shutil.rmtree(folder, ignore_errors=True)
    with background.BackgroundSaves(CheckpointStore(folder)) as saves:
        beside: dict[str, list[float]] = {"alone": [], "beside the writing": []}
        for name, spent in beside.items():
            torch.cuda.synchronize()
            if name != "alone":
                began = time.perf_counter()
                saves.save(state.step, state.tree(), config={})
                print(f"the save held steps up for {time.perf_counter() - began:.2f} s", flush=True)
            writing = saves._working
            while len(spent) < 40 or (writing is not None and not writing.done()):
                last = time.perf_counter()
                unread = step(state, config, unread)
                spent.append(time.perf_counter() - last)
            print(
                f"a step {name}: {1e3 * statistics.median(spent):.1f} ms in the median, "
                f"{1e3 * max(spent[2:]):.1f} at most, {len(spent)} of them in {sum(spent):.1f} s",
                flush=True,
            )
    shutil.rmtree(folder, ignore_errors=True)
    return []


def compile_all(config: TrainConfig, data: TrainingData) -> None:
    """What a run calls is called once, so that no compilation falls into its steps and evaluations."""
    began = time.perf_counter()
    state, unread = fresh(config, data), None
    with state.feed:
        for _ in range(2):
            unread = step(state, config, unread)
    windows = config.train.micro_batch_tokens // config.train.context
    evaluate(state.model, data.validation, context=config.train.context, windows=windows)
    print(f"weights, 2 steps and an evaluation: {time.perf_counter() - began:.1f} s", flush=True)


def real(arguments: argparse.Namespace) -> list[dict[str, object]]:
    micro = arguments.micro[0]
    config = settings(arguments, micro, evaluation__every="250", checkpoint__every="250")
    out = arguments.cache / f"r1-{micro}"
    data = opened(config, arguments)
    if not (out / "metrics.jsonl").exists():
        compile_all(config, data)
    result = run(config, out, data=data, progress=Told(), seconds=arguments.budget)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in ("metrics.jsonl", "config.toml"):
        shutil.copy(out / name, FOLDER / name)
    rows = read_jsonl(out / "metrics.jsonl")
    last = result.last
    print(f"step {last['step']} of {STEPS}: {json.dumps(last)[:1500]}")
    if len(rows) <= WARM:
        return []
    tokens, seconds = last["tokens"] - rows[WARM - 1]["tokens"], last["seconds"] - rows[WARM - 1]["seconds"]
    rate = tokens / seconds
    inside = statistics.median(at["tokens_per_second"] for at in rows[WARM:])
    flops = sum(at["flops"] for at in rows[WARM:])
    sizes = count(config.model)
    without_embedding = 6 * sizes.active_non_embedding * rate / PEAK
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(
        f"{rate:,.0f} tokens/s over steps {WARM + 1} to {last['step']}, {inside:,.0f} in the median step; "
        f"MFU {flops / seconds / PEAK:.4f}, {without_embedding:.4f} by 6 x non-embedding active parameters; "
        f"peak memory {peak:.1f} GiB; {last['tokens']:,} tokens seen, "
        f"{min(last['tokens'], data.stream.identity()['corpus_tokens']):,} of them unique"
    )
    shape = (
        f"r1, {last['step']} real steps of {STEP_TOKENS // micro} x {micro} tokens, bf16 with fp32 masters, "
        f"mfu {flops / seconds / PEAK:.4f}, peak {peak:.1f} GiB"
    )
    done = last["step"] == STEPS
    return (
        [row("r1_train_tokens_per_s", rate, "tokens/s", "higher", shape=shape, peers=PUBLIC)] if done else []
    )


def losses(config: TrainConfig, data: TrainingData, most: int, seconds: float) -> list[float]:
    state, unread, found = fresh(config, data), None, []
    end = time.perf_counter() + seconds
    with state.feed:
        for _ in range(most):
            launched = launch(state, config, OneProcess())
            if unread is not None:
                found.append(read(state, unread, None)["loss"])
            unread = update(state, config, OneProcess(), launched)
            if time.perf_counter() > end:
                break
        found.append(read(state, unread, None)["loss"])
    return found


def compare(arguments: argparse.Namespace) -> list[dict[str, object]]:
    whole = settings(arguments, arguments.tokens, arguments.tokens)
    halves = settings(arguments, arguments.tokens // 2, arguments.tokens)
    data = opened(whole, arguments)
    found = {}
    began = time.perf_counter()
    found["kernels"] = losses(whole, data, arguments.steps, arguments.limit)
    print(f"kernels: {len(found['kernels'])} steps in {time.perf_counter() - began:.1f} s", flush=True)
    with patch.object(dispatch, "BY_DEFAULT", False):
        for name, config in (("eager", whole), ("eager, in halves", halves)):
            began = time.perf_counter()
            found[name] = losses(config, data, arguments.steps, arguments.limit)
            print(f"{name}: {len(found[name])} steps in {time.perf_counter() - began:.1f} s", flush=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "first_losses.json").write_text(json.dumps({"tokens_a_step": arguments.tokens, **found}) + "\n")
    for name in ("kernels", "eager, in halves"):
        apart = [abs(a - b) for a, b in zip(found[name], found["eager"], strict=False)]
        print(
            f"{name} and eager: {len(apart)} losses differ by {statistics.mean(apart):.2e} nats on average, "
            f"{max(apart):.2e} at most"
        )
    print("kernels", [round(x, 4) for x in found["kernels"]])
    print("eager  ", [round(x, 4) for x in found["eager"]])
    return []


def profile(arguments: argparse.Namespace) -> list[dict[str, object]]:
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recording

    for micro in arguments.micro:
        config = settings(arguments, micro)
        state, unread = resident(config, opened(config, arguments)), None
        for _ in range(4):
            unread = step(state, config, unread)
        torch.cuda.synchronize()
        began = time.perf_counter()
        unread = step(state, config, unread)
        launching = time.perf_counter() - began
        torch.cuda.synchronize()
        whole = time.perf_counter() - began
        with recording(activities=[ProfilerActivity.CUDA]) as recorded:
            unread = step(state, config, unread)
            torch.cuda.synchronize()
        times: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for event in recorded.events() or ():
            if event.device_type == DeviceType.CUDA:
                times[event.name] += event.time_range.elapsed_us()
                counts[event.name] += 1
        busy = sum(times.values())
        print(
            f"micro-batches of {micro}: a step takes {whole:.3f} s, its launch {launching:.3f} s; "
            f"{counts.total():,} kernels and copies, {busy / 1e6:.3f} s together"
        )
        for name, spent in times.most_common(arguments.top):
            print(f"{spent / 1e3:9.2f} ms {spent / busy:6.1%} {counts[name]:6}  {name[:110]}")
        state = unread = None
        torch.cuda.empty_cache()
    return []


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", nargs="?", default="h200", help="name of the results file")
    works = {"bare": bare, "run": real, "save": save, "compare": compare, "profile": profile}
    parser.add_argument("work", choices=works)
    parser.add_argument("--micro", type=int, nargs="+", default=[STEP_TOKENS], help="tokens of a micro-batch")
    parser.add_argument("--random", action="store_true", help="random tokens, no corpus")
    parser.add_argument("--vocabulary", type=Path, default=Path("cache/vocab/tiktoken.model"))
    parser.add_argument("--cache", type=Path, default=Path("/tmp/openk3"), help="folder of corpora and runs")
    parser.add_argument("--repeat", type=int, default=20, help="steps that `bare` measures")
    parser.add_argument(
        "--budget",
        type=float,
        help="seconds after which `run` saves and stops, and `bare` starts no further size",
    )
    parser.add_argument("--steps", type=int, default=50, help="that `compare` takes at most")
    parser.add_argument("--tokens", type=int, default=16_384, help="of a step of `compare`")
    parser.add_argument("--limit", type=float, default=120, help="seconds of a curve of `compare`")
    parser.add_argument("--top", type=int, default=45, help="kernels that `profile` lists")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA device: nothing measured")
        return
    if rows := works[arguments.work](arguments):
        print(json.dumps(rows, indent=1))
        merge(rows, arguments.device)


if __name__ == "__main__":
    main()
