"""The engine's definition: one request after the other, the whole sequence through the model each time."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import torch

from openk3.engine.core import Choose, Request
from openk3.model.decoder import K3


class NaiveEngine:
    """As `Engine` is called; without pages, reuse, batches or budgets."""

    def __init__(self, model: K3, choose: Choose) -> None:
        self.model, self.choose = model, choose
        self.waiting: list[Request] = []
        self._ids = itertools.count()

    def add(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        stop: Collection[int] = (),
        turns: Sequence[int] = (),
    ) -> Request:
        """See `Engine.add`."""
        request = Request.asked(next(self._ids), prompt, max_new_tokens, stop, turns)
        self.waiting.append(request)
        return request

    def abort(self, request: Request) -> None:
        if request.finish is None:
            request.finish = "abort"
            self.waiting.remove(request)

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """One token of the oldest request; it, if it ended."""
        if not self.waiting:
            return []
        request = self.waiting[0]
        tokens = torch.tensor(request.tokens, device=self.model.device)
        cu_seqlens = torch.tensor([0, len(tokens)], dtype=torch.int32, device=tokens.device)
        hidden = self.model(tokens, cu_seqlens).hidden
        request.tokens.append(self.choose(request, self.model.logits(hidden[-1:])[0]))
        if request.tokens[-1] in request.stop:
            request.finish = "stop"
        elif len(request.tokens) >= request.most:
            request.finish = "length"
        if request.finish is None:
            return []
        self.waiting.pop(0)
        return [request]
