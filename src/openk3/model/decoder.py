"""The decoder: layers over a residual stream, and the model `K3` (report §2, Figure 2).

A layer is attention (KDA or MLA) and a feed-forward network (dense or LatentMoE), each reading a mix of the
stream's sources. `K3` knows packed tokens, states and losses; it knows nothing of optimizers, data or ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from openk3.config import ModelConfig
from openk3.errors import InvalidInput
from openk3.model.ffn import GatedFfn, activation_of
from openk3.model.kda import KdaAttention
from openk3.model.layers import At, Embedding, Linear, RmsNorm
from openk3.model.mla import MlaAttention
from openk3.model.moe import LatentMoe
from openk3.model.mtp import MtpLayer
from openk3.model.protocols import LOCAL, Seams
from openk3.model.record import ForwardRecord
from openk3.model.residual import Stream, enter, leave, opens_block
from openk3.model.state import DecodeState, KdaState, LayerState, MlaState
from openk3.ops.cross_entropy import linear_cross_entropy
from openk3.ops.precision import wide

Tensor = torch.Tensor


class DecoderLayer(nn.Module):
    """Layer `index` (0-based): stream to stream."""

    def __init__(self, config: ModelConfig, index: int, seams: Seams, at: At) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.index = index
        self.opens = opens_block(config.attn_res, 2 * index), opens_block(config.attn_res, 2 * index + 1)
        self.input_layernorm = RmsNorm(d, eps, at)
        self.post_attention_layernorm = RmsNorm(d, eps, at)
        mixes = config.attn_res.kind != "none"
        self.self_attention_res_norm = RmsNorm(d, eps, at) if mixes else None
        self.self_attention_res_proj = Linear(d, 1, at) if mixes else None
        self.mlp_res_norm = RmsNorm(d, eps, at) if mixes else None
        self.mlp_res_proj = Linear(d, 1, at) if mixes else None
        self.self_attn: MlaAttention | KdaAttention
        if config.is_mla(index):
            assert config.mla is not None  # ModelConfig checked it
            self.self_attn = MlaAttention(d, config.mla, seams, at)
        else:
            assert config.kda is not None
            self.self_attn = KdaAttention(d, config.kda, eps, seams, at)
        if config.is_moe(index):
            assert config.moe is not None
            self.block_sparse_moe = LatentMoe(config, config.moe, index, seams, at)
        else:
            self.mlp = GatedFfn(d, config.dense_width, activation_of(config.activation), at)
        self.sparse = config.is_moe(index)

    def forward(
        self,
        stream: Stream,
        cu_seqlens: Tensor,
        state: LayerState | None = None,
        record: ForwardRecord | None = None,
    ) -> tuple[Stream, LayerState]:
        """One layer over packed tokens. Returns the stream after it and this layer's new decoding state."""
        name = f"layers.{self.index}"
        mixing = self.self_attention_res_proj, self.self_attention_res_norm, self.input_layernorm
        stream, h = enter(stream, *mixing, f"{name}.attn", record)
        stream = stream.opened() if self.opens[0] else stream
        attended, new_state = self._attend(h, cu_seqlens, state, record)
        stream = stream.awaiting(attended)

        mixing = self.mlp_res_proj, self.mlp_res_norm, self.post_attention_layernorm
        stream, h = enter(stream, *mixing, f"{name}.mlp", record)
        stream = stream.opened() if self.opens[1] else stream
        return stream.awaiting(self.block_sparse_moe(h, record) if self.sparse else self.mlp(h)), new_state

    def _attend(
        self, x: Tensor, cu_seqlens: Tensor, state: LayerState | None, record: ForwardRecord | None
    ) -> tuple[Tensor, LayerState]:
        if isinstance(self.self_attn, MlaAttention):
            assert not isinstance(state, KdaState)
            out, latents, max_logit = self.self_attn(x, cu_seqlens, state, want_max_logit=record is not None)
            if record is not None and max_logit is not None:
                record.max_logit[self.index] = max_logit
            return out, latents
        assert not isinstance(state, MlaState)
        out, recurrent = self.self_attn(x, cu_seqlens, state)
        if record is not None and record.detail:
            record.state_norm[self.index] = recurrent.S.detach().norm(dim=(-2, -1)).mean(0)
        return out, recurrent


@dataclass(frozen=True)
class Output:
    """`hidden`: `[T, d]` after the final norm, what the head reads. `mixed`: `[T, d]` before it, what MTP
    reads."""

    hidden: Tensor
    mixed: Tensor
    state: DecodeState | None


@dataclass(frozen=True)
class Loss:
    """Sums over tokens, so that any set of micro-batches adds up: divide by counts summed over the whole
    step.

    Attributes:
        total: scalar to differentiate: next-token sum plus the weighted MTP sum.
        next_token, mtp: scalar sums of negative log-likelihood in nats; `mtp` is None without that layer.
        count, mtp_count: int64 scalars, tokens with a target for each: a sequence's first has none for MTP.
    """

    total: Tensor
    next_token: Tensor
    mtp: Tensor | None
    mtp_count: Tensor | None
    count: Tensor


