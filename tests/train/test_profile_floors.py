"""Floors against what the model itself reads, writes and multiplies."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from tiny_run import tiny_config

from openk3.config import ModelConfig, preset
from openk3.model import K3, ForwardRecord, initialise
from openk3.model import kda as kda_module
from openk3.model import residual as residual_module
from openk3.optim import OptimConfig
from openk3.train.flops import model_flops
from openk3.train.profile import parts, predict
from openk3.train.profile.floors import Cost, MicroBatch, Parameter, model_costs, update_costs
from openk3.train.profile.made import MadeDocuments, made_data
from openk3.train.profile.measure import _parameters
from openk3.train.profile.peaks import Peaks, known_peaks, probe

LENGTHS = (40, 1, 23)


def changed(config: ModelConfig, **tables: dict[str, Any]) -> ModelConfig:
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=fields) for name, fields in tables.items()}
    )


def variants() -> dict[str, ModelConfig]:
    nano = preset("nano")
    return {
        **{name: preset(name) for name in ("nano", "micro", "r1", "1b", "linear-48b", "k3")},
        "mtp": nano.model_copy(update={"mtp_layers": 1}),
        "untied": nano.model_copy(update={"tie_embeddings": False}),
        "plain experts": changed(nano, moe={"latent_width": None, "latent_norm": False}),
        "low rank": changed(nano, kda={"output_gate": "low_rank"}, mla={"q_lora_rank": 48, "gated": False}),
        "full": changed(nano, attn_res={"kind": "full"}),
        "no mixing": changed(nano, attn_res={"kind": "none"}),
    }


@pytest.mark.parametrize("name", variants())
def test_operations_of_the_parts_sum_to_those_of_the_model_exactly(name):
    config = variants()[name]
    mtp = bool(config.mtp_layers)
    batches = [MicroBatch(LENGTHS, 50), MicroBatch((7,), 7)]
    costs = model_costs(config, batches, size=2, mtp=mtp)
    assert sum(cost.flops for cost in costs.values()) == model_flops(config, [*LENGTHS, 7], mtp=mtp).total
    assert {part for part, _ in costs} <= set(parts.MODEL_PARTS)


@pytest.mark.parametrize("name", variants())
def test_a_step_without_tokens_reads_every_weight_once(name):
    """All but routed experts, of which none is chosen, and the look-up's table, of which no row is."""
    config = variants()[name]
    costs = model_costs(config, [MicroBatch((), 0)], size=4, mtp=bool(config.mtp_layers))
    unread = (".experts.",) if config.tie_embeddings else (".experts.", "embed_tokens")
    read = sum(
        p.numel()
        for name, p in K3(config, device="meta").named_parameters()
        if not any(word in name for word in unread)
    )
    if config.attn_res.kind != "none":
        read -= 2 * config.hidden_size  # of the first mix, which has one source
    if config.mtp_layers:
        read += config.vocab_size * config.hidden_size  # the head predicts twice
    forward = sum(cost.bytes for (_, phase), cost in costs.items() if phase == "forward")
    assert forward == 4 * read


