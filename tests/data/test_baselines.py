"""Compressors as yardsticks, against the command line tools people would run."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from openk3.data.baselines import gzip_bits_per_byte, xz_bits_per_byte
from openk3.errors import InvalidInput

TEXT = Path(argparse.__file__).read_bytes()


@pytest.mark.parametrize(("tool", "ours"), [("gzip", gzip_bits_per_byte), ("xz", xz_bits_per_byte)])
def test_it_is_what_the_command_line_tool_makes_of_the_same_bytes(tool, ours):
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    made = subprocess.run([tool, "-9", "-c"], input=TEXT, capture_output=True, check=True).stdout
    assert ours(TEXT) == pytest.approx(8 * len(made) / len(TEXT), rel=5e-3)


@pytest.mark.parametrize("ours", [gzip_bits_per_byte, xz_bits_per_byte])
def test_noise_costs_eight_bits_a_byte(ours):
    assert 8 <= ours(os.urandom(100_000)) < 8.02
    with pytest.raises(InvalidInput, match="no text"):
        ours(b"")
