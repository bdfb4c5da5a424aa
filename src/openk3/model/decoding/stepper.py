"""Many sequences continued token by token: the layers' wiring once more, for one token of each.

For a token the products are small, and what `K3.forward` does around them takes several times as long. Here
weights are joined once, states lie in slots that are allocated once, nothing asks the host for a value, and
on a CUDA device a step of n rows is captured once and replayed as a graph. The oracle is `K3.forward`. Knows
no gradients, no seams, no text and not when a sequence ends.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeGuard

import torch
from torch.nn import functional as F

from openk3.errors import InvalidInput
from openk3.model.decoder import K3, DecoderLayer
from openk3.model.decoding.attention import Kda, Mla
from openk3.model.decoding.ffn import Dense, Moe
from openk3.model.decoding.graph import Captured
from openk3.model.decoding.slots import KdaSlots, MlaSlots, Rows, Slots
from openk3.model.layers import Linear, RmsNorm
from openk3.model.mla import MlaAttention
from openk3.model.protocols import LOCAL
from openk3.model.state import DecodeState
from openk3.ops.attnres import attnres_add_mix_norm
from openk3.ops.decoding import FEW, Joined, StreamMix, mixed_products, products, start_step
from openk3.ops.dispatch import Implementation
from openk3.ops.norm import rms_norm

Tensor = torch.Tensor


class BatchStepper:
    """Continues up to `slots` sequences of up to `length` tokens each.

    Weights must not change while it is used: some are kept joined, as copies.

    Args:
        model: one that `suits`.
        graphs: capture and replay CUDA graphs; by default where the model lies on a CUDA device.
        implementation: of every operator in a step; by default each takes the fastest that a card has run.

    Attributes:
        memory: the slots.

    Raises:
        InvalidInput: the model is of another kind, or there is no room for a token.
    """

    def __init__(
        self,
        model: K3,
        slots: int,
        length: int,
        *,
        graphs: bool | None = None,
        implementation: Implementation | None = None,
    ) -> None:
        if not self.suits(model):
            raise InvalidInput("BatchStepper: the model must be a K3 with local seams and without hooks")
        with torch.inference_mode():
            self.memory = Slots(model.config, slots, length, model.embed_tokens.weight.dtype, model.device)
            self._layers = [
                _Layer(layer, memory, number, implementation)  # type: ignore[arg-type]  # as ModuleList has it
                for number, (layer, memory) in enumerate(zip(model.layers, self.memory.layers, strict=True))
            ]
            self._embedding, self._head = model.embed_tokens.weight, model.head_weight
            mix = model.output_attn_res_proj, model.output_attn_res_norm
            self._read = _Reader(*mix, model.norm, implementation)
        self._sources = 1 + sum(opens for layer in self._layers for _, opens, _ in layer.sublayers)
        self._experts = model.config.moe.num_experts if model.config.moe else 0
        self._implementation = implementation
        self._graphs: dict[int, Captured] | None = (
            {} if (model.device.type == "cuda" if graphs is None else graphs) else None
        )

    @staticmethod
    def suits(model: object) -> TypeGuard[K3]:
        """Whether `model` is one that this can stand for."""
        return (
            isinstance(model, K3)
            and model.seams is LOCAL
            and model.device.type != "meta"
            and not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
        )

    @torch.inference_mode()
    def load(self, slots: list[int], state: DecodeState, lengths: list[int]) -> None:
        """Put the sequences of `state`, which have seen `lengths` tokens, into `slots`; see `Slots.load`."""
        self.memory.load(slots, state, lengths)

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, slots: Tensor) -> Tensor:
        """Append a token to each of n sequences.

        Args:
            tokens: int64 `[n]`, each in `[0, vocab_size)`.
            slots: int32 `[n]`, whose they are, no slot twice; a row of -1 belongs to no sequence and changes
                nothing. A sequence of `length` tokens must not be continued; nothing checks that here.

        Returns:
            Logits `[n, V]` in the model's dtype; those of rows of no sequence mean nothing. In a graph's own
            memory: the next step of n rows writes over them.

        Raises:
            InvalidInput: shapes, dtypes or devices are others.
        """
        device = self.memory.lengths.device
        for name, x, dtype in (("tokens", tokens, torch.int64), ("slots", slots, torch.int32)):
            if x.dim() != 1 or len(x) != len(tokens) or x.dtype != dtype or x.device != device:
                raise InvalidInput(
                    f"BatchStepper: tokens and slots must be int64 and int32 [n] on {device}; "
                    f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}"
                )
        n = len(tokens)
        if not n:
            return self._head.new_empty(0, len(self._head))
        if self._graphs is None:
            return self._step(tokens, slots)
        if n not in self._graphs:
            before = next(iter(self._graphs.values()), None)
            self._graphs[n] = Captured(self._step, n, tokens.device, before)
        return self._graphs[n](tokens, slots)

    def _step(self, tokens: Tensor, slots: Tensor) -> Tensor:
        stream = _Stream(self._embedding, len(tokens), self._sources)
        rows = stream.start(tokens, slots, self.memory, self._implementation)
        if self._experts and len(tokens) > FEW:
            counts = torch.zeros(len(self._layers), self._experts, dtype=torch.int32, device=slots.device)
            rows = replace(rows, counts=counts)
        for layer in self._layers:
            layer(stream, rows)
        return F.linear(self._read(stream), self._head)


class _Stream:
    """`openk3.model.residual.Stream` in one buffer: frozen sums, then the running one; written in place."""

    def __init__(self, embedding: Tensor, n: int, sources: int) -> None:
        self._rows = embedding.new_empty(sources, n, embedding.shape[1])
        self._embedding = embedding
        self._frozen, self._empty = 0, False

    def start(
        self, tokens: Tensor, slots: Tensor, memory: Slots, implementation: Implementation | None
    ) -> Rows:
        """Begin with the embeddings of tokens, which `memory` counts from here on."""
        places, seen, filled = start_step(
            tokens, slots, self._embedding, memory.lengths, self._rows[0], implementation=implementation
        )
        return Rows(slots, places, seen, filled, memory.pages[places])

    @property
    def sources(self) -> Tensor:
        """What a sublayer reads: `[S, n, d]`."""
        return self._rows[: self._frozen + (0 if self._empty else 1)]

    @property
    def running(self) -> tuple[Tensor, bool]:
        """`[n, d]` that a sublayer's output goes to, and whether it is added to what is there."""
        return self._rows[self._frozen], not self._empty

    def open(self) -> None:
        """A new block begins: the running sum is frozen."""
        self._frozen, self._empty = self._frozen + 1, True

    def close(self) -> None:
        """An output has been written."""
        self._empty = False