def bytes_of(value: Any) -> int:
    """Of all floating tensors in arguments or results."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size() if value.is_floating_point() else 0
    if isinstance(value, dict):
        return sum(map(bytes_of, value.values()))
    return sum(map(bytes_of, value)) if isinstance(value, (list, tuple)) else 0


@pytest.mark.parametrize("kind", ["block", "full"])
def test_what_operators_read_and_write_is_what_the_model_hands_them(monkeypatch, kind):
    config = changed(preset("nano"), attn_res={"kind": kind})
    moved: Counter[str] = Counter()

    def watched(module: Any, name: str, results: Any = lambda out: out) -> None:
        operator = getattr(module, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            out = operator(*args, **kwargs)
            moved[name] += bytes_of(args) + bytes_of(kwargs) + bytes_of(results(out))
            return out

        monkeypatch.setattr(module, name, run)

    watched(kda_module, "short_conv", lambda out: out[0])
    watched(kda_module, "gated_rms_norm")
    unsummed: list[int] = []
    mix = residual_module.attnres_add_mix_norm

    def mixing(bank: Any, prefix: Any, output: Any, *rest: Any, **kwargs: Any) -> Any:
        out = mix(bank, prefix, output, *rest, **kwargs)
        # Without an output nothing is summed, and the prefix is none of the results.
        results = (out.normed, out.prefix) if output is not None else (out.normed,)
        moved["mix"] += bytes_of([*bank, prefix, output, *rest]) + bytes_of(results)
        unsummed.append(output is None)
        return out

    monkeypatch.setattr(residual_module, "attnres_add_mix_norm", mixing)
    model = K3(config)
    initialise(model, 0)
    tokens = torch.randint(config.vocab_size, (sum(LENGTHS),))
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    model.loss(tokens, tokens, cu, record=ForwardRecord())

    costs = model_costs(config, [MicroBatch(LENGTHS, 9)], size=4)
    assert costs[parts.KDA_CONVOLUTION, "forward"].bytes == moved["short_conv"]
    assert costs[parts.KDA_NORM, "forward"].bytes == moved["gated_rms_norm"]
    assert costs[parts.ATTNRES, "forward"].bytes == moved["mix"]
    assert any(unsummed)


def test_a_product_moves_its_operands_and_gradients_once():
    """The dense network of one layer: x and y, three weights; then x, dy, dx and the weights twice."""
    config = preset("nano")
    d, F, T = config.hidden_size, config.dense_width, sum(LENGTHS)
    costs = model_costs(config, [MicroBatch(LENGTHS, 9)], size=2)
    assert costs[parts.DENSE, "forward"] == Cost(2 * (2 * T * d + 3 * d * F), 2 * T * 3 * d * F)
    assert costs[parts.DENSE, "backward"] == Cost(
        2 * (3 * T * d + 3 * d * F) + 4 * 3 * d * F, 4 * T * 3 * d * F
    )


def test_attention_reads_shared_keys_once_and_its_backward_the_output_again():
    config = preset("nano")
    mla, T = config.mla, sum(LENGTHS)
    q = mla.num_heads * mla.qk_head_dim
    kv = mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim) + mla.qk_rope_head_dim
    out = mla.num_heads * mla.v_head_dim
    costs = model_costs(config, [MicroBatch(LENGTHS, 9)], size=2)
    assert costs[parts.MLA_ATTENTION, "forward"].bytes == 2 * T * (q + kv + out)
    assert costs[parts.MLA_ATTENTION, "backward"].bytes == 2 * T * (2 * (q + kv) + 2 * out)


def test_the_update_moves_state_and_masters_and_publishes_copies():
    matrix, vector = Parameter(6 * 4, [(2, 4), (4, 4)]), Parameter(10)
    costs = update_costs([matrix, vector], micro_batches=3, iterations=5, copy_size=2, direction_size=2)
    # Gradient 4, momentum 8, master 8, copy 2, direction written and read 4; and 4 + 16 + 8 + 2 with AdamW.
    assert costs[parts.UPDATE, "step"].bytes == 24 * 26 + 10 * 30
    assert costs[parts.CLIPPING, "step"].bytes == 34 * 4
    assert costs[parts.GRADIENT_SUMS, "step"].bytes == 2 * 34 * 4
    # X X^T and its square by their halves, and the third product: 2 x 4 and 4 x 4.
    each = (2 * 2 * 4 + 2**3 + 2 * 2 * 2 * 4) + (4 * 4 * 4 + 4**3 + 2 * 4 * 4 * 4)
    assert costs[parts.NEWTON_SCHULZ, "step"] == Cost(24 * 4, 5 * each)


def test_parameters_are_those_of_the_model_and_blocks_cover_matrices():
    config = preset("nano")
    found = _parameters(config, OptimConfig())
    assert sum(p.elements for p in found) == sum(p.numel() for p in K3(config, device="meta").parameters())
    with_blocks = [p for p in found if p.blocks]
    assert with_blocks
    assert all(sum(math.prod(block) for block in p.blocks) == p.elements for p in with_blocks)
    assert not any(p.blocks for p in _parameters(config, OptimConfig(optimizer="adamw")))


def test_a_floor_is_the_longer_of_both_times():
    best = Peaks(bandwidth=10.0, flops=100.0, source="")
    assert best.floor(20, 100) == 2.0
    assert best.floor(20, 300) == 3.0


def test_figures_are_known_by_device_and_dtype_or_measured():
    assert known_peaks("NVIDIA H200", torch.bfloat16).flops == 693e12
    assert known_peaks("NVIDIA H200", torch.float32) is None
    assert known_peaks("CPU", torch.bfloat16) is None
    measured = probe(torch.device("cpu"), torch.float32, seconds=0.0)
    assert measured.bandwidth > 1e6
    assert measured.flops > 1e6
    assert "measured now" in measured.source


def test_a_prediction_has_the_floors_of_a_step_and_no_time():
    config = tiny_config(train={"precision": "bf16"})
    found = predict(config, "tiny", "H200")
    assert found.measured is None
    assert found.tokens == config.train.step_tokens
    assert all(item.seconds is None for item in found.items)
    model = sum(item.flops for item in found.items if item.part in parts.MODEL_PARTS)
    assert model == found.model_flops
    assert found == predict(config, "tiny", "H200")


def test_made_documents_fill_the_steps_with_tokens_of_the_vocabulary_some_often_and_most_rarely():
    config = tiny_config()
    sample = made_data(config, 2).stream.sample(0)
    assert len(sample.tokens) == config.train.context
    documents = MadeDocuments(50_000, 30_000, seed=1)
    tokens = torch.from_numpy(documents.tokens(0).astype("int64"))
    assert int(documents.lengths.sum()) >= 30_000
    assert len(tokens) == documents.lengths[0]
    assert int(tokens.max()) < 50_000
    half = (tokens < 50_000**0.5 - 1).double().mean()  # as many draws are below the root as above it
    assert abs(float(half) - 0.5) < 5 * 0.5 / len(tokens) ** 0.5
