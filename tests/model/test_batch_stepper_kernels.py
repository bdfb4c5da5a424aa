"""Decoding with every operator's kernel, through Triton's interpreter, against the whole forward."""

from __future__ import annotations

import pytest
import torch

from model.test_batch_stepper import largest_error
from model.tiny import built, changed
from openk3.config import AttnResConfig, KdaConfig, MlaConfig, MoeConfig
from openk3.ops.dispatch import triton_problem

NO_TRITON = triton_problem("cpu")
pytestmark = pytest.mark.skipif(NO_TRITON is not None, reason=str(NO_TRITON))

# The smallest sizes that the kernels take.
SMALL = changed(
    hidden_size=32,
    num_layers=3,
    mla_layers=(2,),
    kda=KdaConfig(num_heads=1, head_dim=64),
    mla=MlaConfig(num_heads=2, kv_lora_rank=64, qk_nope_head_dim=8, qk_rope_head_dim=16, v_head_dim=8),
    moe=MoeConfig(num_experts=4, experts_per_token=2, expert_width=8, latent_width=16, qb_bins=100),
    attn_res=AttnResConfig(block_size=1),
)


@pytest.mark.parametrize("rows", [1, 5], ids=["mixed in each product", "mixed before"])
def test_logits_are_those_of_the_whole_forward(rows):
    model = built(SMALL, dtype=torch.float32)
    error = largest_error(model, [3, 1, 4, 2, 5][:rows], list(range(rows)), steps=2, implementation="triton")
    assert error < 1e-4
