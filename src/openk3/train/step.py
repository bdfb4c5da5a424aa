"""One step of training, given to the device without waiting for it, and its numbers, read a step later.

A step: micro-batches, each divided by the step's count of valid tokens -> sum over ranks -> guard and clip
-> learning rate -> optimizer -> QK-clip -> balance biases. Every quantity of the global batch goes through
`openk3.train.reduce` before it is used.

The host runs ahead. When a step's gradients are on their way it reads what the step before came to, which is
done by then or soon, and the device has work meanwhile. So the spike guard's limits are those of all earlier
steps, as if the host had waited; whether this step is within them, the device finds: 0 in place of the
clipping factor, and the optimizer changes nothing. Numbers that end a run are seen one step later than they
arise, and before anything of that step is saved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from openk3.errors import TrainingDiverged
from openk3.model import ForwardRecord
from openk3.optim import clip_scale, lr_factor
from openk3.train.balance import routers, update_biases
from openk3.train.config import TrainConfig
from openk3.train.feed import Fed
from openk3.train.gradients import widen_gradients
from openk3.train.metrics import Row, attention_metrics, bias_metrics, detail_metrics, expert_metrics
from openk3.train.readback import Lap, Name, Readback
from openk3.train.reduce import Reduction
from openk3.train.spike import SpikeGuard
from openk3.train.state import TrainState
from openk3.train.totals import StepTotals

Tensor = torch.Tensor


@dataclass(frozen=True)
class Launched:
    """A step whose gradients are on their way. `valid`: tokens with a target in all of it. `batches`: this
    rank's."""

    step: int
    detail: bool
    valid: int
    totals: StepTotals
    batches: tuple[Fed, ...]
    lap: Lap


@dataclass(frozen=True)
class Unread:
    """A step that is on its way, to be read when the next one is: what a row says."""

    step: int
    detail: bool
    lr: float
    numbers: Readback
    lap: Lap


def launch(state: TrainState, config: TrainConfig, reduction: Reduction) -> Launched:
    """Forward and backward of the next step's micro-batches; the gradients are left on the parameters."""
    model, step = state.model, state.step + 1
    lap = Lap(model.device)
    detail = step == 1 or step % config.logging.detail_every == 0
    batches = next(state.feed)
    valid = reduction.token_count(sum(fed.valid for fed in batches))
    totals = StepTotals.nothing(model.device)
    for fed in batches:
        local = fed.local
        record = ForwardRecord(token_mask=local.token_mask, detail=detail and totals.sample is None)
        loss = model.loss(
            local.tokens,
            local.targets,
            local.cu_seqlens,
            mtp_weight=config.train.mtp_weight,
            record=record,
        )
        torch.autograd.backward(loss.total / max(valid, 1))
        if fed is batches[0]:
            widen_gradients(model)
        totals.add(loss, record, fed, config.model)
    reduction.gradients(model.named_parameters())
    return Launched(step, detail, valid, totals.reduced(reduction), batches, lap)


def update(state: TrainState, config: TrainConfig, reduction: Reduction, launched: Launched) -> Unread:
    """Apply the gradients, if the device finds the step admitted. All earlier steps must have been read."""
    model, optimizer, totals, step = state.model, state.optimizer, launched.totals, launched.step
    loss = totals.next_token / max(launched.valid, 1)
    norm = reduction.gradient_norm(model.named_parameters())
    lr = config.optim.lr * lr_factor(step - 1, config.train.total_steps, config.schedule)

    admitted = within_limits(state.guard, norm, loss)
    scale = clip_scale(norm, config.optim.grad_clip).masked_fill(~admitted, 0.0)
    optimizer.step(lr, scale)
    gammas = optimizer.qk_clip(totals.max_logit, scale)
    update_biases(model, totals.load, totals.histogram, state.updates, admitted)
    optimizer.zero_grad()
    launched.lap.stop()
    state.step = step

    numbers: dict[Name, Tensor] = {
        ("loss", ""): loss,
        ("norm", ""): norm,
        ("admitted", ""): admitted,
        ("tokens", ""): totals.tokens,
        ("flops", ""): totals.flops,
    }
    if config.train.mtp_weight:
        numbers["mtp", ""] = totals.mtp / totals.mtp_count.clamp(min=1)
    if biases := {layer: router.e_score_correction_bias for layer, router in routers(model).items()}:
        together = torch.stack([*biases.values()])
        ranges = together.amax(1) - together.amin(1)
        numbers |= _named("bias_range", dict(zip(biases, ranges.unbind(), strict=True)))
    numbers |= _named("load", totals.load) | _named("max_logit", totals.max_logit)
    numbers |= _named("clipped", {layer: (gamma < 1).sum() for layer, gamma in gammas.items()})
    if totals.sample is not None and totals.sample.detail:
        numbers |= _named("attn_res", totals.sample.source_weights)
        numbers |= _named("state_norm", totals.sample.state_norm)
    return Unread(step, launched.detail, lr, Readback(numbers), launched.lap)


