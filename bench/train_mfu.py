"""MFU of training `1b`, a K3 with 1.05B active parameters, on one GPU: row `train_mfu_1b`.

    PYTHONPATH=src python bench/train_mfu.py [h200] [--micro 65536 32768 16384] [--repeat 2] [--profile]

Whole steps of the recipe, 524,288 tokens each: forward and backward of every micro-batch, clipping, Muon and
AdamW, balancing, telemetry read one step late. Tokens are random and resident, in documents of the lengths of
source files, packed to 4,096. Sizes of micro-batches are tried in turn; one that does not fit is said and
left out. MFU is the FLOPs of openk3.train.flops (recompute and element-wise work count nothing) over the
seconds of these steps and 989 TFLOP/s.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from rows import merge, row
from train_r1 import PEAK, resident, step

from openk3.data import Windows
from openk3.model.sizes import count
from openk3.train.config import TrainConfig
from openk3.train.data import TrainingData
from openk3.train.flops import model_flops
from openk3.train.profile import MadeDocuments
from openk3.train.recipes import load_recipe


def settings(recipe: str, micro: int, changes: dict[str, str]) -> TrainConfig:
    """The recipe with micro-batches of so many tokens, and as many of them as make its step."""
    whole = load_recipe(recipe, changes).train.step_tokens
    parts = {"train.micro_batch_tokens": str(micro), "train.accumulation": str(whole // micro)}
    return load_recipe(recipe, changes | parts)


def made(config: TrainConfig) -> TrainingData:
    """Documents for a few steps, which are the same one in the end."""
    documents = MadeDocuments(config.model.vocab_size, 2 * config.train.step_tokens)
    return TrainingData(Windows(documents, config.train.context, config.train.seed))


def measure(config: TrainConfig, repeat: int) -> dict[str, float]:
    """Seconds and FLOPs of a step, and the peak in GiB."""
    cuda = torch.cuda.is_available()
    state = resident(config, made(config))
    lengths = [n for fed in next(state.feed) for n in fed.host.cu_seqlens.diff().tolist()]
    began, unread = time.perf_counter(), None
    for _ in range(2):
        unread = step(state, config, unread)
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    print(f"  first 2 steps {time.perf_counter() - began:.1f} s", flush=True)
    began = time.perf_counter()
    for _ in range(repeat):
        unread = step(state, config, unread)
    if cuda:
        torch.cuda.synchronize()
    return {
        "seconds": (time.perf_counter() - began) / repeat,
        "flops": float(model_flops(config.model, lengths).total),
        "peak": torch.cuda.max_memory_allocated() / 2**30 if cuda else math.nan,
    }


def report(config: TrainConfig, found: dict[str, float]) -> dict[str, object]:
    mfu = found["flops"] / found["seconds"] / PEAK
    rate = config.train.step_tokens / found["seconds"]
    sizes = count(config.model)
    shape = (
        f"1b: {sizes.active / 1e9:.3f}B active of {sizes.total / 1e9:.2f}B, "
        f"{sizes.active_non_embedding / 1e9:.3f}B active without the embedding; "
        f"{config.train.accumulation} x {config.train.micro_batch_tokens} random tokens a step, "
        f"context 4096, bf16 with fp32 masters, {rate:,.0f} tokens/s, peak {found['peak']:.1f} GiB"
    )
    print(f"  {found['seconds']:.3f} s a step, MFU {mfu:.4f}; {shape}", flush=True)
    return row("train_mfu_1b", mfu, "share", "higher", shape=shape)


def kernels(config: TrainConfig, top: int) -> None:
    """The kernels of a step, largest first."""
    from openk3.train.profile import profile

    found = profile(config, "1b", data=made(config), steps=1)
    assert found.measured is not None
    whole = found.measured.whole
    by_part: dict[str, float] = {}
    for item in found.items:
        by_part[item.part] = by_part.get(item.part, 0.0) + (item.seconds or 0.0)
    for part, seconds in sorted(by_part.items(), key=lambda one: -one[1]):
        print(f"  {1e3 * seconds:9.1f} ms {seconds / whole:6.1%}  {part}")
    print(f"  {1e3 * found.measured.idle:9.1f} ms {found.measured.idle / whole:6.1%}  idle")
    for piece in found.measured.largest[:top]:
        print(f"  {1e3 * piece.seconds:9.1f} ms {piece.count:7.0f}  {piece.part:24s} {piece.name[:80]}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", nargs="?", default="h200", help="names the file of results")
    parser.add_argument("--micro", type=int, nargs="+", default=[65536, 32768, 16384], help="tokens of each")
    parser.add_argument("--repeat", type=int, default=2, help="steps that are measured")
    parser.add_argument("--profile", action="store_true", help="also the parts and kernels of a step")
    parser.add_argument("--vocabulary", type=Path, default=Path("cache/vocab/tiktoken.model"))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/train_mfu.py needs a CUDA device")
        return 0
    changes: dict[str, str] = {"data.tokenizer": str(arguments.vocabulary), "train.device": "cuda"}
    best: tuple[float, dict[str, object], TrainConfig] | None = None
    for micro in arguments.micro:
        config = settings("1b", micro, changes)
        print(f"micro-batches of {micro}:", flush=True)
        found: dict[str, Any] | None = None
        try:
            found = measure(config, arguments.repeat)
        except torch.cuda.OutOfMemoryError as error:
            print(f"  does not fit: {str(error).splitlines()[0][:160]}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        if found is not None:
            result = report(config, found)
            if best is None or found["seconds"] < best[0]:
                best = found["seconds"], result, config
                merge([result], arguments.device)
    if best is None:
        return 1
    if arguments.profile:
        kernels(best[2], 40)
    return 0


if __name__ == "__main__":
    sys.exit(main())
