"""One row of numbers per step: what it takes to see a K3 run, and where the rows go.

A row is a flat mapping of numbers, with dictionaries by layer (0-based, as text; the MTP layer follows the
last). Rows are global: everything in them was reduced over ranks. They go to `metrics.jsonl`, the one
record that survives kills without gaps or doubles, and from there to TensorBoard for looking.

step                finished steps                      loss, mtp_loss     nats per token, of this step
lr, grad_norm       peak schedule, norm before clip     skipped            the update was refused as a spike
tokens, seconds     seen and spent since step 0         step_seconds       of this step, evaluation left out
tokens_per_second   within this step                    flops              of the model, in this step
mfu                 share of the peak, if it is known
load_max, maxvio    fullest expert / mean, minus 1      dead_experts       share without a token in the step
bias_range          largest - smallest balance bias     max_logit          of any head; clipped_heads: number
attn_res, state_norm, load                              detail steps: weights by source, norms, counts
val_loss, bits_per_byte, val_tokens, val_bytes          steps with an evaluation
warning             text
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from openk3.checkpoint.jsonl import JsonlLog
from openk3.errors import StorageError
from openk3.train.tensorboard import EventFile

Tensor = torch.Tensor
Row = dict[str, Any]


def expert_metrics(load: Mapping[int, Tensor], *, detail: bool) -> Row:
    """How even the step's routing was, from outcomes: counts of tokens, not the router's probabilities.

    Args:
        load: int64 `[E]` by layer.
        detail: also give the counts themselves.
    """
    if not load:
        return {}
    counts = {str(layer): tensor.tolist() for layer, tensor in sorted(load.items())}
    peaks = {layer: max(c) * len(c) / max(sum(c), 1) for layer, c in counts.items()}
    row: Row = {
        "load_max": peaks,
        "maxvio": {layer: peak - 1 for layer, peak in peaks.items()},
        "dead_experts": {layer: c.count(0) / len(c) for layer, c in counts.items()},
    }
    return row | ({"load": counts} if detail else {})


def bias_metrics(ranges: Mapping[int, Tensor]) -> Row:
    """Spread of each router's balance bias, `[]` by layer."""
    return {"bias_range": {str(i): float(spread) for i, spread in ranges.items()}} if ranges else {}


def attention_metrics(max_logit: Mapping[int, Tensor], clipped: Mapping[int, Tensor]) -> Row:
    """Largest logit of each MLA layer in the step, `[H]`, and how many of its heads were clipped after it."""
    if not max_logit:
        return {}
    return {
        "max_logit": {str(i): float(logits.max()) for i, logits in sorted(max_logit.items())},
        "clipped_heads": {str(i): int(clipped[i]) for i in sorted(max_logit)},
    }


def detail_metrics(source_weights: Mapping[str, Tensor], state_norm: Mapping[int, Tensor]) -> Row:
    """What the first micro-batch showed of depth and memory."""
    row: Row = {}
    if source_weights:
        row["attn_res"] = {name: weights.tolist() for name, weights in source_weights.items()}
    if state_norm:
        row["state_norm"] = {str(i): norms.tolist() for i, norms in sorted(state_norm.items())}
    return row


class MetricsLog:
    """The rows of a run on disk: `metrics.jsonl`, and TensorBoard events beside it.

    Args:
        folder: of the run.
        step: the step that the session goes on from; rows of later steps are taken out.
    """

    def __init__(self, folder: Path, step: int, *, tensorboard: bool) -> None:
        self._rows = JsonlLog(folder / "metrics.jsonl", step)
        # Steps logged again after a kill are shown once: TensorBoard drops what it had from there on.
        self._events = EventFile(folder / "tensorboard", step) if tensorboard else None

    def write(self, row: Row) -> None:
        self._rows.append(row)
        if self._events is not None:
            self._events.write(row["step"], scalars(row))

    def sync(self) -> None:
        """Make all rows durable; a checkpoint counts on them."""
        self._rows.sync()
        if self._events is not None:
            self._events.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rows.close()
        if self._events is not None:
            # What could not be written cannot be flushed either: of two errors the first is the one to tell.
            with contextlib.suppress(*(() if error is None else (StorageError,))):
                self._events.close()


def scalars(row: Row) -> Iterator[tuple[str, float]]:
    """TensorBoard's view of a row: `name` or `name/layer_3`; lists are left to the report."""
    for name, value in row.items():
        if name != "step" and isinstance(value, int | float):
            yield name, float(value)
        elif isinstance(value, dict):
            for layer, inner in value.items():
                if isinstance(inner, int | float):
                    yield f"{name}/layer_{int(layer) + 1}", float(inner)
