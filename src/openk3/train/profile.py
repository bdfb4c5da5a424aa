"""Where a training step's time goes, by part of the model: kernels only, each counted once.

A kernel belongs to the operator of PyTorch that launched it, and that to the innermost part around it. Parts
are marked around modules in the forward. A kernel of the backward was launched by a node of autograd, whose
number says which operator of the forward made the node. On a CPU, which has no kernels, operators' own time
stands in their place. Beside it stands the least that a part could take: what it must move, and its FLOPs.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from openk3.checkpoint.train_state import CheckpointStore
from openk3.config import ModelConfig
from openk3.data import Windows
from openk3.model import K3
from openk3.model.ffn import GatedFfn
from openk3.model.kda import KdaAttention
from openk3.model.layers import Embedding
from openk3.model.mla import MlaAttention
from openk3.model.moe import LatentMoe
from openk3.model.residual import opens_block
from openk3.train.config import TrainConfig
from openk3.train.data import TrainingData
from openk3.train.feed import Fed
from openk3.train.flops import kda_weights, mla_weights, model_flops, moe_weights
from openk3.train.reduce import OneProcess
from openk3.train.state import begin
from openk3.train.step import launch, read, update

MARK = "part: "
LOSS, DEPTH, GRADIENTS = "head and loss", "depth mixing and norms", "sums of gradients"
UPDATE, OTHERS, UNKNOWN = "update and metrics", "others", "not attributed"
MODULES: dict[type[nn.Module], str] = {
    KdaAttention: "KDA",
    MlaAttention: "MLA",
    LatentMoe: "experts",
    GatedFfn: "feed-forward",
    Embedding: "embedding",
    K3: DEPTH,
}
"""What is inside of several belongs to the innermost: shared experts are feed-forward networks."""
BACKWARD = "autograd::engine::evaluate_function: "


@dataclass
class PartTime:
    """Seconds of a part in one step, and how many kernels (on a CPU: operators) took them."""

    forward: float = 0.0
    backward: float = 0.0
    count: int = 0

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Profile:
    """A step of training, taken apart.

    Attributes:
        seconds: of a step that is not recorded. parts: time by part, longest first. floors: of some of them.
    """

    seconds: float
    tokens: int
    parts: dict[str, PartTime]
    floors: dict[str, Floor]


@dataclass(frozen=True)
class Floor:
    """The least that a part moves and computes in one step, bytes and FLOPs."""

    bytes: float
    flops: float


def part(name: str) -> record_function:
    """Marks what runs inside as a part."""
    return record_function(MARK + name)


class MadeDocuments:
    """Random tokens in documents of the lengths of source files: of the median 1,500, few are very long."""

    def __init__(self, vocabulary: int, tokens: int) -> None:
        lengths = np.random.default_rng(0).lognormal(7.3, 1.2, tokens // 1000 + 16).astype(np.int64)
        self.lengths = self.byte_counts = lengths.clip(16, 100_000)
        self._vocabulary = vocabulary

    def tokens(self, document: int) -> NDArray[np.uint32]:
        chance = np.random.default_rng(document)
        made: NDArray[np.uint32] = chance.integers(
            0, self._vocabulary, self.lengths[document], dtype=np.uint32
        )
        return made


def profile_training(config: TrainConfig, *, warm: int = 3) -> Profile:
    """Train new weights on made documents for a few steps, and take the last one apart."""
    stream = Windows(
        MadeDocuments(config.model.vocab_size, 4 * config.train.step_tokens), config.train.context, 0
    )
    one = OneProcess()
    store = CheckpointStore(Path(os.devnull))
    state = begin(config, TrainingData(stream), store, init_from=None, reduction=one)
    batches: tuple[Fed, ...] = ()

    def step() -> None:
        nonlocal batches
        launched = launch(state, config, one)
        with part(UPDATE):
            unread = update(state, config, one, launched)
        read(state, unread, None)
        batches = launched.batches

    with state.feed:
        for _ in range(warm):
            began = time.perf_counter()
            step()
            seconds = time.perf_counter() - began
        parts = profile_step(state.model, step)
    lengths = [n for fed in batches for n in fed.host.cu_seqlens.diff().tolist()]
    element = state.model.embed_tokens.weight.element_size()
    return Profile(seconds, sum(lengths), parts, floors(config.model, lengths, element))


def profile_step(model: K3, step: Callable[[], object]) -> dict[str, PartTime]:
    """Time by part of what `step` runs, which should have run before: the first time compiles."""
    gpu = model.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    with _marked(model), profile(activities=activities) as recorded:
        step()
        if gpu:
            torch.cuda.synchronize()
    return by_part(recorded.events() or (), gpu=gpu)


def by_part(events: Iterable[FunctionEvent], *, gpu: bool) -> dict[str, PartTime]:
    """Adds up a recording's kernels, or on a CPU the own time of its operators, longest part first."""
    events = list(events)
    host = sorted(
        (event for event in events if event.device_type == DeviceType.CPU),
        key=lambda event: float(event.time_range.start),
    )
    made_in: dict[int, str] = {}
    for event in host:  # the last operator that saw a number is the one that made the node
        name, node = _enclosing(event)
        if node is None and event.sequence_nr >= 0:
            made_in[event.sequence_nr] = name
    times: dict[str, PartTime] = {}
    for event in host:
        took = [kernel.duration for kernel in event.kernels] if gpu else [event.self_cpu_time_total]
        if not took:
            continue
        name, node = _enclosing(event)
        if node is not None:
            accumulates = "AccumulateGrad" in node.name
            name = GRADIENTS if accumulates else made_in.get(node.sequence_nr, name)
        at = times.setdefault(name, PartTime())
        at.count += len(took)
        if node is None:
            at.forward += sum(took) / 1e6
        else:
            at.backward += sum(took) / 1e6
    if gpu:
        kernels = [event for event in events if event.device_type == DeviceType.CUDA]
        missing = sum(event.time_range.end - event.time_range.start for event in kernels) / 1e6
        missing -= sum(at.seconds for at in times.values())
        count = len(kernels) - sum(at.count for at in times.values())
        if count > 0:
            times[UNKNOWN] = PartTime(forward=missing, count=count)
    return dict(sorted(times.items(), key=lambda item: -item[1].seconds))


