"""Model FLOPs against an operation counter on the real model, and against brute force."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from openk3.config import ModelConfig, preset
from openk3.model import K3, initialise
from openk3.model.sizes import count
from openk3.ops.attention import attention
from openk3.ops.kda import kda
from openk3.train.flops import model_flops, peak_flops, weights_per_token

LENGTHS = [40, 1, 23]


def _grouped_mm(left: Any, right: Any, *_: Any, **__: Any) -> int:
    """2 rows x columns x inner of the products of rows with an expert's matrix, and of two sets of rows."""
    if len(right) == 3:  # [R, K] x [E, K, N]
        return 2 * left[0] * left[1] * right[2]
    return 2 * left[0] * left[1] * right[1]  # [M, R] x [R, N], summed over the experts' shares of R


def _addmm_(_: Any, left: Any, right: Any, **__: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


# Products that torch's counter has no rule for.
UNKNOWN_TO_TORCH = {torch.ops.aten._grouped_mm: _grouped_mm, torch.ops.aten.addmm_: _addmm_}


def counted(run: Any) -> Counter[str]:
    with FlopCounterMode(display=False, custom_mapping=UNKNOWN_TO_TORCH) as counter:
        run()
    return Counter({str(op): n for op, n in counter.get_flop_counts()["Global"].items()})


def packed(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def with_weights(ops: Counter[str], config: ModelConfig, moe_layers: int) -> int:
    """The products with weights that the model asks for: all of `mm` but what experts make a second time.

    `aten.mm`, `addmm_` and `_grouped_mm` are products with weights and only those; attention and the KDA
    chunks are batched products (`aten.bmm`). The experts' backward computes gate and up again instead of
    keeping them, and recompute does not count.
    """
    width = config.moe.latent_width or config.hidden_size
    rows = sum(LENGTHS) * config.moe.experts_per_token
    again = moe_layers * 2 * 2 * rows * width * config.moe.expert_width
    return ops["aten.mm"] + ops["aten.addmm_"] + ops["aten._grouped_mm"] - again


def variants() -> dict[str, ModelConfig]:
    nano = preset("nano")
    plain = nano.moe.model_copy(update={"latent_width": None, "latent_norm": False, "expert_width": 32})
    return {
        "nano": nano,
        "untied": nano.model_copy(update={"tie_embeddings": False}),
        "plain experts": nano.model_copy(update={"moe": plain}),
        "low-rank and lora": nano.model_copy(
            update={
                "kda": nano.kda.model_copy(update={"output_gate": "low_rank"}),
                "mla": nano.mla.model_copy(update={"q_lora_rank": 48, "gated": False}),
            }
        ),
    }


@pytest.mark.parametrize("name", variants())
def test_products_with_weights_equal_the_operation_counter_exactly(name):
    config = variants()[name]
    model = K3(config)
    initialise(model, 0)
    tokens = torch.randint(0, config.vocab_size, (sum(LENGTHS),))

    ops = counted(lambda: model.loss(tokens, tokens, packed(LENGTHS)).total.backward())

    assert with_weights(ops, config, moe_layers=3) == model_flops(config, LENGTHS).weights


def test_the_mtp_layer_counts_its_projection_its_layer_and_the_head_again():
    config = preset("nano").model_copy(update={"mtp_layers": 1})
    model = K3(config)
    initialise(model, 0)
    tokens = torch.randint(0, config.vocab_size, (sum(LENGTHS),))

    ops = counted(lambda: model.loss(tokens, tokens, packed(LENGTHS), mtp_weight=0.1).total.backward())

    # The head skips the tokens that have no MTP target: the first of each sequence.
    skipped = 6 * config.hidden_size * config.vocab_size * len(LENGTHS)
    assert with_weights(ops, config, moe_layers=4) == model_flops(config, LENGTHS, mtp=True).weights - skipped


def test_attention_counts_each_allowed_pair_once():
    """The reference multiplies the full square; of n^2 pairs n (n + 1) / 2 are allowed."""
    config = preset("nano")
    n, H = 24, config.mla.num_heads
    q, k = (torch.randn(n, H, config.mla.qk_head_dim) for _ in range(2))
    v = torch.randn(n, H, config.mla.v_head_dim)
    cu = packed([n])
    ops = counted(lambda: attention(q, k, v, cu, cu, implementation="reference"))

    square = sum(ops.values())
    layers = len(config.mla_layer_numbers)
    assert model_flops(config, [n]).attention == 3 * layers * square * (n + 1) // (2 * n)


def test_recurrence_counts_the_three_products_of_the_report():
    config = preset("nano")
    n, H, K = 5, config.kda.num_heads, config.kda.head_dim
    q, k, v, g = (torch.randn(n, H, K) for _ in range(4))
    beta = torch.rand(n, H)
    ops = counted(lambda: kda(q, k, v, -g.abs(), beta, packed([n]), implementation="reference"))

    # The counter sees S^T k and S^T q; the rank-one update, as large as each, is no product of matrices.
    kda_layers = config.num_layers - len(config.mla_layer_numbers)
    assert model_flops(config, [n]).recurrence == 3 * kda_layers * sum(ops.values()) * 3 // 2


@pytest.mark.parametrize("name", ["nano", "micro", "r1", "1b", "k3", "linear-48b"])
def test_weights_per_token_are_the_active_parameters_less_vectors_and_look_up(name):
    """Two independent counts: closed form here, the tensors of the meta model there."""
    config = preset(name)
    model = K3(config, device="meta")
    tensors = [*model.named_parameters(), *model.named_buffers()]
    no_product = ("conv1d.weight", "res_proj.weight")  # taps, and pseudo-queries that meet sources
    left_out = sum(t.numel() for name, t in tensors if t.ndim == 1 or name.endswith(no_product))
    assert weights_per_token(config) == count(config).active_without_lookup - left_out


def test_a_token_is_in_no_pair_with_another_sequence():
    config = preset("nano")
    together, apart = model_flops(config, [64]), model_flops(config, [32, 32])
    assert together.weights == apart.weights
    assert together.recurrence == apart.recurrence
    assert together.attention * (32 * 33) == apart.attention * (32 * 65)


def test_peaks_are_known_by_device_name_and_unknown_otherwise():
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("some processor") is None
