"""The plain decoding loop: one sequence, one token at a time, the whole model each time.

It is the oracle of the engine, so it has no batching, no cache policy and no scheduler, only the definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from openk3.config import ModelConfig
from openk3.errors import InvalidInput
from openk3.model.decoder import K3, Output
from openk3.model.decoding.stepper import BatchStepper
from openk3.model.state import DecodeState
from openk3.model.stepper import Stepper
from openk3.ops.precision import widen

Tensor = torch.Tensor


class LanguageModel(Protocol):
    """What decoding asks of a model: a `K3`, or one that keeps its weights elsewhere."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def device(self) -> torch.device:
        """Where tokens go in and logits come out."""
        ...

    def __call__(self, tokens: Tensor, cu_seqlens: Tensor, *, state: DecodeState | None = None) -> Output:
        """Packed tokens `[T]` through the decoder; see `K3.forward`."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """`[M, d]` to `[M, V]`."""
        ...


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. `temperature` 0 is the most likely token.

    `top_k` keeps the k most likely, `top_p` the smallest set whose probability reaches p; both after
    temperature.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise InvalidInput(f"sampling: temperature must be >= 0 and finite, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise InvalidInput(f"sampling: top_p must be in (0, 1], got {self.top_p}")
        if self.top_k is not None and self.top_k < 1:
            raise InvalidInput(f"sampling: top_k must be at least 1, got {self.top_k}")
        if not 0 <= self.seed < 2**63:
            raise InvalidInput(f"sampling: seed must be in 0..2**63-1, got {self.seed}")


def generate(
    model: LanguageModel,
    prompt: list[int],
    max_new_tokens: int,
    *,
    sampling: Sampling = Sampling(),
    stop: Collection[int] = (),
    allowed: Tensor | None = None,
) -> Iterator[int]:
    """Yield the tokens that follow `prompt`, up to and without the first of `stop`.

    Args:
        prompt: token ids, at least one.
        allowed: bool `[V]`, tokens that may be drawn (None: all).

    Raises:
        InvalidInput: the prompt is empty or holds an id outside the vocabulary, or the model's logits are no
            numbers.
    """
    check_prompt(prompt, model.config.vocab_size)
    generator = torch.Generator().manual_seed(sampling.seed)
    with torch.inference_mode():
        logits, state = _forward(model, prompt, None)
        continued = _continued(model, state, len(prompt), max_new_tokens)
    for left in reversed(range(max_new_tokens)):
        if allowed is not None:
            logits = logits.masked_fill(~allowed, float("-inf"))
        chosen = draw(logits, sampling, generator)
        if chosen in stop:
            return
        yield chosen
        if left:
            with torch.inference_mode():
                logits = continued(chosen)


def _continued(model: LanguageModel, state: DecodeState, length: int, more: int) -> Callable[[int], Tensor]:
    """What takes a token and gives logits `[V]` after it, on the CPU: the fastest for the model."""
    if Stepper.suits(model):
        return Stepper(model, state)
    if model.device.type == "cuda" and BatchStepper.suits(model):
        return _OneRow(model, state, length, more)
    return _Plain(model, state)


class _OneRow:
    """`BatchStepper` with one slot."""

    def __init__(self, model: K3, state: DecodeState, length: int, more: int) -> None:
        self._step = BatchStepper(model, 1, length + more)
        self._step.load([0], state, [length])
        self._slot = torch.zeros(1, dtype=torch.int32, device=model.device)

    def __call__(self, token: int) -> Tensor:
        logits = self._step(torch.tensor([token], device=self._slot.device), self._slot)
        return widen(logits[0].cpu())


class _Plain:
    """`Stepper` for any model: its whole forward for each token."""

    def __init__(self, model: LanguageModel, state: DecodeState) -> None:
        self._model, self._state = model, state

    def __call__(self, token: int) -> Tensor:
        """Logits `[V]` after `token`, on the CPU."""
        logits, self._state = _forward(self._model, [token], self._state)
        return logits


def _forward(
    model: LanguageModel, tokens: list[int], state: DecodeState | None
) -> tuple[Tensor, DecodeState]:
    """Logits `[V]` after the last of `tokens`, on the CPU, and the state there."""
    cu_seqlens = torch.tensor([0, len(tokens)], dtype=torch.int32, device=model.device)
    out = model(torch.tensor(tokens, device=model.device), cu_seqlens, state=state)
    assert out.state is not None
    return model.logits(out.hidden[-1:])[0].cpu(), out.state


def check_prompt(prompt: list[int], vocabulary: int) -> None:
    """Whether text can be continued from these tokens.

    Raises:
        InvalidInput: there are none, or one is outside the vocabulary.
    """
    if not prompt:
        raise InvalidInput("generate: the prompt has no tokens; start from [BOS] to write freely")
    if wrong := [t for t in prompt if not 0 <= t < vocabulary]:
        raise InvalidInput(f"generate: token {wrong[0]} is outside the model's vocabulary of {vocabulary}")


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token from `logits` `[V]`.

    Raises:
        InvalidInput: the largest is not finite; NaN counts as the largest.
    """
    if sampling.temperature == 0:
        best = int(logits.argmax())
        check_largest(float(logits[best]))
        return best
    ordered, ids = torch.sort(logits.double(), descending=True, stable=True)
    check_largest(float(ordered[0]))
    # Counted from the largest, so that no temperature, however small, makes an infinity of it.
    probabilities = torch.softmax((ordered - ordered[0]) / sampling.temperature, dim=0)
    kept = probabilities.cumsum(0) - probabilities < sampling.top_p  # the most likely token always stays
    if sampling.top_k is not None:
        kept[sampling.top_k :] = False
    index = torch.multinomial(probabilities.masked_fill(~kept, 0), 1, generator=generator)
    return int(ids[index])


def check_largest(logit: float) -> None:
    """Whether the largest logit is one that a token can be drawn by.

    Raises:
        InvalidInput: it is not finite.
    """
    if not math.isfinite(logit):
        raise InvalidInput(
            f"generate: the model's largest logit is {logit}: its weights are damaged, or training diverged"
        )
