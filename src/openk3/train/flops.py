"""Floating-point operations that a model needs, and the share of a device's peak they make (MFU).

The definition, so that numbers compare: forward and backward of what the architecture asks for, a
multiply-add as two operations, nothing for recompute, element-wise work, convolutions or the AttnRes
scores.

* products with weights: 6 per parameter and token. The head counts (once per prediction it makes, so twice
  with an MTP layer), the embedding look-up is free, of routed experts only the chosen ones count, router and
  latent projections in full;
* causal attention: each allowed query-key pair once, exactly, 2 (D_qk + D_v) per head forward;
* KDA: the recurrence of report eq. 1, whatever form computes it: S^T k, the rank-one update and S^T q, each
  2 K V per head and token forward.

Knows shapes only: no torch, no measuring.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from openk3.config import KdaConfig, MlaConfig, ModelConfig, MoeConfig

PEAK_FLOPS = {"H200": 989e12}
"""Dense bf16 operations per second, by a word of the device's name."""

TRAINING = 3
"""The backward of a product is two products of its size."""


@dataclass(frozen=True)
class ModelFlops:
    """Operations to train on some sequences, by kind."""

    weights: int
    attention: int
    recurrence: int

    @property
    def total(self) -> int:
        return self.weights + self.attention + self.recurrence


def model_flops(config: ModelConfig, sequence_lengths: Iterable[int], *, mtp: bool = False) -> ModelFlops:
    """Operations of one forward and backward over sequences of these lengths; `mtp`: its layer is trained."""
    lengths = list(sequence_lengths)
    tokens, pairs = sum(lengths), sum(n * (n + 1) // 2 for n in lengths)
    mla = sum(config.is_mla(i) for i in range(config.num_layers)) + mtp
    attention = 0
    if config.mla is not None:
        heads, dims = config.mla.num_heads, config.mla.qk_head_dim + config.mla.v_head_dim
        attention = mla * heads * 2 * dims * pairs
    recurrence = 0
    if config.kda is not None:
        layers = sum(not config.is_mla(i) for i in range(config.num_layers))
        recurrence = layers * config.kda.num_heads * 6 * config.kda.head_dim**2 * tokens
    return ModelFlops(
        weights=TRAINING * 2 * weights_per_token(config, mtp=mtp) * tokens,
        attention=TRAINING * attention,
        recurrence=TRAINING * recurrence,
    )


def weights_per_token(config: ModelConfig, *, mtp: bool = False) -> int:
    """Weights that a token is multiplied with: what "active parameters" means for arithmetic."""
    d = config.hidden_size
    head = d * config.vocab_size
    total = head
    for i in range(config.num_layers):
        total += mla_weights(config.mla, d) if config.is_mla(i) else kda_weights(config.kda, d)
        total += moe_weights(config.moe, d) if config.is_moe(i) else 3 * d * config.dense_width
    if mtp:
        total += 2 * d * d + mla_weights(config.mla, d) + moe_weights(config.moe, d) + head
    return total


def peak_flops(device_name: str) -> float | None:
    """Peak of the device with this name, operations per second; None where no figure is known."""
    return next((peak for word, peak in PEAK_FLOPS.items() if word in device_name), None)


def kda_weights(kda: KdaConfig | None, d: int) -> int:
    """Of one KDA layer, each used by every token."""
    assert kda is not None  # ModelConfig checked it for every layer that asks
    H, K = kda.num_heads, kda.head_dim
    qkv_and_output, decay, beta = 4 * d * H * K, d * K + K * H * K, d * H
    output_gate = d * H * K if kda.output_gate == "full" else d * K + K * H * K
    return qkv_and_output + decay + beta + output_gate


def mla_weights(mla: MlaConfig | None, d: int) -> int:
    """Of one MLA layer."""
    assert mla is not None
    H, r = mla.num_heads, mla.kv_lora_rank
    queries = H * mla.qk_head_dim
    query = d * queries if mla.q_lora_rank is None else mla.q_lora_rank * (d + queries)
    latent = d * (r + mla.qk_rope_head_dim) + r * H * (mla.qk_nope_head_dim + mla.v_head_dim)
    output = d * H * mla.v_head_dim
    return query + latent + output * (2 if mla.gated else 1)


def moe_weights(moe: MoeConfig | None, d: int) -> int:
    """Of one expert layer, shared experts included: those that a token uses."""
    assert moe is not None
    width = moe.latent_width or d
    projections = 2 * d * width if moe.latent_width is not None else 0
    routed = moe.experts_per_token * 3 * width * moe.expert_width
    shared = moe.num_shared_experts * 3 * d * moe.expert_width
    return d * moe.num_experts + projections + routed + shared
