"""The released layout, tensor by tensor, against the published tables and totals."""

from __future__ import annotations

from collections import Counter

import pytest

from checkpoint.released import asset
from openk3.checkpoint.official.layout import official_tensors
from openk3.config import PRESETS


def test_the_full_model_has_the_published_number_of_tensors_and_bytes():
    tensors = list(official_tensors(PRESETS["k3"]))
    assert len({t.name for t in tensors}) == len(tensors) == 497_220
    assert sum(t.bytes for t in tensors) == 1_560_860_324_864
    elements = Counter()
    for t in tensors:
        size = 1
        for n in t.shape:
            size *= n
        elements[t.dtype] += size
    assert elements == {"BF16": 57_179_884_544, "F32": 11_122_432, "U8": 1_446_456_066_048}


def _table(name: str) -> list[list[str]]:
    header, *rows = (line.split("\t") for line in asset(name).read_text().splitlines() if line)
    assert header[:4] == ["name_pattern", "layer_set", "shape", "dtype"]
    return rows


@pytest.mark.parametrize(
    ("preset", "table"), [("k3", "tensors.kimi-k3.tsv"), ("linear-48b", "tensors.kimi-linear-48b.tsv")]
)
def test_tensors_equal_the_published_table_expanded(preset, table):
    config = PRESETS[preset]
    layers = range(config.num_layers)
    sets = {
        "all": list(layers),
        "kda": [i for i in layers if not config.is_mla(i)],
        "mla": [i for i in layers if config.is_mla(i)],
        "dense": [i for i in layers if not config.is_moe(i)],
        "moe": [i for i in layers if config.is_moe(i)],
        "vit": list(range(config.vision.num_layers)) if config.vision else [],
        "global": [None],
    }
    expected = {}
    for pattern, layer_set, shape, dtype, count, *_ in _table(table):
        before = len(expected)
        experts = range(config.moe.num_experts) if "{E}" in pattern else [None]
        for layer in sets[layer_set]:
            for e in experts:
                expected[pattern.replace("{L}", str(layer)).replace("{E}", str(e))] = (shape, dtype)
        assert len(expected) - before == int(count)
    actual = {t.name: (str(list(t.shape)), t.dtype) for t in official_tensors(config)}
    assert actual.keys() == expected.keys()
    for name, (shape, dtype) in expected.items():
        assert actual[name][0] == shape, name
        assert dtype == "?" or actual[name][1] == dtype, name


def test_an_mtp_layer_is_stored_behind_the_last():
    config = PRESETS["nano"].model_copy(update={"mtp_layers": 1})
    names = {t.name for t in official_tensors(config)} - {t.name for t in official_tensors(PRESETS["nano"])}
    prefix = "language_model.model.layers.4."
    assert all(name.startswith(prefix) for name in names)
    rest = {name.removeprefix(prefix) for name in names}
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"} <= rest
    assert {"self_attn.kv_b_proj.weight", "block_sparse_moe.experts.0.w1.weight"} <= rest
