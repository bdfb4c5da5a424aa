"""`openk3 convert` and `openk3 inspect` as a person uses them."""

from __future__ import annotations

import json

import pytest
import torch

from checkpoint.official_folders import K3_FORM, random_model, shards
from cli.test_cli import failure, run
from openk3.chat import Tokenizer
from openk3.checkpoint.official.load import load_official
from openk3.train.weights import initialise_from, load_model, save_weights

CONFIG = K3_FORM.model_copy(update={"vocab_size": 512})


@pytest.fixture
def ours(tmp_path):
    """Weights as a run keeps them, with a tokenizer of single bytes."""
    save_weights(random_model(CONFIG), tmp_path / "run")
    Tokenizer([bytes([n]) for n in range(256)]).save(tmp_path / "run")
    return tmp_path / "run"


def _equal(a, b) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(t, theirs[n]) for n, t in mine.items())


def test_ours_to_official_to_ours_is_bitwise_and_the_tokenizer_comes_along(capsys, ours, tmp_path):
    assert run(capsys, "convert", str(ours), str(tmp_path / "out"))[0] == 0
    assert run(capsys, "convert", str(tmp_path / "out"), str(tmp_path / "back"), "--to", "ours")[0] == 0
    for folder in (tmp_path / "out", tmp_path / "back"):
        assert (folder / "tiktoken.model").read_bytes() == (ours / "tiktoken.model").read_bytes()
        assert _equal(load_model(folder, dtype=torch.bfloat16), random_model(CONFIG))


def test_official_formats_go_into_each_other(capsys, ours, tmp_path):
    names = [str(tmp_path / name) for name in "abc"]
    assert run(capsys, "convert", str(ours), names[0], "--to", "mxfp4")[0] == 0
    assert run(capsys, "convert", names[0], names[1], "--to", "bf16")[0] == 0
    assert run(capsys, "convert", names[1], names[2], "--to", "mxfp4")[0] == 0
    for one, other in zip(shards(tmp_path / "a"), shards(tmp_path / "c"), strict=True):
        assert one.read_bytes() == other.read_bytes()
    assert (tmp_path / "c" / "tiktoken.model").is_file()


def test_fp32_weights_can_stay_whole(capsys, tmp_path, ours):
    model = random_model(CONFIG, torch.float32)
    save_weights(model, tmp_path / "wide")
    (tmp_path / "wide" / "tiktoken.model").write_bytes((ours / "tiktoken.model").read_bytes())
    assert run(capsys, "convert", str(tmp_path / "wide"), str(tmp_path / "out"), "--fp32")[0] == 0
    assert _equal(load_official(tmp_path / "out"), model)
    assert run(capsys, "convert", str(tmp_path / "out"), str(tmp_path / "back"), "--to", "ours")[0] == 0
    assert _equal(load_model(tmp_path / "back"), model)


def test_an_official_folder_can_be_generated_from_and_trained_on(capsys, ours, tmp_path):
    run(capsys, "convert", str(ours), str(tmp_path / "out"))
    code, out, _ = run(
        capsys, "generate", str(tmp_path / "out"), "--prompt", "ab", "-n", "3", "--temperature", "0"
    )
    assert code == 0
    assert out.startswith("ab")
    model = random_model(CONFIG)
    with torch.no_grad():
        model.norm.weight.zero_()
    initialise_from(model, tmp_path / "out")
    assert _equal(model, random_model(CONFIG))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{run}", "{run}"], "exists already"),
        (["{run}", "{tmp}/x", "--to", "ours"], "ours already"),
        (["{tmp}/none", "{tmp}/x"], "no checkpoint"),
        (["{run}", "{tmp}/x", "--to", "ours", "--fp32"], "--fp32"),
    ],
)
def test_what_cannot_be_converted_is_one_line(capsys, ours, tmp_path, words, message):
    filled = [word.format(run=ours, tmp=tmp_path) for word in words]
    assert message in failure(capsys, "convert", *filled)
    assert not (tmp_path / "x").exists()


def test_inspect_counts_and_says_yes(capsys, ours, tmp_path):
    run(capsys, "convert", str(ours), str(tmp_path / "out"), "--to", "mxfp4")
    code, out, _ = run(capsys, "inspect", str(tmp_path / "out"), "--verify")
    assert code == 0
    assert "mxfp4" in out
    assert "will load  yes" in out
    assert "every byte is what was written" in out
    content = json.loads(run(capsys, "inspect", str(tmp_path / "out"), "--json")[1])
    assert content["problems"] == []
    assert content["parts"]["routed experts"]["parameters"] == 2 * 4 * 3 * 32 * 32


def test_inspect_names_what_is_wrong_and_exits_2(capsys, ours, tmp_path):
    run(capsys, "convert", str(ours), str(tmp_path / "out"))
    lost = shards(tmp_path / "out")[0]
    lost.unlink()
    code, out, err = run(capsys, "inspect", str(tmp_path / "out"))
    assert code == 2
    assert "will load  no" in out
    assert f"{lost.name} is missing" in err


def test_inspect_finds_a_flipped_bit_only_when_it_reads(capsys, ours, tmp_path):
    run(capsys, "convert", str(ours), str(tmp_path / "out"))
    shard = shards(tmp_path / "out")[0]
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    assert run(capsys, "inspect", str(tmp_path / "out"))[0] == 0
    code, _, err = run(capsys, "inspect", str(tmp_path / "out"), "--verify")
    assert code == 2
    assert shard.name in err


def test_inspect_of_a_run_counts_it(capsys, ours):
    code, out, _ = run(capsys, "inspect", str(ours))
    assert code == 0
    assert "will load  yes, step 0" in out


def test_a_path_may_hold_what_a_terminal_library_takes_for_markup(capsys, ours, tmp_path):
    odd = tmp_path / "a[b][" / "c]"
    assert run(capsys, "convert", str(ours), str(odd))[0] == 0
    code, out, _ = run(capsys, "inspect", str(odd), "--verify")
    assert code == 0
    assert "a[b][" in "".join(out.split())
    assert run(capsys, "convert", str(odd), str(odd.parent / "d]"), "--to", "mxfp4")[0] == 0


def test_weights_of_ours_appear_with_their_tokenizer_or_not_at_all(capsys, ours, tmp_path, monkeypatch):
    run(capsys, "convert", str(ours), str(tmp_path / "out"))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    line = failure(capsys, "convert", str(tmp_path / "out"), str(tmp_path / "back"), "--to", "ours")
    assert "No space left" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_a_folder_in_the_released_layout_is_known_by_any_of_its_files(capsys, ours, tmp_path):
    run(capsys, "convert", str(ours), str(tmp_path / "out"))
    (tmp_path / "out" / "config.json").unlink()
    for words in (
        ["inspect", "{out}"],
        ["convert", "{out}", "{x}"],
        ["convert", "{out}", "{x}", "--to", "ours"],
    ):
        filled = [word.format(out=tmp_path / "out", x=tmp_path / "x") for word in words]
        assert "config.json: cannot read" in failure(capsys, *filled)


def test_a_source_that_is_not_there_is_no_run_that_is_ours_already(capsys, tmp_path):
    line = failure(capsys, "convert", str(tmp_path / "none"), str(tmp_path / "x"), "--to", "ours")
    assert "no such folder" in line
