"""MXFP4 bytes of openk3 and of compressed-tensors, and its conversion of checkpoints that openk3 saved."""

from __future__ import annotations

import pytest
import torch

from openk3.checkpoint.official.load import load_official
from openk3.checkpoint.official.save import save_official
from openk3.ops.mx import decode_mxfp4, encode_mxfp4
from oracle.cases import peer
from oracle.random_models import SEEDS, k3, kimi_linear, random_model

pytestmark = pytest.mark.oracle

FORMS = {"k3": k3, "kimi_linear": kimi_linear}
PACKED = [
    (name, seed) for name, form in FORMS.items() for seed in SEEDS if form(seed).expert_format == "mxfp4"
]


@pytest.fixture(scope="module")
def theirs():
    return peer("compressed_tensors_peer")


@pytest.fixture(scope="module")
def scheme(theirs, tmp_path_factory):
    """What compressed-tensors makes of the `quantization_config` that our saver writes."""
    seed = next(seed for name, seed in PACKED if name == "k3")
    folder = tmp_path_factory.mktemp("k3") / "saved"
    return theirs.scheme_of(save_official(random_model(k3(seed), seed), folder))


def test_every_byte_under_every_scale_unpacks_to_the_same_value(theirs, scheme):
    packed = torch.arange(256, dtype=torch.uint8).expand(253, 256).contiguous()
    scale = torch.arange(253, dtype=torch.uint8)[:, None].expand(253, 16).contiguous()
    assert torch.equal(decode_mxfp4(packed, scale, torch.bfloat16), theirs.decompress(packed, scale, scheme))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1.0, 1e30])
def test_random_weights_pack_to_the_same_bytes(theirs, scheme, magnitude, dtype):
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(96, 512, generator=generator).exp() * magnitude).to(dtype)
    weight *= torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
    same_bytes(encode_mxfp4(weight), theirs.compress(weight, scheme))


def test_halves_between_codes_and_largest_magnitudes_between_scales_go_the_same_way(theirs, scheme):
    """Each row: a largest magnitude at or beside the border 1.75 of the scale rule, all halves under it."""
    beside = torch.tensor([-1, 0, 1]) * torch.finfo(torch.float32).eps
    largest = torch.cat([1.75 + beside, 1.5 + beside, torch.tensor([1.0, 1.25])])
    halves = torch.tensor([0.125, 0.25, 0.375, 0.625, 0.75, 0.875, 1.25, 1.75, 2.5, 3.5, 5.0, 5.5]) / 8
    row = torch.cat([halves, -halves, torch.full((7,), 1e-3)])
    weight = torch.cat([row.expand(len(largest), -1), largest[:, None]], dim=1)
    same_bytes(encode_mxfp4(weight), theirs.compress(weight, scheme))


@pytest.mark.parametrize(("form", "seed"), PACKED)
def test_its_conversion_of_a_saved_checkpoint_holds_the_weights_that_ours_loads(theirs, tmp_path, form, seed):
    folder = save_official(random_model(FORMS[form](seed), seed), tmp_path / "packed")
    ours = load_official(folder).state_dict()
    converted = load_official(theirs.with_dense_experts(folder, tmp_path / "dense")).state_dict()
    assert ours.keys() == converted.keys()
    assert [name for name in ours if not torch.equal(ours[name], converted[name])] == []


def same_bytes(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other), f"{int((mine != other).sum())} of {mine.numel()} bytes differ"