class K3(nn.Module):
    """The text model.

    Args:
        config: its shape.
        dtype: of weights and activations; what the report keeps in higher precision stays at least fp32.
        device: where weights are allocated ("meta" allocates nothing). They are NaN until `model.init` or a
            checkpoint fills them.
        seams: who dispatches experts, supplies a sequence's past and hears of saved tensors; local by
            default.
        recompute: keep only each layer's input for the backward and run the layer again there (§5.2.2).
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        seams: Seams = LOCAL,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.recompute = recompute
        self.seams = seams
        at = At(dtype, torch.device(device) if device is not None else None)
        d, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = Embedding(config.vocab_size, d, at)
        self.layers = nn.ModuleList(DecoderLayer(config, i, seams, at) for i in range(config.num_layers))
        mixes = config.attn_res.kind != "none"
        self.output_attn_res_norm = RmsNorm(d, eps, at) if mixes else None
        self.output_attn_res_proj = Linear(d, 1, at) if mixes else None
        self.norm = RmsNorm(d, eps, at)
        self.lm_head = None if config.tie_embeddings else Linear(d, config.vocab_size, at)
        self.mtp = MtpLayer(config, seams, at) if config.mtp_layers else None

    @property
    def device(self) -> torch.device:
        """Where tokens go in and logits come out."""
        return self.embed_tokens.weight.device

    @property
    def head_weight(self) -> Tensor:
        """`[V, d]`, the embedding itself when tied."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor,
        *,
        state: DecodeState | None = None,
        record: ForwardRecord | None = None,
    ) -> Output:
        """Packed tokens through the decoder.

        Args:
            tokens: int64 `[T]`, each in `[0, vocab_size)`.
            cu_seqlens: int32 `[N+1]`, `cu_seqlens[i]:cu_seqlens[i+1]` is sequence i.
            state: what earlier calls returned for the same N sequences; None starts them.
            record: what the trainer wants to know of this pass.

        Raises:
            InvalidInput: shapes, borders or token ids are wrong.
        """
        check_packed(tokens, cu_seqlens, self.config.vocab_size, state)
        stream = Stream((), self.embed_tokens(tokens))
        states: list[LayerState] = []
        for index, layer in enumerate(self.layers):
            stream, new = self._run(layer, stream, cu_seqlens, state.layers[index] if state else None, record)
            states.append(new)
        mixing = self.output_attn_res_proj, self.output_attn_res_norm, self.norm
        hidden, mixed = leave(stream, *mixing, "output", record)
        lengths = cu_seqlens.diff() + (state.lengths if state else 0)
        return Output(hidden, mixed, DecodeState(tuple(states), lengths))

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits of `hidden` `[M, d]`: `[M, V]`, at least fp32."""
        return F.linear(hidden, self.head_weight).to(wide(hidden.dtype))

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        cu_seqlens: Tensor,
        *,
        mtp_weight: float = 0.0,
        record: ForwardRecord | None = None,
    ) -> Loss:
        """Negative log-likelihood of `targets` (int64 `[T]`, -100 where there is none), as sums over
        tokens."""
        out = self(tokens, cu_seqlens, record=record)
        next_token, count = linear_cross_entropy(out.hidden, self.head_weight, targets)
        if self.mtp is None or not mtp_weight:
            return Loss(next_token, next_token, None, None, count)
        embedded = self.embed_tokens(tokens)
        further, further_targets = self._run(self.mtp, embedded, out.mixed, targets, cu_seqlens, record)
        mtp, mtp_count = linear_cross_entropy(further, self.head_weight, further_targets)
        return Loss(next_token + mtp_weight * mtp, next_token, mtp, mtp_count, count)

    def _run(self, layer: nn.Module, *inputs: Any) -> Any:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)
        return layer(*inputs)


def check_packed(tokens: Tensor, cu_seqlens: Tensor, vocabulary: int, state: DecodeState | None) -> None:
    """What a model demands of its tokens.

    Shapes everywhere; values only on the CPU, since another device would have to be read back.

    Raises:
        InvalidInput: shapes, borders or token ids are wrong.
    """
    if tokens.ndim != 1 or tokens.dtype != torch.int64:
        raise InvalidInput(f"K3: tokens must be int64 [T], got {tokens.dtype} {tuple(tokens.shape)}")
    if cu_seqlens.ndim != 1 or cu_seqlens.dtype != torch.int32 or cu_seqlens.shape[0] < 1:
        raise InvalidInput(
            f"K3: cu_seqlens must be int32 [N+1], got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        )
    if state is not None and state.lengths.shape[0] != cu_seqlens.shape[0] - 1:
        raise InvalidInput(
            f"K3: the state is of {state.lengths.shape[0]} sequences, cu_seqlens of {cu_seqlens.shape[0] - 1}"
        )
    if tokens.device.type != "cpu" or cu_seqlens.device.type != "cpu":
        return
    lowest, highest = tokens.aminmax() if len(tokens) else (0, 0)
    if int(lowest) < 0 or int(highest) >= vocabulary:
        at = int(((tokens < 0) | (tokens >= vocabulary)).nonzero()[0])
        raise InvalidInput(
            f"K3: token {int(tokens[at])} at position {at} is outside the vocabulary of {vocabulary}"
        )
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or any(end < start for start, end in pairwise(bounds)):
        raise InvalidInput(f"K3: cu_seqlens must start at 0 and not decrease, got {bounds}")
    if bounds[-1] != tokens.shape[0]:
        raise InvalidInput(f"K3: cu_seqlens ends at {bounds[-1]}, but there are {tokens.shape[0]} tokens")
