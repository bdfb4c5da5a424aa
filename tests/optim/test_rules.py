"""The table of rules: every parameter of every preset finds its row, and is cut where its heads are."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tiny_k3 import parameters, tiny_config

from openk3.config import PRESETS
from openk3.errors import InvalidInput
from openk3.model import K3
from openk3.optim import RULES, OptimConfig, assign, describe
from openk3.optim.rules import Rule, Split

SHAPES = {name: tuple(p.shape) for name, p in parameters(tiny_config()).items()}


def treatments(config=None, *, model=None):
    model = model or tiny_config()
    shapes = {name: tuple(p.shape) for name, p in parameters(model).items()}
    return assign(shapes, config or OptimConfig(), model)


@pytest.mark.parametrize("name", PRESETS)
def test_every_parameter_of_every_preset_has_exactly_one_row(name):
    model = K3(PRESETS[name], device="meta", dtype=torch.bfloat16)
    rows = describe(model.named_parameters(), OptimConfig(), PRESETS[name])
    assert sum(row.elements for row in rows) == sum(p.numel() for p in model.parameters())


def test_every_row_of_the_table_is_needed():
    used = set()
    for model in (tiny_config(), tiny_config(q_lora_rank=16, low_rank_gate=True)):
        used |= {treatment.rule.pattern for treatment in treatments(model=model).values()}
    assert used == {rule.pattern for rule in RULES}


def test_attention_projections_are_cut_at_their_heads():
    of = treatments()
    kda, mla = "layers.0.self_attn", "layers.3.self_attn"
    for part in ("q", "k", "v"):
        assert of[f"{kda}.{part}_proj.weight"].split == Split(3, (12,))
    assert of[f"{mla}.q_proj.weight"].split == Split(4, (10 + 6,))
    assert of[f"{mla}.kv_b_proj.weight"].split == Split(4, (10, 14))
    assert of["mtp.layer.self_attn.kv_b_proj.weight"].split == Split(4, (10, 14))
    assert of[f"{kda}.f_b_proj.weight"].split == Split(3, (12,))
    assert of[f"{kda}.g_proj.weight"].split == Split(3, (12,))
    assert of[f"{mla}.g_proj.weight"].split == Split(4, (14,))
    assert treatments(model=tiny_config(q_lora_rank=16))[f"{mla}.q_b_proj.weight"].split == Split(4, (16,))


def test_experts_are_matrices_and_the_rest_is_whole():
    of = treatments()
    assert of["layers.1.block_sparse_moe.experts.w1"].split == Split(25, (18,))
    assert of["layers.1.block_sparse_moe.experts.w2"].split == Split(25, (22,))
    assert of["layers.1.block_sparse_moe.gate.weight"].split == Split(1, (25,))
    assert of["layers.0.self_attn.o_proj.weight"].split == Split(1, (40,))
    assert of["layers.3.self_attn.kv_a_proj_with_mqa.weight"].split == Split(1, (26,))
    assert of["mtp.eh_proj.weight"].split == Split(1, (40,))


def test_tables_vectors_and_scalar_rows_go_to_adamw():
    names = {name for name, treatment in treatments().items() if treatment.split is None}
    kinds = ("norm.weight", "_res_proj.weight", "conv1d.weight", "A_log", "dt_bias", "b_proj.weight")
    kinds += ("embed_tokens.weight", "lm_head.weight")
    expected = {n for n in SHAPES if n.endswith(kinds)}
    expected -= {n for n in expected if n.endswith(("kv_b_proj.weight", "f_b_proj.weight"))}
    assert names == expected


def test_matrices_tables_and_beta_rows_decay_and_nothing_else():
    decaying = {name for name, treatment in treatments().items() if treatment.weight_decay}
    still = {n for n, shape in SHAPES.items() if len(shape) == 1 or shape[0] == 1 or "conv1d" in n}
    assert decaying == SHAPES.keys() - still
    assert {treatment.weight_decay for treatment in treatments().values()} == {0.0, 0.1}


@pytest.mark.parametrize("flag", ["per_head", "per_head_gates"])
def test_flags_join_heads_to_whole_matrices(flag):
    joined = {"f_b_proj.weight", "g_proj.weight"}
    if flag == "per_head":
        joined |= {"q_proj.weight", "k_proj.weight", "v_proj.weight", "kv_b_proj.weight"}
    split, flagged = treatments(), treatments(OptimConfig(**{flag: False}))
    for name, treatment in flagged.items():
        if name.rpartition("self_attn.")[2] in joined:
            assert treatment.split == Split(1, (SHAPES[name][0],))
        else:
            assert treatment == split[name]


def test_adamw_for_everything_keeps_decay_and_scales():
    config = OptimConfig(embedding_lr_scale=0.5, vector_lr_scale=2.0)
    muon, adamw = treatments(config), treatments(config.model_copy(update={"optimizer": "adamw"}))
    assert all(treatment.split is None for treatment in adamw.values())
    assert {n: dataclasses.replace(t, split=None) for n, t in muon.items()} == adamw
    assert {t.rule.kind: t.lr_scale for t in muon.values()} == {
        "matrix": 1.0,
        "embedding": 0.5,
        "vector": 2.0,
    }


def test_a_parameter_without_a_row_is_named():
    with pytest.raises(
        InvalidInput, match=r"layers\.0\.self_attn\.x_proj\.weight .*kda\.x_proj\.weight.* none"
    ):
        assign({"layers.0.self_attn.x_proj.weight": (4, 4)}, OptimConfig(), tiny_config())


def test_a_parameter_with_two_rows_is_named_with_both():
    rules = (*RULES, Rule("*.o_proj.weight", "matrix", "test"))
    with pytest.raises(
        InvalidInput, match=r"layers\.3\.self_attn\.o_proj\.weight .*mla\.o_proj.* and \*\.o_proj"
    ):
        assign({"layers.3.self_attn.o_proj.weight": (40, 56)}, OptimConfig(), tiny_config(), rules)


def test_rows_that_are_not_the_heads_are_an_error():
    with pytest.raises(
        InvalidInput, match=r"layers\.0\.self_attn\.q_proj\.weight is \[35, 40\].* 3 blocks of 12 = 36"
    ):
        assign({"layers.0.self_attn.q_proj.weight": (35, 40)}, OptimConfig(), tiny_config())


def test_blocks_are_views_that_together_are_the_parameter():
    x = torch.arange(4 * (10 + 14) * 20.0).view(4 * 24, 20)
    keys, values = Split(4, (10, 14)).blocks(x)
    assert keys.shape == (4, 10, 20) and values.shape == (4, 14, 20)
    assert torch.equal(keys[1], x[24:34]) and torch.equal(values[1], x[34:48])
    keys.zero_()
    values.zero_()
    assert not x.any()


def test_the_printed_table_says_what_newton_schulz_sees():
    rows = {
        (row.pattern, row.shape): row
        for row in describe(parameters(tiny_config()).items(), OptimConfig(), tiny_config())
    }
    assert rows["mla.kv_b_proj.weight", (96, 20)].blocks == "4 x [10, 20] + 4 x [14, 20]"
    assert rows["mla.kv_b_proj.weight", (96, 20)].parameters == 2
    assert rows["kda.[qkv]_proj.weight", (36, 40)].parameters == 9
    assert rows["embed_tokens.weight", (50, 40)].method == "adamw"
    assert rows["embed_tokens.weight", (50, 40)].blocks == ""
