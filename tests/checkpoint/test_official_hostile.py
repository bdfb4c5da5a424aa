"""Released folders that somebody touched: what is no file, absurd numbers, NaN, a killed conversion."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file

from checkpoint.official_folders import saved, shards
from openk3.checkpoint.official.convert import convert_official
from openk3.checkpoint.official.folder import INDEX, OfficialFolder, survey
from openk3.checkpoint.official.load import load_official
from openk3.checkpoint.official.summary import verify
from openk3.errors import CheckpointError


def test_checksums_of_other_shards_are_said_to_be_stale(tmp_path):
    folder = saved(tmp_path / "a")
    tensors = load_file(shards(folder)[0])
    save_file(tensors, shards(folder)[0])  # another header
    with pytest.raises(CheckpointError, match=r"remove it, and nothing is compared"):
        OfficialFolder.open(folder)
    (folder / "checksums.json").unlink()
    load_official(folder)


@pytest.mark.parametrize(
    "name", ["config.json", "checksums.json", INDEX, "model-00001-of-000004.safetensors"]
)
@pytest.mark.parametrize("kind", ["pipe", "folder", "broken link"])
def test_what_is_no_file_is_named_and_nothing_waits_for_it(tmp_path, name, kind):
    folder = saved(tmp_path / "a")
    place = folder / name
    place.unlink()
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    else:
        place.symlink_to("nowhere")
    problems = survey(folder).problems
    assert problems
    assert any(name in problem for problem in problems)


def test_a_folder_that_is_not_there_is_said_to_be_missing(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        OfficialFolder.open(tmp_path / "none")


def test_numbers_that_ask_for_millions_of_tensors_are_refused_without_making_their_list(tmp_path):
    folder = saved(tmp_path / "a")
    table = json.loads((folder / "config.json").read_text())
    table["text_config"]["num_experts"] = 2**20
    (folder / "config.json").write_text(json.dumps(table))
    (problem,) = survey(folder).problems
    assert "config.json wants more than 2,097,155 tensors" in problem


def test_a_name_of_any_length_makes_no_line_of_any_length(tmp_path):
    folder = saved(tmp_path / "a")
    (folder / "checksums.json").unlink()
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["n" * 100_000] = shards(folder)[0].name
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="nnn") as error:
        OfficialFolder.open(folder)
    assert len(str(error.value)) < 1000


def test_a_conversion_that_is_killed_leaves_nothing_under_its_name(tmp_path):
    saved(tmp_path / "a")
    code = (
        "import os, sys\n"
        "from openk3.checkpoint.official.convert import convert_official\n"
        "from openk3.checkpoint.official.folder import OfficialFolder\n"
        "written = []\n"
        "def progress(size):\n"
        "    written.append(size)\n"
        "    if len(written) == 60: os.kill(os.getpid(), 9)\n"
        "with OfficialFolder.open(sys.argv[1]) as folder:\n"
        "    convert_official(folder, sys.argv[2], experts='mxfp4', progress=progress)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a"), str(tmp_path / "b")], timeout=300)
    assert done.returncode == -9
    (left,) = (path for path in tmp_path.iterdir() if path.name != "a")
    assert left.name.startswith("b.partial-")
    assert survey(left).problems  # not even under its own name
    with OfficialFolder.open(tmp_path / "a") as folder:
        convert_official(folder, tmp_path / "b", experts="mxfp4")
    load_official(tmp_path / "b")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("what", ["norm.weight", "A_log", "w1.weight"])
def test_values_that_are_not_finite_are_not_loaded_converted_or_verified(tmp_path, what, value):
    folder = saved(tmp_path / "a")
    (folder / "checksums.json").unlink()
    shard = shards(folder)[1]
    tensors = load_file(shard)
    name = next(n for n in tensors if n.endswith(what))
    tensors[name].view(-1)[1] = value
    save_file(tensors, shard)
    named = rf"{shard.name}: {name} holds values that are not finite"
    with pytest.raises(CheckpointError, match=named):
        load_official(folder)
    with OfficialFolder.open(folder) as opened:
        with pytest.raises(CheckpointError, match=named):
            verify(opened)
        with pytest.raises(CheckpointError, match=named):
            convert_official(opened, tmp_path / "b", experts="bf16")
    assert not (tmp_path / "b").exists()


def test_scales_that_are_none_are_not_copied_either(tmp_path):
    folder = saved(tmp_path / "q", experts="mxfp4")
    (folder / "checksums.json").unlink()
    tensors = load_file(shards(folder)[1])
    name = next(n for n in tensors if n.endswith("weight_scale"))
    tensors[name][0, 0] = 255
    save_file(tensors, shards(folder)[1])
    with OfficialFolder.open(folder) as opened:
        with pytest.raises(CheckpointError, match=name):
            verify(opened)
        with pytest.raises(CheckpointError, match=name):
            convert_official(opened, tmp_path / "b", experts="mxfp4")
