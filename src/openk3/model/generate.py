"""The plain decoding loop: one sequence, one token at a time, the whole model each time.

It is the oracle of the engine, so it has no batching, no cache policy and no scheduler, only the definition.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from openk3.config import ModelConfig
from openk3.errors import InvalidInput
from openk3.model.decoder import Output
from openk3.model.state import DecodeState

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
        InvalidInput: the prompt is empty or holds an id outside the vocabulary.
    """
    vocabulary = model.config.vocab_size
    if not prompt:
        raise InvalidInput("generate: the prompt has no tokens; start from [BOS] to write freely")
    if wrong := [t for t in prompt if not 0 <= t < vocabulary]:
        raise InvalidInput(f"generate: token {wrong[0]} is outside the model's vocabulary of {vocabulary}")
    device = model.device
    generator = torch.Generator().manual_seed(sampling.seed)
    state: DecodeState | None = None
    tokens = torch.tensor(prompt, device=device)
    for _ in range(max_new_tokens):
        cu_seqlens = torch.tensor([0, tokens.shape[0]], dtype=torch.int32, device=device)
        with torch.inference_mode():  # a sixth faster than no_grad; nothing of it leaves but numbers
            out = model(tokens, cu_seqlens, state=state)
            logits = model.logits(out.hidden[-1:])[0].cpu()
        state = out.state
        if allowed is not None:
            logits = logits.masked_fill(~allowed, float("-inf"))
        chosen = draw(logits, sampling, generator)
        if chosen in stop:
            return
        yield chosen
        tokens = torch.tensor([chosen], device=device)


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token from `logits` `[V]`."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    ordered, ids = torch.sort(logits.double(), descending=True, stable=True)
    # Counted from the largest, so that no temperature, however small, makes an infinity of it.
    probabilities = torch.softmax((ordered - ordered[0]) / sampling.temperature, dim=0)
    kept = probabilities.cumsum(0) - probabilities < sampling.top_p  # the most likely token always stays
    if sampling.top_k is not None:
        kept[sampling.top_k :] = False
    index = torch.multinomial(probabilities.masked_fill(~kept, 0), 1, generator=generator)
    return int(ids[index])
