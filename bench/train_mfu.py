"""MFU of training `1b`, a K3 with 1.05B active parameters, on one GPU: row `train_mfu_1b`.

    python bench/train_mfu.py [h200] bare [--micro 32768 65536 16384] [--budget SECONDS]
    python bench/train_mfu.py [h200] profile [--micro 32768] [--accumulation 2]

`bare` takes whole steps of the recipe, 524,288 tokens each: forward and backward of every micro-batch,
clipping, Muon and AdamW, balancing, telemetry read one step late. Sizes of micro-batches are tried in turn on
the same weights. One that does not fit is said and left out, a smaller one than the best
is not tried, and none begins after `--budget` seconds. With `--accumulation` steps are shorter and nothing is
merged. `profile` prints the parts of a step beside their floors, as `openk3 profile` does.

Tokens are random and resident, in documents of the lengths of source files, packed to 4,096. MFU is the FLOPs
of openk3.train.flops (recompute and element-wise work count nothing) over the seconds of these steps and 989
TFLOP/s. Weights are drawn on the card, with the recipe's distributions and other numbers. Another `--recipe`
(nano, or a file) runs on a CPU too: a rehearsal.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import re
import sys
import time
from pathlib import Path
from unittest.mock import patch

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from rows import merge, row
from train_r1 import PEAK, Resident, fresh

from openk3.data import Loader, Windows
from openk3.model import K3
from openk3.model.init import table
from openk3.model.sizes import count
from openk3.train.config import TrainConfig
from openk3.train.data import TrainingData
from openk3.train.feed import Fed, Feed
from openk3.train.flops import model_flops
from openk3.train.metrics import Row
from openk3.train.profile import MadeDocuments, profile, save
from openk3.train.recipes import load_recipe
from openk3.train.reduce import OneProcess
from openk3.train.state import TrainState
from openk3.train.step import Unread, launch, read, update

WARM = 1  # steps before the clock starts: compilation, moments, the allocator's first segments


def settings(recipe: str, micro: int, accumulation: int | None = None) -> TrainConfig:
    """The recipe in micro-batches of so many tokens, by default as many as make its step."""
    whole = load_recipe(recipe).train.step_tokens
    many = accumulation or max(1, whole // micro)
    return load_recipe(recipe, {"train.micro_batch_tokens": str(micro), "train.accumulation": str(many)})


def made(config: TrainConfig, steps: int = 1) -> TrainingData:
    documents = MadeDocuments(config.model.vocab_size, (steps + 1) * config.train.step_tokens)
    return TrainingData(Windows(documents, config.train.context, config.train.seed))


def resident(config: TrainConfig, device: torch.device) -> tuple[Fed, ...]:
    """The micro-batches of a step, on the device."""
    loop = config.train
    windows = loop.step_tokens // loop.context, loop.micro_batch_tokens // loop.context
    with Feed(Loader(made(config).stream, *windows), device) as feed:
        return next(feed)


def drawn_there(model: K3, seed: int) -> None:
    """As `openk3.model.init.initialise`, whose streams on the host take 15 s of 3.9B numbers."""
    generator = torch.Generator(model.device).manual_seed(seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        rule = next(rule for rule in table(model.config) if re.fullmatch(rule.pattern, name))
        with torch.no_grad(), torch.device(model.device):
            tensor.copy_(rule.distribution.draw(tuple(tensor.shape), generator))


def steps(state: TrainState, config: TrainConfig, number: int) -> list[Row]:
    """As many steps, each read when the next was launched; the device is done then."""
    rows, unread = [], None
    for _ in range(number):
        launched = launch(state, config, OneProcess())
        if isinstance(unread, Unread):
            rows.append(read(state, unread, None))
        unread = update(state, config, OneProcess(), launched)
    if isinstance(unread, Unread):
        rows.append(read(state, unread, None))
    return rows


def measure(state: TrainState, config: TrainConfig, number: int) -> tuple[float, str]:
    """MFU, and what it is of."""
    cuda = state.model.device.type == "cuda"
    batches = resident(config, state.model.device)
    state.feed = Resident(batches)  # type: ignore[assignment]
    began = time.perf_counter()
    steps(state, config, WARM)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    print(f"  first {WARM} steps {time.perf_counter() - began:.1f} s", flush=True)
    began = time.perf_counter()
    rows = steps(state, config, number)
    seconds = (time.perf_counter() - began) / number
    lengths = [n for fed in batches for n in fed.host.cu_seqlens.diff().tolist()]
    mfu = model_flops(config.model, lengths).total / seconds / PEAK
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else math.nan
    sizes, loop = count(config.model), config.train
    shape = (
        f"1b: {sizes.active / 1e9:.3f}B active of {sizes.total / 1e9:.2f}B, "
        f"{sizes.active_non_embedding / 1e9:.3f}B active without the embedding; "
        f"{loop.accumulation} x {loop.micro_batch_tokens} random tokens a step, context {loop.context}, "
        f"bf16 with fp32 masters, {loop.step_tokens / seconds:,.0f} tokens/s, peak {peak:.1f} GiB; "
        f"MFU: openk3.train.flops over {PEAK / 1e12:.0f} TFLOP/s"
    )
    if any(at["skipped"] for at in rows):
        shape += "; CHECK FAILED: a step was skipped as a spike"
    each = ", ".join(f"{at['step_seconds']:.3f}" for at in rows)
    most = max(max(at["maxvio"].values()) for at in rows)
    print(f"  steps of {each} s, losses {[round(at['loss'], 3) for at in rows]}, maxvio {most:.2f}")
    print(f"  {seconds:.3f} s a step, MFU {mfu:.4f}; {shape}", flush=True)
    return mfu, shape


def attempt(state: TrainState, config: TrainConfig, number: int) -> tuple[float, str]:
    """`measure`, or an MFU of 0 where a micro-batch does not fit."""
    found = 0.0, ""
    try:
        found = measure(state, config, number)
    except torch.cuda.OutOfMemoryError as error:
        print(f"  does not fit: {str(error).splitlines()[0][:160]}", flush=True)
    state.optimizer.zero_grad()  # of a step that did not end
    gc.collect()
    torch.cuda.empty_cache()
    return found


def bare(arguments: argparse.Namespace) -> int:
    end = time.monotonic() + arguments.budget
    config = settings(arguments.recipe, arguments.micro[0])
    began = time.perf_counter()
    state = fresh(config, made(config))
    print(f"weights and moments: {time.perf_counter() - began:.1f} s", flush=True)
    best, largest = 0.0, 0
    for micro in arguments.micro:
        name = f"micro-batches of {micro}"
        if micro < largest:
            continue
        if time.monotonic() > end:
            print(f"{name}: not started, out of time")
            continue
        print(f"{name}:", flush=True)
        config = settings(arguments.recipe, micro, arguments.accumulation)
        mfu, shape = attempt(state, config, arguments.repeat)
        if mfu:
            largest = max(largest, micro)
        if mfu > best:
            best = mfu
            found = row("train_mfu_1b", mfu, "share", "higher", shape=shape)
            print(json.dumps(found), flush=True)
            if arguments.recipe == "1b" and not arguments.accumulation and not arguments.ours_alone:
                merge([found], arguments.device)
    return 0 if best else 1


def parts(arguments: argparse.Namespace) -> int:
    """The table of `openk3 profile`, and its numbers beside the results."""
    from openk3.cli.profile import app

    config = settings(arguments.recipe, arguments.micro[0], arguments.accumulation or 2)
    found = profile(config, arguments.recipe, steps=1)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    save(found, arguments.json)
    app([str(arguments.json), "--pieces", str(arguments.top)], standalone_mode=False)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", nargs="?", default="h200", help="names the file of results")
    works = {"bare": bare, "profile": parts}
    parser.add_argument("work", choices=works)
    parser.add_argument("--micro", type=int, nargs="+", default=[32768, 65536, 16384], help="tokens of each")
    parser.add_argument("--repeat", type=int, default=3, help="steps that `bare` measures")
    parser.add_argument("--budget", type=float, default=120, help="seconds after which no size begins")
    parser.add_argument(
        "--accumulation", type=int, help="micro-batches of a step; the recipe's, or 2 (profile)"
    )
    parser.add_argument("--top", type=int, default=40, help="kernels that `profile` lists")
    parser.add_argument("--json", type=Path, default=Path("/tmp/openk3/1b-step.json"), help="of `profile`")
    parser.add_argument("--ours-alone", action="store_true", help="nothing is merged")
    parser.add_argument("--recipe", default="1b", help="another one is not merged")
    arguments = parser.parse_args()
    if arguments.recipe == "1b" and not torch.cuda.is_available():
        print("bench/train_mfu.py needs a CUDA device")
        return 0
    with patch("openk3.train.state.initialise", drawn_there):
        return works[arguments.work](arguments)


if __name__ == "__main__":
    sys.exit(main())
