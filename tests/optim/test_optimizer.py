"""The optimizer as a whole: master copies, its state in a checkpoint, and what it leaves alone."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tiny_k3 import MLA_LAYER, parameters, set_gradients, tiny_config

from openk3.errors import CheckpointError, InvalidInput, TrainingDiverged
from openk3.optim import (
    OptimConfig,
    Optimizer,
    check_factors,
    clip_grad_norm,
    clip_scale,
    global_norm,
)

MODEL = tiny_config()
QUERY, KV_B = (f"layers.{MLA_LAYER}.self_attn.{part}.weight" for part in ("q_proj", "kv_b_proj"))


def optimizer_of(named, **settings):
    return Optimizer(named.items(), OptimConfig(**settings), MODEL)


def train(named, optimizer, seeds):
    for seed in seeds:
        set_gradients(named, seed=seed)
        optimizer.step(0.01)
        optimizer.zero_grad()


def snapshot(named, optimizer):
    state = {
        f"{n} {e}": t.clone() for n, entries in optimizer.state_dict().items() for e, t in entries.items()
    }
    return {**{n: p.detach().clone() for n, p in named.items()}, **state}


def assert_same(a, b):
    assert a.keys() == b.keys()
    assert [key for key in a if not torch.equal(a[key], b[key])] == []


# Masters.


def test_fp32_parameters_are_their_own_masters_and_cost_no_memory():
    named = parameters(MODEL, torch.float32)
    optimizer = optimizer_of(named)
    state = optimizer.state_dict()
    assert all("master" not in entries for entries in state.values())
    muon = sum(named[n].numel() for n, entries in state.items() if "momentum" in entries)
    adamw = sum(named[n].numel() for n, entries in state.items() if "exp_avg" in entries)
    held = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for e in state.values()
        for t in e.values()
    }
    counts = 8 * sum("step" in entries for entries in state.values())
    assert muon + adamw == sum(p.numel() for p in named.values())
    assert sum(held.values()) == 4 * (muon + 2 * adamw) + counts


def test_half_parameters_get_an_fp32_master_and_are_its_rounding():
    named = parameters(MODEL, torch.bfloat16)
    optimizer = optimizer_of(named)
    train(named, optimizer, range(3))
    for name, entries in optimizer.state_dict().items():
        if named[name].dtype == torch.float32:  # gates, convolutions: wide in a half model too
            assert "master" not in entries
        else:
            assert entries["master"].dtype == torch.float32
            assert torch.equal(named[name], entries["master"].bfloat16())
            assert not torch.equal(named[name].float(), entries["master"])


def test_updates_too_small_for_bfloat16_add_up_in_the_master():
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = Optimizer([("norm.weight", p)], OptimConfig(), MODEL)
    for _ in range(64):
        p.grad = torch.ones_like(p)
        optimizer.step(1e-3)  # a sixteenth of what bfloat16 can tell from 1
    assert torch.allclose(p.float(), torch.tensor(1 - 0.064), atol=2**-8)


def test_a_half_model_follows_the_fp32_model():
    half, full = parameters(MODEL, torch.bfloat16), parameters(MODEL, torch.float32)
    with torch.no_grad():
        for name, p in full.items():
            p.copy_(half[name])
    start = {name: p.detach().clone() for name, p in full.items()}
    for named in (half, full):
        optimizer = optimizer_of(named)
        for seed in range(3):
            set_gradients(half, seed=seed)
            for name, p in half.items():
                named[name].grad = p.grad.to(named[name].dtype)
            optimizer.step(0.01)
        state = optimizer.state_dict()
        if named is half:
            masters = {n: state[n].get("master", named[n].detach()).clone() for n in named}
    for name, p in full.items():
        assert torch.equal(masters[name], p.detach()), name
        assert not torch.equal(p.detach(), start[name])


# What is left alone.


def test_a_parameter_without_a_gradient_keeps_value_and_state():
    named = parameters(MODEL)
    optimizer = optimizer_of(named)
    train(named, optimizer, [0])
    before = snapshot(named, optimizer)
    idle = {
        "mtp.eh_proj.weight",
        "layers.0.self_attention_res_proj.weight",
        "layers.1.block_sparse_moe.experts.w1",
    }
    set_gradients(named, seed=1)
    for name in idle:
        named[name].grad = None
    optimizer.step(0.01)
    after = snapshot(named, optimizer)
    kept = {key.split()[0] for key in after if torch.equal(after[key], before[key])}
    assert kept == idle


def test_frozen_parameters_are_not_touched_and_have_no_state():
    named = parameters(MODEL)
    frozen = {name for name in named if "experts.w" in name}
    for name in frozen:
        named[name].requires_grad_(False)
    before = {name: named[name].clone() for name in frozen}
    optimizer = optimizer_of(named)
    train(named, optimizer, [0])
    assert optimizer.state_dict().keys() == named.keys() - frozen
    assert all(torch.equal(named[name], before[name]) for name in frozen)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_optimizer_is_not_copied_with_masters_that_are_no_longer_its_parameters(copied):
    with pytest.raises(InvalidInput, match="state_dict"):
        copied(optimizer_of(parameters(MODEL)))


def test_zero_grad_frees_all_gradients():
    named = parameters(MODEL)
    set_gradients(named, seed=0)
    optimizer_of(named).zero_grad()
    assert all(p.grad is None for p in named.values())


def test_a_learning_rate_of_zero_moves_nothing():
    named = parameters(MODEL)
    before = {name: p.detach().clone() for name, p in named.items()}
    set_gradients(named, seed=0)
    optimizer_of(named).step(0.0)
    assert all(torch.equal(p, before[name]) for name, p in named.items())


def test_a_parameter_of_another_model_is_an_error():
    with pytest.raises(InvalidInput, match=r"vision_tower\.x .* matches none"):
        Optimizer([("vision_tower.x", torch.nn.Parameter(torch.zeros(3)))], OptimConfig(), MODEL)


# Steps that a tensor decides.


def test_a_step_of_scaled_gradients_is_bitwise_a_clip_and_a_step():
    clipped, scaled = parameters(MODEL), parameters(MODEL)
    optimizer, other = optimizer_of(clipped), optimizer_of(scaled)
    for seed in range(2):
        for named in (clipped, scaled):
            set_gradients(named, seed=seed)
        clip_grad_norm(clipped.items(), 0.01)
        optimizer.step(0.01)
        before = {name: p.grad.clone() for name, p in scaled.items()}
        other.step(torch.tensor(0.01, dtype=torch.float64), clip_scale(global_norm(scaled.items()), 0.01))
        assert all(torch.equal(p.grad, before[name]) for name, p in scaled.items())
    assert_same(snapshot(clipped, optimizer), snapshot(scaled, other))


@pytest.mark.parametrize("scale", [0.0, float("inf"), float("nan")])
def test_a_scale_of_zero_or_not_finite_skips_step_and_qk_clip(scale):
    named = parameters(MODEL, torch.bfloat16)
    optimizer = optimizer_of(named)
    train(named, optimizer, [0])
    before = snapshot(named, optimizer)
    set_gradients(named, seed=1)
    optimizer.step(0.01, torch.tensor(scale))
    gammas = optimizer.qk_clip(
        {MLA_LAYER: max_logits(h0=500.0), 4: max_logits(h1=torch.nan)}, torch.tensor(scale)
    )
    assert_same(before, snapshot(named, optimizer))
    assert gammas[MLA_LAYER].tolist() == [1.0] * 4
    assert gammas[4].isnan().tolist() == [False, True, False, False]


def test_factors_are_checked_when_they_are_read():
    check_factors({})
    check_factors({3: torch.ones(4), 4: torch.tensor([0.5, 1.0])})
    with pytest.raises(TrainingDiverged, match="layer 4, head 1 is not finite"):
        check_factors({3: torch.ones(2), 4: torch.tensor([1.0, torch.nan])})


# Checkpoints.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"optimizer": "adamw"}])
def test_a_run_resumed_from_disk_is_bitwise_the_uninterrupted_one(dtype, settings, tmp_path):
    named = parameters(MODEL, dtype)
    optimizer = optimizer_of(named, **settings)
    train(named, optimizer, range(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP remarks that there is one process
        dcp.save({"model": named, "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path)
    train(named, optimizer, range(3, 5))

    resumed = parameters(MODEL, dtype, seed=9)
    other = optimizer_of(resumed, **settings)
    read = {
        n: {e: torch.empty_like(t) for e, t in entries.items()} for n, entries in other.state_dict().items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"model": resumed, "optimizer": read}, checkpoint_id=tmp_path)
    other.load_state_dict(read)
    train(resumed, other, range(3, 5))
    assert_same(snapshot(named, optimizer), snapshot(resumed, other))


def test_the_state_is_keyed_by_name_and_complete_before_the_first_step():
    named = parameters(MODEL, torch.bfloat16)
    optimizer = optimizer_of(named)
    before = {name: set(entries) for name, entries in optimizer.state_dict().items()}
    train(named, optimizer, [0])
    assert before == {name: set(entries) for name, entries in optimizer.state_dict().items()}
    assert before["layers.0.self_attn.q_proj.weight"] == {"momentum", "master"}
    assert before["layers.0.self_attn.A_log"] == {"exp_avg", "exp_avg_sq", "step"}


def test_loading_masters_rounds_them_into_the_parameters():
    source, target = parameters(MODEL, torch.bfloat16), parameters(MODEL, torch.bfloat16, seed=1)
    optimizer = optimizer_of(target)
    optimizer.load_state_dict(optimizer_of(source).state_dict())
    for name, p in target.items():
        assert torch.equal(p, source[name]) or p.dtype == torch.float32


def test_order_of_parameters_does_not_matter():
    named = parameters(MODEL)
    optimizer = optimizer_of(named)
    train(named, optimizer, range(2))
    turned = dict(reversed([(n, torch.nn.Parameter(p.detach().clone())) for n, p in named.items()]))
    other = optimizer_of(turned)
    other.load_state_dict(optimizer.state_dict())
    for run in ((named, optimizer), (turned, other)):
        for name, p in run[0].items():
            p.grad = torch.full_like(p, 0.1) + p.detach() * len(name)
        run[1].step(0.01)
    assert_same(snapshot(named, optimizer), snapshot(turned, other))


def test_state_that_does_not_fit_is_one_error_naming_all_and_changes_nothing():
    named = parameters(MODEL, torch.bfloat16)
    optimizer = optimizer_of(named)
    train(named, optimizer, [0])
    before = snapshot(named, optimizer)
    saved = {
        n: {e: torch.zeros_like(t) for e, t in entries.items()}
        for n, entries in optimizer.state_dict().items()
    }
    del saved[QUERY]["momentum"]
    saved[KV_B]["momentum"] = torch.zeros(3, 2)
    saved["norm.weight"]["exp_avg"] = saved["norm.weight"]["exp_avg"].half()
    saved["lm_head.weight"]["momentum"] = torch.zeros(1)
    with pytest.raises(CheckpointError) as error:
        optimizer.load_state_dict(saved)
    for finding in (
        f"{QUERY} momentum is missing",
        f"{KV_B} momentum is [3, 2] float32 instead of [96, 20] float32",
        "norm.weight exp_avg is [40] float16 instead of [40] float32",
        "lm_head.weight momentum is unexpected",
    ):
        assert finding in str(error.value)
    assert "\n" not in str(error.value)
    assert_same(before, snapshot(named, optimizer))


def test_state_of_another_update_rule_does_not_load():
    named = parameters(MODEL)
    with pytest.raises(CheckpointError, match=r"eh_proj\.weight exp_avg is missing.*momentum is unexpected"):
        optimizer_of(named, optimizer="adamw").load_state_dict(optimizer_of(named).state_dict())


# QK-clip (the arithmetic is tested in test_qk_clip.py).


def max_logits(**heads):
    logits = torch.full((4,), 20.0)
    for head, value in heads.items():
        logits[int(head[1:])] = value
    return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("query_rank", [None, 16])
def test_qk_clip_scales_master_and_compute_copies_of_clipped_heads_only(dtype, query_rank):
    model = tiny_config(q_lora_rank=query_rank)
    named = parameters(model, dtype)
    optimizer = Optimizer(named.items(), OptimConfig(), model)
    query = f"layers.{MLA_LAYER}.self_attn.{'q_b_proj' if query_rank else 'q_proj'}.weight"
    before = snapshot(named, optimizer)
    gamma = optimizer.qk_clip({MLA_LAYER: max_logits(h2=400.0), 4: max_logits()})
    assert gamma[MLA_LAYER].tolist() == [1, 1, 0.25, 1] and gamma[4].tolist() == [1, 1, 1, 1]
    after = snapshot(named, optimizer)
    changed = {key for key in after if not torch.equal(after[key], before[key])}
    assert changed == {query, KV_B} | (
        {f"{query} master", f"{KV_B} master"} if dtype == torch.bfloat16 else set()
    )
    for name, rows in ((query, 16), (KV_B, 24)):
        key = f"{name} master" if dtype == torch.bfloat16 else name
        ratio = (after[key] / before[key]).view(4, rows, -1)
        assert torch.allclose(ratio[2, :10], torch.tensor(0.5))
        assert torch.allclose(ratio[2, 10:], torch.tensor(0.25 if name == query else 1.0))
        for head in (0, 1, 3):
            assert torch.equal(after[name].view(4, rows, -1)[head], before[name].view(4, rows, -1)[head])
        assert torch.equal(after[name], after[key].to(dtype))


def test_qk_clip_reaches_the_mtp_layer_and_follows_tau():
    named = parameters(MODEL)
    before = named["mtp.layer.self_attn.q_proj.weight"].detach().clone()
    gamma = optimizer_of(named, qk_clip_tau=10.0).qk_clip({4: max_logits()})
    assert gamma[4].tolist() == [0.5] * 4
    ratio = (named["mtp.layer.self_attn.q_proj.weight"] / before).view(4, 16, -1)
    assert torch.allclose(ratio[:, 10:], torch.tensor(0.5))


def test_qk_clip_of_a_layer_that_is_not_mla_is_an_error():
    with pytest.raises(InvalidInput, match=r"layers\.0 has no trained queries"):
        optimizer_of(parameters(MODEL)).qk_clip({0: max_logits()})


def test_qk_clip_of_a_logit_that_is_not_finite_changes_nothing():
    named = parameters(MODEL)
    optimizer = optimizer_of(named)
    before = snapshot(named, optimizer)
    with pytest.raises(TrainingDiverged, match="layer 4, head 1 is nan"):
        optimizer.qk_clip({MLA_LAYER: max_logits(h0=500.0), 4: max_logits(h1=float("nan"))})
    assert_same(before, snapshot(named, optimizer))
