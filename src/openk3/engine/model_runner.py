"""A `K3` over pages, by its plain forward: states and latents are gathered, gone on from, and written back.

The definition of what a step computes; it moves all latents of its sequences each time. Faster runners are
compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from openk3.engine.memory import PageMemory
from openk3.engine.runner import Work
from openk3.model.decoder import K3
from openk3.model.state import DecodeState, KdaState, LayerState, MlaState

Tensor = torch.Tensor


class ModelRunner:
    """Runs `model` over `pages` pages of latents in units of `unit` tokens, and of states."""

    def __init__(self, model: K3, pages: int, unit: int) -> None:
        dtype = model.embed_tokens.weight.dtype
        self.model = model
        self.memory = PageMemory(model.config, pages, unit, dtype, model.device)
        self.page, self.groups = self.memory.page, self.memory.groups

    @torch.inference_mode()
    def execute(self, works: Sequence[Work]) -> dict[int, Tensor]:
        """See `Runner.execute`."""
        memory, model = self.memory, self.model
        restored = [work for work in works if work.restore is not None]
        for work in restored:
            memory.copy(work.restore or (), work.state)
        for work in works:
            if work.copy is not None:
                for layer in self._mla():
                    latents = memory.latents(layer)
                    latents[work.copy.target, : work.copy.tokens] = latents[
                        work.copy.source, : work.copy.tokens
                    ]
        device = model.device
        tokens = torch.tensor([token for work in works for token in work.tokens], device=device)
        counts = [len(work.tokens) for work in works]
        cu_seqlens = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)
        state = DecodeState(
            tuple(self._gathered(layer, works) for layer in range(model.config.num_layers)),
            torch.tensor([work.start for work in works], dtype=torch.int32, device=device),
        )
        output = model(tokens, cu_seqlens, state=state)
        for layer, new in enumerate(output.state.layers):
            self._write(layer, new, works)
        for work in works:
            if work.save is not None:
                memory.copy(work.state, work.save)
        wanted = [i for i, work in enumerate(works) if work.scores]
        if not wanted:
            return {}
        ends = torch.tensor([sum(counts[: i + 1]) - 1 for i in wanted], device=device)
        logits = model.logits(output.hidden[ends])
        return {works[i].request: row for i, row in zip(wanted, logits, strict=True)}

    def _mla(self) -> list[int]:
        return [layer for layer in range(self.model.config.num_layers) if self.model.config.is_mla(layer)]

    def _gathered(self, layer: int, works: Sequence[Work]) -> LayerState:
        """The state that these sequences go on from."""
        if not self.model.config.is_mla(layer):
            states, group = self.memory.states(layer), self.memory.group(layer)
            pages = [work.state[group] for work in works]
            S, conv = states.S[pages], states.conv[pages]
            fresh = [i for i, work in enumerate(works) if work.start == 0]
            S[fresh], conv[fresh] = 0, 0
            return KdaState(S, conv)
        latents = self.memory.latents(layer)
        parts = [
            latents[list(work.pages[: -(-work.start // self.page)])].flatten(0, 1)[: work.start]
            for work in works
        ]
        starts = torch.tensor([0, *accumulate(work.start for work in works)], dtype=torch.int32)
        return MlaState(torch.cat(parts), starts.to(latents.device))

    def _write(self, layer: int, new: LayerState, works: Sequence[Work]) -> None:
        if isinstance(new, KdaState):
            states, group = self.memory.states(layer), self.memory.group(layer)
            pages = [work.state[group] for work in works]
            states.S[pages], states.conv[pages] = new.S, new.conv
            return
        latents = self.memory.latents(layer)
        for work, first in zip(works, new.cu_seqlens.tolist(), strict=False):
            places = torch.arange(work.start, work.start + len(work.tokens), device=latents.device)
            mine = torch.tensor(work.pages, device=latents.device)[places // self.page]
            latents[mine, places % self.page] = new.latents[first + places]
