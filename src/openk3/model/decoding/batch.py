"""Text of many prompts at once: slots filled, stepped together, and given to the next prompt when one ends.

No policy beyond first come, first served, and no cache of prompts: those are an engine's matters. The oracle
is `openk3.model.generate.generate`, prompt by prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch

from openk3.errors import InvalidInput
from openk3.model.decoder import K3
from openk3.model.decoding.choice import NO_TOKEN, choose_tokens
from openk3.model.decoding.stepper import BatchStepper
from openk3.model.generate import Sampling, check_largest, check_prompt
from openk3.ops.dispatch import Implementation

Tensor = torch.Tensor

DEFAULT = Sampling()
PREFILL_TOKENS = 1 << 14
"""Prompts that start together are read in one pass of up to so many tokens, or of one prompt."""


def generate_batch(
    model: K3,
    prompts: list[list[int]],
    max_new_tokens: int,
    *,
    sampling: Sampling = DEFAULT,
    stop: Collection[int] = (),
    allowed: Tensor | None = None,
    at_once: int = 64,
    implementation: Implementation | None = None,
) -> Iterator[tuple[int, int]]:
    """Yield (prompt's number, token) as tokens come; each prompt's own come in order.

    A sequence ends before the first of `stop`, or after `max_new_tokens`. Greedy text is that of `generate`
    but for rounding, which differs with the number of rows. What is drawn depends on no other prompt: prompt
    i draws as prompt 0 does with `seed` + i.

    Args:
        prompts: token ids, at least one each.
        allowed: bool `[V]`, tokens that may be drawn (None: all).
        at_once: how many sequences are continued together at most; their states are allocated at the start.
        implementation: see `BatchStepper`.

    Raises:
        InvalidInput: a prompt is empty or holds an id outside the vocabulary, the model is none that
            `BatchStepper` suits, or its logits are no numbers.
    """
    if at_once < 1:
        raise InvalidInput(f"generate_batch: at_once must be at least 1, got {at_once}")
    for prompt in prompts:
        check_prompt(prompt, model.config.vocab_size)
    if not prompts or max_new_tokens < 1:
        return
    slots, longest = min(at_once, len(prompts)), max(map(len, prompts))
    stepper = BatchStepper(model, slots, longest + max_new_tokens, implementation=implementation)
    choose = _Chooser(sampling, None if allowed is None else allowed.to(model.device))
    waiting, free = deque(enumerate(prompts)), list(range(slots))
    running: list[_Running] = []
    while running or waiting:
        if waiting and free:
            rows = _starting(waiting, free, max_new_tokens, sampling.seed)
            logits = _read_prompts(model, stepper, rows)
        else:
            rows, running = running, []
            logits = stepper(*_inputs(rows, slots, model.device))
        for row, token in zip(rows, choose(logits[: len(rows)], rows), strict=True):
            if token in stop:
                free.append(row.slot)
                continue
            yield row.number, token
            row.last, row.left = token, row.left - 1
            if row.left:
                running.append(row)
            else:
                free.append(row.slot)


@dataclass
class _Running:
    """A prompt's number, its slot and random numbers, its last token, and how many are left to write."""

    number: int
    prompt: list[int]
    slot: int
    random: torch.Generator
    left: int
    last: int = -1


class _Chooser:
    """Tokens of rows, on the host: the one place where a step waits for the device."""

    def __init__(self, sampling: Sampling, allowed: Tensor | None) -> None:
        self.sampling, self.allowed = sampling, allowed

    @torch.inference_mode()
    def __call__(self, logits: Tensor, rows: list[_Running]) -> list[int]:
        if self.allowed is not None:
            logits = logits.masked_fill(~self.allowed, -torch.inf)
        numbers = [torch.rand(1, generator=row.random, dtype=torch.float64) for row in rows]
        tokens: list[int] = choose_tokens(
            logits, torch.cat(numbers).to(logits.device), self.sampling
        ).tolist()
        if NO_TOKEN in tokens:
            check_largest(float(logits[tokens.index(NO_TOKEN)].max()))
        return tokens


def _starting(waiting: deque[tuple[int, list[int]]], free: list[int], left: int, seed: int) -> list[_Running]:
    """The next prompts, in free slots."""
    rows: list[_Running] = []
    tokens = 0
    while waiting and free and (not rows or tokens + len(waiting[0][1]) <= PREFILL_TOKENS):
        number, prompt = waiting.popleft()
        random = torch.Generator().manual_seed((seed + number) % 2**63)
        rows.append(_Running(number, prompt, free.pop(), random, left))
        tokens += len(prompt)
    return rows


@torch.inference_mode()
def _read_prompts(model: K3, stepper: BatchStepper, rows: list[_Running]) -> Tensor:
    """Prompts into their slots; logits `[n, V]` after each."""
    lengths = [len(row.prompt) for row in rows]
    ends = list(accumulate(lengths))
    tokens = torch.tensor([token for row in rows for token in row.prompt], device=model.device)
    out = model(tokens, torch.tensor([0, *ends], dtype=torch.int32, device=model.device))
    assert out.state is not None
    stepper.load([row.slot for row in rows], out.state, lengths)
    return model.logits(out.hidden[torch.tensor(ends, device=model.device) - 1])


def _inputs(rows: list[_Running], slots: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and slots of a step: as many rows as there are sequences, brought to a power of two, or as there
    are slots, so that few graphs serve all."""
    n = min(1 << (len(rows) - 1).bit_length(), slots)
    more = n - len(rows)
    tokens = torch.tensor([row.last for row in rows] + [0] * more, device=device)
    return tokens, torch.tensor([row.slot for row in rows] + [-1] * more, dtype=torch.int32, device=device)
