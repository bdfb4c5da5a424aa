"""Small random models that openk3 and its peers both run: ten of each form, with weights that hide nothing.

A switch is dealt like a deck of cards, so that each of its values occurs among the ten; sizes are drawn.
"""

from __future__ import annotations

import random
from typing import TypeVar

import torch

from openk3.config import (
    ActivationConfig,
    AttnResConfig,
    KdaConfig,
    MlaConfig,
    ModelConfig,
    MoeConfig,
)
from openk3.model import K3

Tensor = torch.Tensor
Value = TypeVar("Value")

SEEDS = range(10)


def dealt(switch: str, seed: int, *values: Value) -> Value:
    """The value of `switch` in configuration `seed`: over all seeds each value occurs, equally often."""
    deck = [values[i % len(values)] for i in SEEDS]
    random.Random(switch).shuffle(deck)
    return deck[seed]


def kimi_linear(seed: int) -> ModelConfig:
    """A model of the Kimi-Linear form with both kinds of attention, which the peers need."""
    r = random.Random(seed)
    layers = r.randint(2, 6)
    experts = dealt("experts", seed, "bf16", "mxfp4")
    return ModelConfig(
        vocab_size=r.randint(50, 400),
        hidden_size=r.choice([32, 64, 96] if experts == "mxfp4" else [24, 40, 64]),
        num_layers=layers,
        mla_layers=tuple(sorted(r.sample(range(1, layers + 1), r.randint(1, layers - 1)))),
        kda=KdaConfig(
            num_heads=r.randint(1, 5),
            head_dim=r.choice([8, 12, 16, 32]),
            conv_width=dealt("conv", seed, 4, 4, 3, 2),
            gate="softplus",
            output_gate="low_rank",
        ),
        mla=_mla(r, q_lora_rank=None, gated=False),
        moe=_moe(
            r,
            seed,
            num_shared_experts=r.randint(1, 2),
            expert_width=r.choice([32, 64] if experts == "mxfp4" else [16, 24, 40]),
            latent_norm=False,
        ),
        dense_layers=dealt("dense layers", seed, 0, 1, 1, 2),
        dense_width=r.choice([24, 56]),
        activation=ActivationConfig(kind="swiglu"),
        attn_res=AttnResConfig(kind="none"),
        rms_norm_eps=dealt("norm eps", seed, 1e-5, 1e-3),
        expert_format=experts,
    )


def k3(seed: int) -> ModelConfig:
    """A model of the K3 form, or between the forms: every switch that the released layout can say."""
    r = random.Random(100 + seed)
    layers = r.randint(2, 7)
    kda_layers = dealt("layer kinds", seed, "report", "some", "some", "none", "all")
    latent = dealt("latent", seed, True, True, False)
    return ModelConfig(
        vocab_size=r.randint(50, 400),
        hidden_size=r.choice([32, 64, 96]),
        num_layers=layers,
        mla_layers={
            "report": None,
            "some": tuple(sorted(r.sample(range(1, layers + 1), r.randint(1, layers - 1)))),
            "none": tuple(range(1, layers + 1)),
            "all": (),
        }[kda_layers],
        kda=KdaConfig(
            num_heads=r.randint(1, 5),
            head_dim=r.choice([8, 12, 16, 32]),
            conv_width=dealt("conv", seed, 4, 4, 3, 2),
            gate=dealt("gate", seed, "bounded", "bounded", "softplus"),
            gate_lower_bound=dealt("bound", seed, -5.0, -0.5, -2.0),
            output_gate=dealt("output gate", seed, "full", "full", "low_rank"),
        ),
        mla=_mla(
            r,
            q_lora_rank=dealt("query latent", seed, 12, 20, None),
            gated=dealt("gated", seed, True, True, False),
        ),
        moe=_moe(
            r,
            seed,
            num_shared_experts=dealt("shared experts", seed, 0, 1, 2),
            expert_width=r.choice([32, 64]),
            latent_width=r.choice([32, 64]) if latent else None,
            latent_norm=latent and dealt("latent norm", seed, True, True, False),
        ),
        dense_layers=dealt("dense layers", seed, 0, 1, 1, 2),
        dense_width=r.choice([24, 56]),
        activation=ActivationConfig(
            gate_cap=dealt("gate cap", seed, 4.0, 1.0), up_cap=dealt("up cap", seed, 25.0, 1.5)
        ),
        attn_res=AttnResConfig(kind="block", block_size=dealt("block", seed, 1, 2, 3, 12))
        if dealt("residuals", seed, True, True, True, True, False)
        else AttnResConfig(kind="none"),
        rms_norm_eps=dealt("norm eps", seed, 1e-5, 1e-3),
        tie_embeddings=dealt("tied", seed, False, False, True),
        expert_format=dealt("experts", seed, "bf16", "mxfp4"),
    )


