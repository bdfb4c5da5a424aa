"""A disk that refuses: one clear line, the checkpoint before it still loads, nothing half-built stays."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from saving_child import CONFIG, flat, state_at

from openk3.checkpoint.train_state import CheckpointStore
from openk3.errors import StorageError


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "openk3-test", str(disk)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a small file system here: {error}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@contextlib.contextmanager
def files_at_most(size: int):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def without_permission_to_write(folder: Path):
    """As a user who may look into `folder` and change nothing there."""
    if os.geteuid() == 0:
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)
    else:
        folder.chmod(0o500)
        try:
            yield
        finally:
            folder.chmod(0o700)


def assert_only_the_first_is_left(store: CheckpointStore) -> None:
    assert os.listdir(store.folder) == ["step-00000001"]
    assert flat(store.load(config=CONFIG)) == flat(state_at(1))


def test_a_disk_that_fills_up_at_any_point_of_a_save_loses_nothing(small_disk):
    store = CheckpointStore(small_disk / "checkpoints")
    store.save(1, state_at(1), config=CONFIG)
    filler = small_disk / "filler"
    free, outcomes = 0, []
    while True:
        filler.unlink(missing_ok=True)
        room = os.statvfs(small_disk)
        filler.write_bytes(bytes(room.f_bavail * room.f_frsize - free))
        try:
            store.save(2, state_at(2), config=CONFIG)
        except StorageError as error:
            outcomes.append(str(error))
            assert_only_the_first_is_left(store)
            free += 4096
        else:
            break
    assert flat(store.load()) == flat(state_at(2))
    assert len(outcomes) >= 5  # shards, .metadata, state.json and the manifest each met the end of the disk
    for line in outcomes:
        assert line.startswith(str(store.folder))
        assert line.endswith("cannot write: No space left on device")
        assert "\n" not in line


@pytest.mark.parametrize("size", [100, 3000, 10_000])
def test_a_file_size_limit_is_reported_like_a_full_disk(tmp_path, size):
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(1, state_at(1), config=CONFIG)
    with files_at_most(size), pytest.raises(StorageError, match=r"cannot write: File too large$"):
        store.save(2, state_at(2), config=CONFIG)
    assert_only_the_first_is_left(store)
    store.save(2, state_at(2), config=CONFIG)


def test_a_folder_without_permission_is_named():
    with tempfile.TemporaryDirectory() as top:  # not tmp_path, which others may not even look into
        Path(top).chmod(0o755)
        store = CheckpointStore(Path(top) / "checkpoints")
        store.save(1, state_at(1), config=CONFIG)
        with (
            without_permission_to_write(store.folder),
            pytest.raises(StorageError, match=r"checkpoints/step-00000002: cannot write: Permission denied$"),
        ):
            store.save(2, state_at(2), config=CONFIG)
        assert_only_the_first_is_left(store)


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_file_in_the_place_of_the_folder_is_named_and_kept(tmp_path, below):
    file = tmp_path / "checkpoints"
    file.write_text("mine")
    store = CheckpointStore(file / below)
    with pytest.raises(StorageError, match=r"/checkpoints: is a file where a folder is needed$"):
        store.save(1, state_at(1), config=CONFIG)
    assert file.read_text() == "mine"


def test_an_interrupt_inside_the_writing_of_tensors_stays_an_interrupt_and_leaves_nothing(
    tmp_path, monkeypatch
):
    """DCP turns whatever happens in there into an exception of its own."""
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(1, state_at(1), config=CONFIG)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.save(2, state_at(2), config=CONFIG)
    assert_only_the_first_is_left(store)


def test_everything_is_on_disk_before_it_has_its_name_and_before_anything_older_goes(tmp_path, monkeypatch):
    """A power cut keeps what was synced: record the order of syncs and renames of a save that purges."""
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    store.save(1, state_at(1), config=CONFIG)
    done: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def recorded_fsync(descriptor):
        fsync(descriptor)
        done.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))

    def recorded_rename(old, new):
        rename(old, new)
        done.append(("rename", str(new)))

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    store.save(2, state_at(2), config=CONFIG)

    published = done.index(("rename", str(store.path(2))))
    synced = {path for what, path in done[:published] if what == "sync" and ".partial-" in path}
    partial = os.path.commonpath(synced)
    assert {os.path.relpath(path, partial) for path in synced} >= {".", *os.listdir(store.path(2))}
    last_file = max(i for i, (_, path) in enumerate(done[:published]) if os.path.dirname(path) == partial)
    assert ("sync", partial) in done[last_file:published]
    assert done[published + 1] == ("sync", str(store.folder))
    removed = [i for i, (what, path) in enumerate(done) if what == "rename" and "step-00000001." in path]
    assert len(removed) == 1
    assert removed[0] > published + 1
