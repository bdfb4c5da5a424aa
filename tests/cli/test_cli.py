"""The command line as a person meets it: help, counts, and one line with exit code 2 for wrong input."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from openk3 import __version__
from openk3.cli.main import COMMANDS, main
from openk3.config import preset
from openk3.model.sizes import count
from openk3.train.flops import model_flops


def run(capsys, *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `openk3 WORDS`."""
    with pytest.raises(SystemExit) as exit_:
        main(list(words))
    captured = capsys.readouterr()
    return exit_.value.code or 0, captured.out, captured.err


def failure(capsys, *words: str) -> str:
    """The one line that a failing command prints."""
    code, _, err = run(capsys, *words)
    assert code == 2
    (line,) = err.strip().splitlines()
    assert line.startswith("openk3: error: ")
    return line


def test_help_lists_every_command(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for name in COMMANDS:
        assert name in out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_own_help(capsys, name):
    code, out, _ = run(capsys, name, "--help")
    assert code == 0
    assert f"openk3 {name}" in out


def test_the_version_is_the_packages(capsys):
    assert run(capsys, "--version")[1].strip() == f"openk3 {__version__}"


def test_root_help_does_not_load_torch():
    code = "import sys; from openk3.cli.main import root; root(None); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_params_json_adds_up(capsys):
    _, out, _ = run(capsys, "params", "r1", "--json")
    sizes = json.loads(out)
    assert set(sizes) == {"total", "active", "active_non_embedding", "embedding", "parts"}
    assert sizes["total"] == sum(part["total"] for part in sizes["parts"].values())
    assert sizes["active"] == sum(part["active"] for part in sizes["parts"].values())
    assert sizes["active_non_embedding"] == sizes["active"] - sizes["embedding"]
    assert sizes["embedding"] == 163840 * 512


def test_params_tensors_is_a_tsv_that_adds_up(capsys):
    _, out, _ = run(capsys, "params", "linear-48b", "--tensors")
    header, *rows = (line.split("\t") for line in out.splitlines())
    assert header == ["name", "shape", "dtype", "bytes"]
    for _, shape, dtype, size in rows:
        elements = 1
        for n in json.loads(shape):
            elements *= n
        assert int(size) == elements * {"BF16": 2, "F32": 4}[dtype]


def test_params_reads_a_model_file(capsys, tmp_path):
    file = tmp_path / "model.toml"
    file.write_text(
        "vocab_size = 300\nhidden_size = 16\nnum_layers = 2\ndense_width = 24\ndense_layers = 2\n"
        "[kda]\nnum_heads = 2\nhead_dim = 8\n"
        "[mla]\nnum_heads = 2\nkv_lora_rank = 8\nqk_nope_head_dim = 8\nqk_rope_head_dim = 4\nv_head_dim = 8\n"
    )
    _, out, _ = run(capsys, "params", str(file), "--json")
    assert json.loads(out)["parts"]["embedding"]["total"] == 300 * 16
    file.write_text("hidden_sise = 3")
    assert "model.toml: " in (line := failure(capsys, "params", str(file)))
    assert "hidden_sise: unknown field" in line


def test_params_table_names_all_three_active_counts(capsys):
    _, out, _ = run(capsys, "params", "nano")
    assert "active, every table counted" in out
    assert "active, without the look-up" in out
    assert "active, without any embedding" in out
    assert re.search(r"embedding, look-up and head +524\.3k \(524,288\)", out)


def test_params_prints_the_operations_of_training_beside_six_times_active(capsys):
    out = " ".join(run(capsys, "params", "r1")[1].split())
    pattern = (
        r"train on a token \S+ \(([\d,]+)\) in sequences of 4,096 6 x active, for comparison \S+ \(([\d,]+)\)"
    )
    found = re.search(pattern, out)
    assert found
    ours, six_active = (int(number.replace(",", "")) for number in found.groups())
    assert six_active == 6 * count(preset("r1")).active
    assert ours == model_flops(preset("r1"), [4096]).total // 4096


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["params", "nanoo"], "did you mean 'nano'?"),
        (["params", "missing.toml"], "missing.toml: no such file"),
        (["train", "nano", "--optim.lrr", "1"], "unknown field --optim.lrr; did you mean --optim.lr?"),
        (["train", "nowhere.toml"], "nowhere.toml: neither a recipe of the package"),
        (["generate", "no-such-run", "--prompt", "x"], "no-such-run: no checkpoint there: no such folder"),
        (["chat", "no-such-run"], "no-such-run: no checkpoint there: no such folder"),
        (["report", "no-such-run"], "no-such-run"),
        (["data", "info", "no-such-folder"], "no-such-folder"),
        (["tokenizer", "info", "no-such-file"], "no-such-file"),
    ],
)
def test_wrong_input_is_one_line_and_exit_2(capsys, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    assert message in failure(capsys, *words)
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_a_misspelt_command_is_named(capsys):
    code, _, err = run(capsys, "trian")
    assert code == 2
    assert "trian" in err


def test_doctor_says_what_each_operator_runs_as(capsys):
    code, out, _ = run(capsys, "doctor", "--device", "cpu")
    assert code == 0
    for operator in ("kda", "attention", "attnres", "moe", "situ", "cross_entropy", "quantile_balance"):
        assert operator in out
    said = " ".join(out.split())
    cards = "Compile for sm_80, sm_86, sm_89, sm_100, sm_120 too, and were not run there: "
    compiled = said.partition(cards)[2]
    assert "kda.gated_kda," in compiled and "norm.rms_norm," in compiled


def test_what_the_system_refuses_is_one_line_too(capsys):
    assert "File name too long" in failure(capsys, "report", "x" * 300)


def test_a_locale_that_cannot_show_a_character_gets_its_number():
    command = [sys.executable, "-m", "openk3", "tokenizer", "info", "\u00fcber"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 2
    assert b"\\xfcber" in done.stderr


def test_a_message_is_one_line_of_what_can_be_shown(capsys, tmp_path):
    file = tmp_path / "odd.toml"
    file.write_text('"a\\u001b[31m\\u2028b" = 1')
    line = failure(capsys, "params", str(file))
    assert line.isprintable()


@pytest.mark.parametrize(
    ("command", "target", "line"),
    [
        (["doctor"], "openk3.cli.doctor.operator_names", "openk3: interrupted"),
        (
            ["train", "nano"],
            "openk3.cli.train.run",
            "openk3: interrupted; the same command goes on where it stopped",
        ),
    ],
)
def test_an_interrupt_says_so_and_exits_130(capsys, monkeypatch, tmp_path, command, target, line):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(target, interrupted)
    code, _, err = run(capsys, *command)
    assert code == 130
    assert err.strip().splitlines()[-1] == line