def _mla(r: random.Random, *, q_lora_rank: int | None, gated: bool) -> MlaConfig:
    return MlaConfig(
        num_heads=r.randint(1, 5),
        q_lora_rank=q_lora_rank,
        kv_lora_rank=r.choice([8, 20, 32]),
        qk_nope_head_dim=r.choice([8, 12, 16]),
        qk_rope_head_dim=r.choice([4, 8]),
        v_head_dim=r.choice([8, 12, 20]),
        gated=gated,
    )


def _moe(r: random.Random, seed: int, **fields: object) -> MoeConfig:
    """Two experts per token at least: whether the weight of a single one is normalised, peers disagree."""
    return MoeConfig.model_validate(
        {
            "num_experts": r.choice([5, 8, 12]),
            "experts_per_token": r.randint(2, 4),
            "renormalize": dealt("renormalise", seed, True, True, False),
            "routed_scaling": dealt("scaling", seed, 1.0, 2.446),
            "balancing": "none",
            **fields,
        }
    )


def random_model(config: ModelConfig, seed: int) -> K3:
    """A BF16 model, fp32 where the release has it, whose logits are of order one.

    Nothing is neutral: gains differ from one, queries and biases from zero, decays spread from none to
    forgetting at once, and some keys, queries and latents are so small that the eps of their norms counts.
    """
    model = K3(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor.copy_(_values(name, tuple(tensor.shape), config, generator))
    return model


def in_fp32(model: K3) -> K3:
    """The same weights, computing in fp32."""
    twin = K3(model.config, dtype=torch.float32)
    twin.load_state_dict(model.state_dict())
    return twin


# With these a rounding does not grow from layer to layer: in fp32 either side stays within 2e-5 of float64.
_GAINS = [
    ("lm_head", 1.0),
    (".gate.", 2.0),
    ("_res_proj", 0.3),
    ("o_proj", 0.6),
    ("down_proj.weight", 0.6),
    ("experts.w2", 0.6),
    ("routed_expert_up_proj", 0.6),
]
"""Standard deviation of a matrix's outputs for inputs of deviation one; 0.8 where none is named."""


def _values(name: str, shape: tuple[int, ...], config: ModelConfig, generator: torch.Generator) -> Tensor:
    def uniform(low: float, high: float) -> Tensor:
        return torch.empty(shape).uniform_(low, high, generator=generator)

    def normal(std: float) -> Tensor:
        return torch.empty(shape).normal_(0, std, generator=generator)

    if "norm" in name:
        return uniform(0.5, 1.5)
    if name.endswith("A_log"):
        return uniform(-1, 2)
    if name.endswith("dt_bias"):
        return uniform(-5, 1)
    if name.endswith("e_score_correction_bias"):
        return normal(0.1)
    if "conv1d" in name:
        taps = uniform(-1, 1)
        taps[shape[0] // 2 :] *= 1 if ".v_conv1d" in name else 0.01
        return taps
    if name.startswith("embed_tokens"):
        return normal(shape[1] ** -0.5 if config.tie_embeddings else 1)
    gain = next((gain for pattern, gain in _GAINS if pattern in name), 0.8)
    matrix = normal(gain * shape[-1] ** -0.5)
    if name.endswith("q_a_proj.weight"):
        matrix *= 0.03
    if name.endswith("kv_a_proj_with_mqa.weight"):
        assert config.mla is not None
        matrix[: config.mla.kv_lora_rank] *= 0.03
    return matrix
