"""Steps of a recipe under a profiler: those of `openk3 train`, without its evaluations and checkpoints.

Some steps warm up, some are timed without a profiler, which slows the host down, and some are recorded.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as recording

from openk3.checkpoint.train_state import CheckpointStore
from openk3.config import ModelConfig
from openk3.errors import InvalidInput
from openk3.model import K3
from openk3.optim import COEFFICIENTS, OptimConfig, assign
from openk3.train.config import TrainConfig
from openk3.train.data import TrainingData
from openk3.train.feed import Fed
from openk3.train.flops import model_flops
from openk3.train.profile.attribution import device_work, host_work
from openk3.train.profile.floors import Costs, MicroBatch, Parameter, model_costs, update_costs
from openk3.train.profile.made import made_data
from openk3.train.profile.peaks import Peaks, known_peaks, peaks
from openk3.train.profile.result import Profile, items, measured
from openk3.train.profile.scopes import named_modules
from openk3.train.profile.timeline import Division, divide
from openk3.train.profile.trace import read_trace
from openk3.train.reduce import OneProcess
from openk3.train.state import TrainState, begin, device_of
from openk3.train.step import Unread, launch, read, update
from openk3.train.weights import DTYPES

WARM = {"cuda": 3, "cpu": 1}
"""Steps before anything is measured: compilation, first allocations, and the feed's start."""
STEPS = {"cuda": 3, "cpu": 1}
"""Steps that are measured if nobody says how many: a CPU's are long."""


def profile(
    config: TrainConfig,
    recipe: str,
    *,
    data: TrainingData | None = None,
    steps: int | None = None,
    trace: str | Path | None = None,
) -> Profile:
    """What `steps` steps of a run take, after `WARM` warm ones and `steps` without a profiler.

    The device is the recipe's, `train.device`.

    Args:
        recipe: what it is called in the result.
        data: what is read; None makes something up (`openk3.train.profile.made`).
        trace: also write the profiler's trace there, for a viewer of Chrome traces.

    Raises:
        InvalidInput: `steps` is not positive, or the run cannot begin.
        TrainingDiverged: as in training.
    """
    if steps is not None and steps < 1:
        raise InvalidInput(f"profile: steps must be positive, got {steps}")
    kind = device_of(config).type
    warm, steps = WARM[kind], steps or STEPS[kind]
    taken = warm + 2 * steps + 1
    lasting = {"steps": max(config.train.total_steps, taken), "tokens": None}
    config = config.model_copy(update={"train": config.train.model_copy(update=lasting)})
    data = data or made_data(config, taken)
    with tempfile.TemporaryDirectory() as folder:
        store = CheckpointStore(Path(folder) / "none")
        state = begin(config, data, store, init_from=None, reduction=OneProcess())
        with state.feed:
            plain, division, batches = _measure(
                state, config, warm, steps, Path(trace or Path(folder) / "trace.json")
            )
    device, dtype = state.model.device, DTYPES[config.train.precision]
    gpu = device.type == "cuda"
    best = peaks(device, dtype)
    return _profile(
        config,
        recipe,
        torch.cuda.get_device_name(device) if gpu else f"CPU, {torch.get_num_threads()} threads",
        batches,
        best,
        division,
        steps,
        plain,
        gpu=gpu,
    )


def predict(config: TrainConfig, recipe: str, device: str) -> Profile:
    """The floors alone, of a step of made-up text on a device of the table of peaks; nothing runs.

    Raises:
        InvalidInput: the table does not have the device with products of the recipe's precision.
    """
    dtype = DTYPES[config.train.precision]
    best = known_peaks(device, dtype)
    if best is None:
        raise InvalidInput(
            f"no figures of {device!r} for {config.train.precision} are known; "
            "see openk3.train.profile.peaks, or run the profile there"
        )
    data = made_data(config, 1)
    windows = config.train.micro_batch_tokens // config.train.context
    samples = [data.stream.sample(i) for i in range(windows * config.train.accumulation)]
    batches = []
    for first in range(0, len(samples), windows):
        some = samples[first : first + windows]
        distinct = len(np.unique(np.concatenate([sample.tokens for sample in some])))
        batches.append(MicroBatch(tuple(n for sample in some for n in sample.lengths), distinct))
    return _profile(config, recipe, device, batches, best, None, 1, 0.0, gpu=device != "CPU")


