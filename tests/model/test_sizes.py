"""Parameter counts against the published figures."""

from __future__ import annotations

import math

import pytest

from model.tiny import VARIANTS
from openk3.checkpoint.official.layout import official_tensors
from openk3.config import PRESETS
from openk3.model import K3
from openk3.model.sizes import count


def test_k3_lands_on_the_released_numbers():
    config = PRESETS["k3"]
    sizes = count(config)
    vision = sum(
        math.prod(t.shape)
        for t in official_tensors(config)
        if t.name.startswith(("vision_tower.", "mm_projector."))
    )
    padding = 69 * (128 - 96)  # of A_log
    assert sizes.total + vision + padding == 2_779_931_837_184
    assert sizes.active == pytest.approx(105.36e9, abs=0.005e9)
    assert sizes.active_without_lookup == pytest.approx(104.19e9, abs=0.005e9)
    assert sizes.active_non_embedding == pytest.approx(103.0e9, abs=0.05e9)


def test_r1_is_as_near_the_public_run_as_its_figures_allow():
    sizes = count(PRESETS["r1"])
    assert sizes.total == pytest.approx(1.024e9, abs=0.0005e9)
    assert sizes.active == pytest.approx(145.3e6, abs=0.05e6)
    assert sizes.active_non_embedding == pytest.approx(61.4e6, abs=0.05e6)


def test_1b_has_a_billion_active_parameters_in_widths_of_whole_tiles():
    config = PRESETS["1b"]
    sizes = count(config)
    assert sizes.total == pytest.approx(3.882e9, abs=0.0005e9)
    assert sizes.active == sizes.active_without_lookup == pytest.approx(1.051e9, abs=0.0005e9)
    assert sizes.active_non_embedding == pytest.approx(0.715e9, abs=0.0005e9)
    products = [p for p in K3(config, device="meta").parameters() if p.dim() >= 2 and min(p.shape[-2:]) > 64]
    assert len(products) > 200
    odd = {tuple(p.shape) for p in products if any(width % 128 for width in p.shape[-2:])}
    assert odd == {(512 + 64, 2048)}  # MLA's latent and shared key


def test_kimi_linear_is_48b_with_3b_active():
    sizes = count(PRESETS["linear-48b"])
    assert sizes.total == pytest.approx(49.12e9, abs=0.01e9)
    assert sizes.active_non_embedding == pytest.approx(3.0e9, rel=0.15)


@pytest.mark.parametrize(("name", "about"), [("nano", 2e6), ("micro", 15e6)])
def test_small_presets_have_the_size_they_promise(name, about):
    assert count(PRESETS[name]).total == pytest.approx(about, rel=0.15)


@pytest.mark.parametrize("variant", VARIANTS)
def test_counts_equal_the_allocated_tensors(variant):
    config = VARIANTS[variant]
    sizes = count(config)
    assert sizes.total == sum(t.numel() for t in K3(config).state_dict().values())
    idle = 0
    if config.moe is not None:
        layers = config.num_layers - config.dense_layers + config.mtp_layers
        width = config.moe.latent_width or config.hidden_size
        unchosen = config.moe.num_experts - config.moe.experts_per_token
        idle = layers * unchosen * 3 * width * config.moe.expert_width
    assert sizes.active == sizes.total - idle