class _Reader:
    """What a sublayer reads: the mix of the stream, normed, and products of it."""

    def __init__(
        self,
        proj: Linear | None,
        key_norm: RmsNorm | None,
        norm: RmsNorm,
        implementation: Implementation | None,
    ) -> None:
        self.norm, self.implementation = norm, implementation
        self.mix = None
        if proj is not None and key_norm is not None:
            self.mix = StreamMix(proj.weight[0], key_norm.weight, key_norm.eps)

    def __call__(self, stream: _Stream) -> Tensor:
        norm, chosen = self.norm, self.implementation
        *bank, last = stream.sources.unbind(0)
        if self.mix is None or not bank:
            return rms_norm(last, norm.weight, norm.eps, implementation=chosen)
        query, gain, eps = self.mix
        read = attnres_add_mix_norm(
            bank, last, None, query, gain, norm.weight, eps=eps, norm_eps=norm.eps, implementation=chosen
        )
        assert read.normed is not None
        return read.normed

    def products(self, stream: _Stream, joined: Joined, keep: bool) -> list[Tensor]:
        """`joined` of what is read; with `keep` that itself too, as the last."""
        norm, chosen = self.norm, self.implementation
        if keep:
            x = self(stream)
            return [*products(x, joined, implementation=chosen), x]
        return mixed_products(stream.sources, self.mix, norm.weight, norm.eps, joined, implementation=chosen)


class _Layer:
    """`DecoderLayer`."""

    def __init__(
        self,
        layer: DecoderLayer,
        memory: KdaSlots | MlaSlots,
        number: int,
        implementation: Implementation | None,
    ) -> None:
        attention: Kda | Mla
        if isinstance(layer.self_attn, MlaAttention):
            assert isinstance(memory, MlaSlots)
            attention = Mla(layer.self_attn, memory, implementation)
        else:
            assert isinstance(memory, KdaSlots)
            attention = Kda(layer.self_attn, memory, implementation)
        below = (
            Moe(layer.block_sparse_moe, number, implementation)
            if layer.sparse
            else Dense(layer.mlp, implementation)
        )
        before_attention = layer.self_attention_res_proj, layer.self_attention_res_norm, layer.input_layernorm
        before_ffn = layer.mlp_res_proj, layer.mlp_res_norm, layer.post_attention_layernorm
        self.sublayers: list[tuple[_Reader, bool, Kda | Mla | Dense | Moe]] = [
            (_Reader(*before_attention, implementation), layer.opens[0], attention),
            (_Reader(*before_ffn, implementation), layer.opens[1], below),
        ]

    def __call__(self, stream: _Stream, rows: Rows) -> None:
        for read, opens, sublayer in self.sublayers:
            keep = isinstance(sublayer, Moe) and not sublayer.latent
            projected = read.products(stream, sublayer.inputs, keep)
            if opens:
                stream.open()
            sublayer(projected, rows, *stream.running)
            stream.close()
