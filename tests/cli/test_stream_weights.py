"""`openk3 generate --stream-weights` as a person uses it: the same text, one line of what was read."""

from __future__ import annotations

import re

import pytest

from checkpoint.official_folders import K3_FORM, saved
from cli.test_cli import failure, run
from openk3.chat import Tokenizer

GREEDY = ("--prompt", "import", "--temperature", "0", "--tokens", "6")


@pytest.fixture
def folder(tmp_path):
    path = saved(tmp_path / "c", K3_FORM.model_copy(update={"vocab_size": 512}), experts="mxfp4")
    Tokenizer([bytes([n]) for n in range(256)]).save(path)
    return str(path)


def test_streamed_text_is_that_of_the_loaded_checkpoint_and_one_line_says_what_was_read(capsys, folder):
    code, loaded, _ = run(capsys, "generate", folder, *GREEDY)
    assert code == 0
    assert loaded.startswith("import")
    code, streamed, line = run(
        capsys, "generate", "--stream-weights", folder, "--budget-gb", "0.00015", *GREEDY
    )
    assert (code, streamed) == (0, loaded)
    assert re.fullmatch(
        r"held 0\.0001[45]\d* of 0\.00015 GB; [\d.e-]+ s/token; experts: [\d.]+% of \d+ found in memory; "
        r"read [\d.]+ kB/token, [\d.]+ kB in all\n",
        line,
    )


def test_without_a_budget_half_of_the_free_memory_is_used(capsys, folder):
    code, _, line = run(capsys, "generate", "--stream-weights", folder, *GREEDY)
    assert code == 0
    assert re.match(r"held 0\.000\d+ of [\d.]+ GB; ", line)
    assert float(line.split("experts: ")[1].split("%")[0]) > 50  # all but the first uses


def test_a_budget_that_cannot_do_says_what_would(capsys, folder):
    line = failure(capsys, "generate", "--stream-weights", folder, "--budget-gb", "0.00001", *GREEDY)
    assert re.search(r"10,000 bytes are too few; this checkpoint needs at least [\d,]+:", line)
    for wrong in ("0", "-1", "nan", "inf", "1e308"):
        line = failure(capsys, "generate", "--stream-weights", folder, "--budget-gb", wrong, *GREEDY)
        assert "--budget-gb must be a positive number" in line


def test_a_run_and_streamed_weights_exclude_each_other(capsys, folder):
    for words in ([], [folder, "--stream-weights", folder], [folder, "--budget-gb", "1"]):
        assert "either a run folder or --stream-weights" in failure(capsys, "generate", *words, *GREEDY)
