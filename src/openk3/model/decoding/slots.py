"""Where the states of several sequences lie while they are continued: preallocated, addressed by slot.

A slot holds one sequence: of each KDA layer a state and a convolution tail, of each MLA layer room for
`length` latents. One more than asked for is kept, the spare: rows of a step that belong to no sequence read
and write there, so that no step needs to leave rows out. Knows neither layers nor who owns a slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from openk3.config import ModelConfig
from openk3.errors import InvalidInput
from openk3.model.state import DecodeState, KdaState, MlaState
from openk3.ops.precision import wide

Tensor = torch.Tensor

PAGE = 64


@dataclass(frozen=True)
class KdaSlots:
    """`S`: `[slots + 1, H, V, K]`, at least fp32. `conv`: `[slots + 1, W - 1, 3 H K]`, oldest first."""

    S: Tensor
    conv: Tensor


@dataclass(frozen=True)
class MlaSlots:
    """`latents`: `[slots + 1, length, r + shared]`: normed latent, then raw shared key, of each token.

    `length` is a multiple of PAGE here.
    """

    latents: Tensor

    @property
    def pages(self) -> Tensor:
        """The same as `[pages, PAGE, r + shared]`; a slot's pages follow each other."""
        return self.latents.view(-1, PAGE, self.latents.shape[-1])


@dataclass(frozen=True)
class Rows:
    """Which sequences a step of n rows continues, the same for all layers.

    slots: int32 `[n]`, -1 for a row of no sequence. places: int64 `[n]`, the slot, or the spare one.
    seen: int64 `[n]`, tokens before this step's. filled: int32 `[n]`, tokens with it; 0 for no sequence.
    pages: int32 `[n, length / PAGE]`, where each row's latents lie.
    counts: int32 `[L, E]`, zeros for each layer to count its experts' rows in; None where nobody counts.
    """

    slots: Tensor
    places: Tensor
    seen: Tensor
    filled: Tensor
    pages: Tensor
    counts: Tensor | None = None


class Slots:
    """States of up to `count` sequences of up to `length` tokens each.

    Attributes:
        layers: one `KdaSlots` or `MlaSlots` a layer.
        lengths: int64 `[count + 1]`, tokens that each slot's sequence has; 0 in the spare.
        pages: int32 `[count + 1, pages of a slot]`, which pages of MLA layers are whose.
    """

    def __init__(
        self, config: ModelConfig, count: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        if count < 1 or length < 1:
            raise InvalidInput(f"decoding: slots and length must be at least 1, got {count} and {length}")
        self.count, self.length = count, length
        self.lengths = torch.zeros(count + 1, dtype=torch.int64, device=device)
        pages = -(-length // PAGE)
        self.pages = torch.arange((count + 1) * pages, dtype=torch.int32, device=device).view(-1, pages)
        self.layers: list[KdaSlots | MlaSlots] = []
        for index in range(config.num_layers):
            if config.is_mla(index):
                assert config.mla is not None
                width = config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
                self.layers.append(
                    MlaSlots(torch.zeros(count + 1, pages * PAGE, width, dtype=dtype, device=device))
                )
            else:
                assert config.kda is not None
                H, K = config.kda.num_heads, config.kda.head_dim
                S = torch.zeros(count + 1, H, K, K, dtype=wide(dtype), device=device)
                tails = count + 1, config.kda.conv_width - 1, 3 * H * K
                self.layers.append(KdaSlots(S, torch.zeros(tails, dtype=dtype, device=device)))

    def load(self, slots: list[int], state: DecodeState, lengths: list[int]) -> None:
        """Put sequence i of `state`, which has seen `lengths[i]` tokens, into `slots[i]`.

        Raises:
            InvalidInput: a slot does not exist or is named twice, or a sequence is too long.
        """
        if len(set(slots)) != len(slots) or not all(0 <= slot < self.count for slot in slots):
            raise InvalidInput(f"decoding: slots must be different ones of {self.count}, got {slots}")
        if len(lengths) != len(slots) or len(state.lengths) != len(slots):
            raise InvalidInput(
                f"decoding: {len(slots)} slots, {len(lengths)} lengths and a state of {len(state.lengths)} "
                "sequences; they must match"
            )
        if lengths and max(lengths) > self.length:
            raise InvalidInput(
                f"decoding: a sequence has {max(lengths)} tokens, a slot has room for {self.length}"
            )
        places = torch.tensor(slots, device=self.lengths.device)
        self.lengths[places] = torch.tensor(lengths, device=self.lengths.device)
        starts = accumulate(lengths, initial=0)
        spans = [(slot, start, n) for slot, start, n in zip(slots, starts, lengths, strict=False)]
        for mine, given in zip(self.layers, state.layers, strict=True):
            if isinstance(mine, MlaSlots):
                assert isinstance(given, MlaState)
                for slot, start, n in spans:
                    mine.latents[slot, :n] = given.latents[start : start + n]
            else:
                assert isinstance(given, KdaState)
                mine.S[places], mine.conv[places] = given.S, given.conv