def read(state: TrainState, unread: Unread, peak: float | None) -> Row:
    """The row of a step, once the device has done it; tells the guard and counts what was seen.

    Args:
        peak: FLOPs per second of all devices, for MFU.

    Raises:
        TrainingDiverged: the loss or a logit is not finite, or too many steps in a row were spikes (a
            gradient that is not finite is one).
    """
    numbers = unread.numbers.wait()
    loss, norm = float(numbers["loss", ""]), float(numbers["norm", ""])
    if not math.isfinite(loss):
        raise TrainingDiverged(f"the loss is {loss}")
    admitted = state.guard.admits(norm, loss)
    assert admitted == bool(numbers["admitted", ""]), "host and device decided differently"
    if state.guard.exhausted:
        raise TrainingDiverged(
            f"{state.guard.skipped_in_a_row} gradients in a row were spikes, last {norm:.3g}"
        )
    max_logit = _by_layer("max_logit", numbers)
    if admitted:
        _check_logits(max_logit)
    state.updates += admitted
    tokens, flops = int(numbers["tokens", ""]), int(numbers["flops", ""])
    state.tokens += tokens

    row: Row = {
        "step": unread.step,
        "loss": loss,
        "lr": unread.lr,
        "grad_norm": norm,
        "skipped": not admitted,
    }
    if ("mtp", "") in numbers:
        row["mtp_loss"] = float(numbers["mtp", ""])
    row |= expert_metrics(_by_layer("load", numbers), detail=unread.detail)
    row |= bias_metrics(_by_layer("bias_range", numbers))
    row |= attention_metrics(max_logit, _by_layer("clipped", numbers))
    row |= detail_metrics(_of("attn_res", numbers), _by_layer("state_norm", numbers))
    seconds = unread.lap.seconds()
    row |= {"tokens": state.tokens, "flops": flops}
    row |= {"step_seconds": seconds, "tokens_per_second": tokens / seconds}
    if peak is not None:
        row["mfu"] = flops / seconds / peak
    return row


def within_limits(guard: SpikeGuard, norm: Tensor, loss: Tensor) -> Tensor:
    """What `guard.admits` will say, bool `[]`, found where `norm` and `loss` are; both float64 `[]`.

    A loss that is not finite, which ends the run when it is read, changes nothing before that either.
    """
    norms = torch.isfinite(norm) & (norm <= guard.limit)
    return norms & torch.isfinite(loss) & (loss <= guard.loss_limit)


def _check_logits(max_logit: Mapping[int, Tensor]) -> None:
    for layer, logits in max_logit.items():
        if not (largest := logits.max()) < math.inf:  # also where one is NaN
            raise TrainingDiverged(
                f"largest attention logit of layer {layer}, head {int(logits.argmax())} is {float(largest)}"
            )


def _named(kind: str, values: Mapping[int, Tensor] | Mapping[str, Tensor]) -> dict[Name, Tensor]:
    return {(kind, str(name)): value for name, value in values.items()}


def _of(kind: str, numbers: Mapping[Name, Tensor]) -> dict[str, Tensor]:
    return {name: value for (of, name), value in numbers.items() if of == kind}


def _by_layer(kind: str, numbers: Mapping[Name, Tensor]) -> dict[int, Tensor]:
    return {int(layer): value for layer, value in _of(kind, numbers).items()}
