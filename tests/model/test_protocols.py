"""The seams of the model: what they are asked is all that another answer needs; the local one is plain."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from model.tiny import BASE, VARIANTS, built, packed
from openk3.model import K3
from openk3.model.protocols import LOCAL, ExpertWeights, LocalContext, LocalDispatch, Seams, untagged
from openk3.ops.activation import Activation
from openk3.ops.moe import Routing

Tensor = torch.Tensor


class HalfTheExpertsEach:
    """Two owners of experts; each is sent the rows of its own and nothing else, and the parts are added."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor, routing: Routing, experts: ExpertWeights, activation: Activation) -> Tensor:
        self.calls += 1
        half = experts.w1.shape[0] // 2
        parts = []
        for first in (0, half):
            mine = (routing.ids >= first) & (routing.ids < first + half)
            local = routing._replace(
                ids=torch.where(mine, routing.ids - first, 0), weights=routing.weights * mine
            )
            held = ExpertWeights(*(w[first : first + half] for w in (experts.w1, experts.w3, experts.w2)))
            parts.append(LocalDispatch()(x, local, held, activation))
        return parts[0] + parts[1]


class FirstSlice(LocalContext):
    """The context of the tokens up to a cut: hands on what those after it will ask for, call by call."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def rows_before(self, x, cu_seqlens, rows, kept):
        last = x[int(cu_seqlens[-2]) :][-rows:]  # of the sequence that goes on, which may be shorter
        self.sent.append(torch.cat([x.new_zeros(rows - len(last), x.shape[1]), last]))
        return super().rows_before(x, cu_seqlens, rows, kept)

    def kda(self, *arguments):
        out, states = super().kda(*arguments)
        self.sent.append(states[-1])
        return out, states

    def latents(self, latents, cu_seqlens, kept):
        self.sent.append(latents[int(cu_seqlens[-2]) :])
        return super().latents(latents, cu_seqlens, kept)


class SecondSlice(LocalContext):
    """The context of the tokens after the cut, whose first sequence goes on from before it."""

    def __init__(self, first: FirstSlice) -> None:
        self.received: Iterator[Tensor] = iter(first.sent)

    def continued(self, cu_seqlens):
        return torch.arange(len(cu_seqlens) - 1) == 0

    def rows_before(self, x, cu_seqlens, rows, kept):
        return self._of_first_sequence(len(cu_seqlens) - 1)

    def kda(self, *arguments):
        *inputs, cu_seqlens, _ = arguments
        return super().kda(*inputs, cu_seqlens, self._of_first_sequence(len(cu_seqlens) - 1))

    def latents(self, latents, cu_seqlens, kept):
        before = next(self.received)
        borders = torch.cat([cu_seqlens[:1], cu_seqlens[1:] + len(before)]).int()
        return super().latents(torch.cat([before, latents]), borders, kept)

    def _of_first_sequence(self, sequences: int) -> Tensor:
        mine = next(self.received)
        return torch.cat([mine[None], mine.new_zeros(sequences - 1, *mine.shape)])


def losses(model: K3, tokens: Tensor, cu: Tensor) -> tuple[Tensor, list[Tensor]]:
    total = model.loss(tokens, tokens.roll(-1), cu, mtp_weight=0.5).total
    total.backward()
    return total, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("variant", ["released form", "kimi-linear form", "with MTP"])
def test_experts_may_lie_elsewhere(variant):
    """Values and gradients, the routers' among them."""
    config, dispatch = VARIANTS[variant], HalfTheExpertsEach()
    tokens, cu = packed([9, 0, 14], config.vocab_size)
    expected = losses(built(config), tokens, cu)
    actual = losses(built(config, seams=Seams(dispatch, LocalContext(), untagged)), tokens, cu)
    assert dispatch.calls == config.num_layers - config.dense_layers + config.mtp_layers
    for mine, oracle in zip([actual[0], *actual[1]], [expected[0], *expected[1]], strict=True):
        torch.testing.assert_close(mine, oracle, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("cut", [10, 22, 26])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_sequence_may_begin_elsewhere(variant, cut):
    """Two models with the same weights, each with one slice of packed sequences: losses and gradients add up.

    The cuts leave one token of a sequence before them (the convolution wants three), one after, a long past.
    """
    config = VARIANTS[variant]
    tokens, cu = packed([9, 14, 6] if cut < 26 else [29], config.vocab_size)
    expected, expected_gradients = losses(built(config), tokens, cu)

    first = FirstSlice()
    borders = [c for c in cu.tolist() if c < cut], [c for c in cu.tolist() if c > cut]
    slices = (
        (slice(cut), [*borders[0], cut], first),
        (slice(cut, len(tokens)), [cut, *borders[1]], SecondSlice(first)),
    )
    models, total = [], torch.zeros((), dtype=torch.float64)
    for part, local, context in slices:
        models.append(built(config, seams=Seams(LOCAL.dispatch, context, untagged)))
        local_cu = torch.tensor(local, dtype=torch.int32) - local[0]
        total = total + models[-1].loss(tokens[part], tokens.roll(-1)[part], local_cu, mtp_weight=0.5).total
    total.backward()

    torch.testing.assert_close(total, expected, rtol=1e-10, atol=1e-10)
    gradients = [
        a.grad if b.grad is None else b.grad if a.grad is None else a.grad + b.grad
        for a, b in zip(*(model.parameters() for model in models), strict=True)
    ]
    for mine, oracle in zip([g for g in gradients if g is not None], expected_gradients, strict=True):
        torch.testing.assert_close(mine, oracle, rtol=1e-9, atol=1e-11)


def test_a_memory_policy_hears_of_the_activations_by_name_and_may_replace_them():
    heard: list[str] = []

    def stored_elsewhere(x: Tensor, name: str) -> Tensor:
        heard.append(name)
        return x.clone()

    tokens, cu = packed([12], BASE.vocab_size)
    expected = losses(built(BASE), tokens, cu)
    seams = Seams(LOCAL.dispatch, LOCAL.context, stored_elsewhere)
    actual = losses(built(BASE, seams=seams), tokens, cu)
    for mine, oracle in zip([actual[0], *actual[1]], [expected[0], *expected[1]], strict=True):
        assert torch.equal(mine, oracle)
    kda, mla, moe = ["kda.qkv", "kda.out"], ["mla.latents", "mla.out"], ["moe.latent", "moe.combined"]
    assert heard == [*kda, *kda, *moe, *kda, *moe, *mla, *moe, *mla, *moe]  # dense first, layers 4 and 5 MLA