def floors(config: ModelConfig, lengths: list[int], element: int) -> dict[str, Floor]:
    """Of a step over sequences of these lengths in one micro-batch; `element`: bytes of a weight or number.

    A sublayer reads its input and writes its output; its backward reads both's gradient and the input, and
    writes one gradient. Weights are read each way and their gradient is written. A mix over S sources reads
    them and writes one; its backward reads S + 1 and writes S. Sums of gradients and updates are left out.
    """
    T, d = sum(lengths), config.hidden_size
    row, found = T * d * element, dict[str, Floor]()
    flops = model_flops(config, lengths)
    sparse = sum(config.is_moe(i) for i in range(config.num_layers))
    mla = sum(config.is_mla(i) for i in range(config.num_layers))

    def add(name: str, layers: int, stored: int, active: int, more: int = 0) -> None:
        if layers:
            found[name] = Floor(layers * (5 * row + 3 * stored * element), layers * 6 * active * T + more)

    if kda := config.num_layers - mla:
        weights = kda_weights(config.kda, d)
        add("KDA", kda, weights, weights, flops.recurrence)
    if mla:
        weights = mla_weights(config.mla, d)
        add("MLA", mla, weights, weights, flops.attention)
    moe, shared = config.moe, 0
    if sparse and moe is not None:
        shared = moe.num_shared_experts * 3 * d * moe.expert_width
        active, width = moe_weights(moe, d) - shared, moe.latent_width or d
        stored = active + (moe.num_experts - moe.experts_per_token) * 3 * width * moe.expert_width
        add("experts", sparse, stored, active)
    dense = config.num_layers - sparse
    wide = sparse * shared + dense * 3 * d * config.dense_width
    if wide:
        layers = dense + (sparse if shared else 0)
        found["feed-forward"] = Floor(layers * 5 * row + 3 * wide * element, 6 * wide * T)
    table = config.vocab_size * d
    found[LOSS] = Floor(2 * row + 3 * table * element, 6 * table * T)
    found[DEPTH] = Floor(sum(3 * sources + 2 for sources in _sources(config)) * row, 0)
    return found


def _sources(config: ModelConfig) -> Iterator[int]:
    """How many rows each mix reads, the last before the head; one where nothing is mixed, for the norm."""
    bank, summing = 0, True
    for sublayer in range(2 * config.num_layers):
        yield bank + summing
        if opens_block(config.attn_res, sublayer):
            bank += summing
        summing = True
    yield bank + summing


def _enclosing(event: FunctionEvent) -> tuple[str, FunctionEvent | None]:
    """The part that an event lies in, and the node of autograd that runs it, if one does."""
    name, node = "", None
    at: FunctionEvent | None = event
    while at is not None:
        if not name:
            if at.name.startswith(MARK):
                name = at.name.removeprefix(MARK)
            elif "linear_cross_entropy" in at.name or "LinearCrossEntropy" in at.name:
                name = LOSS
        if node is None and at.name.startswith(BACKWARD):
            node = at
        at = at.cpu_parent
    return name or OTHERS, node


@contextlib.contextmanager
def _marked(model: K3) -> Iterator[None]:
    """Marks the modules of the model that are parts."""
    hooks, open_parts = [], list[record_function]()

    def enter(name: str) -> None:
        open_parts.append(part(name))
        open_parts[-1].__enter__()  # type: ignore[no-untyped-call]

    def leave() -> None:
        open_parts.pop().__exit__(None, None, None)

    for module in model.modules():
        name = MODULES.get(type(module))
        if name is not None:
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: enter(name)))
            hooks.append(module.register_forward_hook(lambda *_: leave()))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
