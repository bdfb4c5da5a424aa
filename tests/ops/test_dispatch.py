"""Which implementation is chosen, and what is said when it cannot run."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from openk3.errors import KernelUnavailable
from openk3.ops import dispatch
from openk3.ops.dispatch import choose

ON_A_CARD = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device=torch.device("cuda"))


def test_a_card_runs_kernels_by_default_where_they_take_the_inputs_and_were_checked():
    assert choose("x", ON_A_CARD, None) == "triton"
    assert choose("x", ON_A_CARD, None, kernels=False) == "eager"
    assert choose("x", ON_A_CARD, None, by_default=False) == "eager"
    assert choose("x", ON_A_CARD, "triton", by_default=False) == "triton"
    assert choose("x", torch.zeros(1), None) == "eager"


def test_kernels_switched_off_run_where_they_are_asked_for_alone():
    with patch.object(dispatch, "BY_DEFAULT", False):
        assert choose("x", ON_A_CARD, None) == "eager"
        assert choose("x", ON_A_CARD, "triton") == "triton"


def test_a_kernel_that_cannot_run_is_an_error_where_it_is_asked_for():
    with pytest.raises(KernelUnavailable, match="no Triton kernel for this"):
        choose("x", ON_A_CARD, "triton", kernels=False)
    with pytest.raises(KernelUnavailable, match="no Triton kernel for this"):
        choose("x", SimpleNamespace(**vars(ON_A_CARD) | {"dtype": torch.float64}), "triton")
    with (
        patch.dict(os.environ, {"TRITON_INTERPRET": "0"}),
        patch.object(dispatch, "TRITON_INSTALLED", True),
        pytest.raises(KernelUnavailable, match="Triton does not run on cpu"),
    ):
        choose("x", torch.zeros(1), "triton")


@pytest.mark.parametrize(("said", "code", "words"), [("off", 0, ""), ("no", 2, "OPENK3_KERNELS='no'")])
def test_the_environment_switches_kernels(said, code, words):
    done = subprocess.run(
        [sys.executable, "-m", "openk3", "doctor", "--device", "cpu"],
        env={**os.environ, "OPENK3_KERNELS": said},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
