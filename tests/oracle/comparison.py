"""One question to two implementations: the logits of tokens, at once and in pieces.

A side is anything with `logits` (a sequence at once, without a cache) and `start` (a sequence in pieces, with
the cache of that side). Nothing here knows which side is right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from openk3.model import K3, DecodeState
from openk3.model.moe import Router
from openk3.ops.moe import Routing

Tensor = torch.Tensor
Feed = Callable[[Tensor], Tensor]
"""The next tokens of a sequence, int64 `[n]`, to their logits `[n, V]`."""

BORDERS = (1, 2, 3, 4, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
"""Lengths around the chunks of both sides (16, 32, 64, 128), and around the width of the convolution."""

TOLERANCE = 1e-4
"""Largest difference of two logits of order one in fp32."""

CLEAR = 1e-5
"""Scores that differ by less may be ordered either way in fp32."""


class Side(Protocol):
    """A model whose logits can be compared."""

    def logits(self, tokens: Tensor) -> Tensor:
        """int64 `[T]` to `[T, V]`."""
        ...

    def start(self) -> Feed:
        """A new sequence."""
        ...


class Ours:
    """openk3 as a side: a sequence at once is one of a packed batch, pieces go through the `DecodeState`."""

    def __init__(self, model: K3) -> None:
        self.model = model.eval()

    def packed(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        """All sequences in one packed forward."""
        lengths = [len(s) for s in sequences]
        with torch.no_grad():
            out = self.model(torch.cat(list(sequences)), _offsets(lengths))
            return list(self.model.logits(out.hidden).split(lengths))

    def logits(self, tokens: Tensor) -> Tensor:
        return self.packed([tokens])[0]

    def start(self) -> Feed:
        state: DecodeState | None = None

        def feed(tokens: Tensor) -> Tensor:
            nonlocal state
            with torch.no_grad():
                out = self.model(tokens, _offsets([len(tokens)]), state=state)
                state = out.state
                return self.model.logits(out.hidden)

        return feed


def sequences_for(model: K3, seed: int, lengths: Sequence[int] = BORDERS) -> list[Tensor]:
    """Random sequences of these lengths in which every router decides clearly.

    Where the last expert chosen and the first left out score alike to a rounding, two right implementations
    may choose differently and compute different functions from there; such sequences are drawn again.
    """
    generator = torch.Generator().manual_seed(seed)
    sequences: list[Tensor] = [torch.empty(0, dtype=torch.int64)] * len(lengths)
    unclear = list(range(len(lengths)))
    for _ in range(50):
        for i in unclear:
            sequences[i] = torch.randint(model.config.vocab_size, (lengths[i],), generator=generator)
        margins = _margins(model, [sequences[i] for i in unclear])
        unclear = [i for i, margin in zip(unclear, margins, strict=True) if margin < CLEAR]
        if not unclear:
            return sequences
    raise AssertionError(f"no clear sequences of lengths {[lengths[i] for i in unclear]} in 50 draws")


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Of two sides' logits, which must be as many, finite, and of an order at which 1e-4 says something."""
    assert a.shape == b.shape
    assert a.isfinite().all()
    assert 1 < float(a.abs().max()) < 20
    return float((a.double() - b.double()).abs().max())


def difference_at_once(ours: Ours, peer: Side, sequences: Sequence[Tensor]) -> float:
    """Ours packed into one forward, the peer one by one."""
    pairs = zip(ours.packed(sequences), sequences, strict=True)
    return max(largest_difference(mine, peer.logits(tokens)) for mine, tokens in pairs)


def difference_in_pieces(ours: Side, peer: Side, tokens: Tensor, pieces: Sequence[int]) -> float:
    """Both continue from their own cache, `pieces` tokens at a time."""
    mine, theirs = ours.start(), peer.start()
    fed = [(mine(piece), theirs(piece)) for piece in tokens.split(list(pieces))]
    return largest_difference(torch.cat([a for a, _ in fed]), torch.cat([b for _, b in fed]))


def _margins(model: K3, sequences: Sequence[Tensor]) -> list[float]:
    """For each sequence how clearly its least clear routing decision was taken."""
    lengths = [len(s) for s in sequences]
    margin = torch.full((sum(lengths),), torch.inf)

    def see(router: Router, _: object, out: tuple[Routing, Tensor]) -> None:
        routing, _ = out
        assert routing.scores is not None
        biased = routing.scores + router.e_score_correction_bias
        margin.copy_(torch.minimum(margin, biased.gather(1, routing.ids).amin(1) - routing.cutoff))

    hooks = [m.register_forward_hook(see) for m in model.modules() if isinstance(m, Router)]
    Ours(model).packed(sequences)
    for hook in hooks:
        hook.remove()
    return [float(part.min()) for part in margin.split(lengths)]


def _offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()
