"""bench/fuzz.py in Triton's interpreter, a few small cases a family; and that it finds a wrong kernel."""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path

import pytest
import torch

from openk3.ops.dispatch import triton_problem

pytestmark = pytest.mark.skipif(
    triton_problem("cpu") is not None or torch.cuda.is_available(), reason="for Triton's interpreter"
)
BENCH = Path(__file__).parents[2] / "bench"
NAMES = ("experts", "mx_experts", "router", "attention", "decode", "attnres", "loss", "units", "norms")
NAMES += ("convolution", "formats", "decoding")


@pytest.fixture(scope="module")
def fuzz():
    sys.path.insert(0, str(BENCH))
    yield importlib.import_module("fuzz")
    sys.path.remove(str(BENCH))


def test_all_families_are_named_here(fuzz):
    assert set(NAMES) == set(fuzz.FAMILIES)


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of infinities on their way
def test_cases_of_every_family_agree_with_float64(fuzz, family):
    for number in range(3):
        torch.manual_seed(number)
        case = fuzz.FAMILIES[family](random.Random(f"{family} {number}"), "cpu")
        shares, wrong = fuzz.judge(case)
        assert not wrong, case.traits
        assert case.facts or shares


@pytest.mark.parametrize("spoil", ["by a ten-thousandth", "no number", "another the second time"])
def test_a_wrong_kernel_is_found(fuzz, spoil):
    case = fuzz.FAMILIES["units"](random.Random("units 3"), "cpu")
    call, runs = case.call, []

    def spoiled(own, implementation):
        outputs = call(own, implementation)
        if implementation == "triton":
            runs.append(1)
            wrong = {"by a ten-thousandth": 1 + 1e-4, "no number": torch.nan}.get(spoil, 1 + 1e-7 * len(runs))
            outputs["of two"] = outputs["of two"] * wrong
        return outputs

    case.call = spoiled
    assert case.inputs["both"].numel()
    _, wrong = fuzz.judge(case)
    assert any(line.startswith("of two") for line in wrong)