def costs_of(config: TrainConfig, batches: Iterable[MicroBatch], *, gpu: bool) -> Costs:
    """The floors of a whole step of `config`, the optimizer's included."""
    dtype = DTYPES[config.train.precision]
    model = model_costs(config.model, batches, size=dtype.itemsize, mtp=bool(config.train.mtp_weight))
    half = config.optim.ns_dtype == "bfloat16" or (config.optim.ns_dtype == "auto" and gpu)
    update = update_costs(
        _parameters(config.model, config.optim),
        micro_batches=config.train.accumulation,
        iterations=len(COEFFICIENTS[config.optim.coefficients].triples),
        copy_size=None if dtype == torch.float32 else dtype.itemsize,
        direction_size=2 if half else 4,
    )
    return {**model, **update}


def _profile(
    config: TrainConfig,
    recipe: str,
    device: str,
    batches: list[MicroBatch],
    best: Peaks | None,
    division: Division | None,
    steps: int,
    plain: float,
    *,
    gpu: bool,
) -> Profile:
    mtp = bool(config.train.mtp_weight)
    lengths = [n for batch in batches for n in batch.lengths]
    loop = config.train
    return Profile(
        recipe=recipe,
        device=device,
        counted="kernels" if gpu else "operators",
        shape=(
            f"{loop.accumulation} x {loop.micro_batch_tokens:,} tokens a step, context {loop.context:,}, "
            f"{loop.precision}, {len(lengths):,} sequences"
        ),
        tokens=sum(lengths),
        model_flops=model_flops(config.model, lengths, mtp=mtp).total,
        items=tuple(items(costs_of(config, batches, gpu=gpu), best, division, steps)),
        peaks=best.source if best else "",
        measured=None if division is None else measured(division, steps, plain),
        versions={"torch": torch.__version__},
    )


def _parameters(model: ModelConfig, optim: OptimConfig) -> list[Parameter]:
    shapes = {name: tuple(p.shape) for name, p in K3(model, device="meta").named_parameters()}
    found = []
    for name, treatment in assign(shapes, optim, model).items():
        shape, split = shapes[name], treatment.split
        blocks = [] if split is None else [(band, shape[-1]) for band in split.bands] * split.groups
        found.append(Parameter(math.prod(shape), blocks))
    return found


def _measure(
    state: TrainState, config: TrainConfig, warm: int, steps: int, file: Path
) -> tuple[float, Division, list[MicroBatch]]:
    """Seconds of a step without a profiler, what the recorded steps' time divides into, and the last step."""
    device = state.model.device
    gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    _, ends = _run(state, config, warm + steps)
    plain = (ends[-1] - ends[warm - 1]) / steps  # the host is ahead in all of them, as in a run
    if gpu:
        with recording(activities=activities):  # the first recording takes long to start
            _run(state, config, 1)
    with named_modules(state.model), recording(activities=activities) as recorded:
        last, _ = _run(state, config, steps)
    recorded.export_chrome_trace(str(file))
    trace = read_trace(json.loads(file.read_text())["traceEvents"])
    batches = [
        MicroBatch(tuple(fed.host.cu_seqlens.diff().tolist()), len(np.unique(fed.host.tokens.numpy())))
        for fed in last
    ]
    return plain, divide(device_work(trace) if gpu else host_work(trace)), batches


def _run(state: TrainState, config: TrainConfig, steps: int) -> tuple[tuple[Fed, ...], list[float]]:
    """Steps as `openk3.train.loop` takes them, each read when the next was launched; the device is done then.

    Returns:
        The micro-batches of the last, and when each step was read, which is when it was done.
    """
    unread: Unread | None = None
    ends: list[float] = []

    def finish(unread: Unread) -> None:
        read(state, unread, None)
        ends.append(time.perf_counter())

    for _ in range(steps):
        launched = launch(state, config, OneProcess())
        if unread is not None:
            finish(unread)
        unread = update(state, config, OneProcess(), launched)
    assert unread is not None
    finish(unread)
    if state.model.device.type == "cuda":
        torch.cuda.synchronize(state.model.device)
    return launched.batches, ends
