"""A file or a folder appears whole or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from openk3.checkpoint.atomic import (
    atomic_folder,
    atomic_write_bytes,
    atomic_write_json,
    atomic_write_text,
    make_folder,
    remove_folder,
    remove_partials,
)
from openk3.errors import StorageError


def test_content_is_written_as_given_and_replaced_as_a_whole(tmp_path):
    file = tmp_path / "config.toml"
    atomic_write_text(file, "a = 'é'\r\nb\n")
    assert file.read_bytes() == "a = 'é'\r\nb\n".encode()
    atomic_write_bytes(file, b"\x00\xff")
    assert file.read_bytes() == b"\x00\xff"
    atomic_write_json(str(file), {"a": [1, None, "é"]})
    assert json.loads(file.read_text()) == {"a": [1, None, "é"]}
    assert os.listdir(tmp_path) == ["config.toml"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failed_write_keeps_the_old_content_and_leaves_nothing_beside_it(tmp_path, monkeypatch, failing):
    file = tmp_path / "summary.json"
    file.write_text("old")

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, failing, refuse)
    with pytest.raises(StorageError, match=r"summary.json: cannot write: No space left on device$"):
        atomic_write_text(file, "new")
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["summary.json"]


def test_a_missing_folder_is_an_error_that_names_the_file(tmp_path):
    with pytest.raises(StorageError, match=r"nowhere/a.txt: cannot write: No such file or directory$"):
        atomic_write_text(tmp_path / "nowhere" / "a.txt", "x")


def test_a_folder_takes_its_name_only_when_its_block_has_ended(tmp_path):
    path = tmp_path / "shards"
    with atomic_folder(path) as building:
        (building / "inner").mkdir()
        (building / "inner" / "0.bin").write_bytes(b"0")
        assert not path.exists()
    assert (path / "inner" / "0.bin").read_bytes() == b"0"
    assert os.listdir(tmp_path) == ["shards"]


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_a_block_that_raises_leaves_no_folder(tmp_path, error):
    def build():
        with atomic_folder(tmp_path / "shards") as building:
            (building / "0.bin").write_bytes(b"0")
            raise error

    with pytest.raises(error):
        build()
    assert os.listdir(tmp_path) == []


def test_a_name_that_is_taken_is_refused_before_anything_is_built(tmp_path):
    (tmp_path / "shards").mkdir()
    with pytest.raises(StorageError, match=r"shards: exists already"), atomic_folder(tmp_path / "shards"):
        pytest.fail("the block must not run")


def test_only_leftovers_are_cleared(tmp_path):
    for name in ("a.partial-0123", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / "c.json.partial-4567").write_text("x")
    (tmp_path / "partial").write_text("x")
    remove_partials(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["b", "partial"]
    remove_folder(tmp_path / "b")
    assert sorted(os.listdir(tmp_path)) == ["partial"]


def test_folders_are_made_with_their_parents_and_an_existing_one_is_fine(tmp_path):
    folder = tmp_path / "a" / "b"
    assert make_folder(folder) == folder
    assert make_folder(str(folder)).is_dir()
    (folder / "file").write_text("x")
    with pytest.raises(StorageError, match=r"a/b/file: is a file where a folder is needed$"):
        make_folder(folder / "file" / "c")


def test_atomic_writes_do_not_load_torch():
    code = "import sys, openk3.checkpoint.atomic, openk3.checkpoint.jsonl; sys.exit('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_a_link_that_leads_nowhere_is_in_the_way_of_a_folder(tmp_path):
    (tmp_path / "link").symlink_to("nowhere")
    for path in (tmp_path / "link", tmp_path / "link" / "inside"):
        with pytest.raises(
            StorageError, match=r"link: is a link that leads nowhere where a folder is needed"
        ):
            make_folder(path)
    with pytest.raises(StorageError, match="exists already"), atomic_folder(tmp_path / "link"):
        raise AssertionError("nothing is built")
