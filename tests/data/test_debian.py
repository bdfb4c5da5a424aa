"""The package cache with a fetcher that writes files instead of asking an archive."""

from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path

import pytest

from openk3.data.corpus import gather
from openk3.data.debian import apt_fetch, debian_package, default_cache, dpkg_unpack
from openk3.data.recipe import Recipe
from openk3.errors import InvalidInput, MissingDependency, StorageError


class Archive:
    """Stands for apt and dpkg: packages are tar files; counts what it is asked for."""

    def __init__(self, tmp_path: Path) -> None:
        self.root = tmp_path / "archive"
        self.fetched: list[str] = []
        self.unpacked: list[str] = []
        doc = self.root / "usr/share/doc/some-doc"
        (doc / "html").mkdir(parents=True)
        (doc / "guide.rst").write_text("Guide\n=====\n\nHow to.\n")
        (doc / "html" / "guide.rst").write_text("a copy")

    def fetch(self, package: str, folder: Path) -> None:
        self.fetched.append(package)
        with tarfile.open(folder / f"{package}_1%3a2.5-1_all.deb", "w") as tar:
            tar.add(self.root / "usr", "usr")

    def unpack(self, deb: Path, folder: Path) -> None:
        self.unpacked.append(deb.name)
        with tarfile.open(deb) as tar:
            tar.extractall(folder, filter="data")


@pytest.fixture
def archive(tmp_path) -> Archive:
    return Archive(tmp_path)


def get(archive: Archive, cache: Path):
    return debian_package("some-doc", cache, fetch=archive.fetch, unpack=archive.unpack)


def test_a_package_is_fetched_and_unpacked_once_with_version_and_hash(archive, tmp_path):
    cache = tmp_path / "cache"
    first, second = get(archive, cache), get(archive, cache)
    assert first == second
    assert (archive.fetched, len(archive.unpacked)) == (["some-doc"], 1)
    deb = cache / "debian" / "some-doc_1%3a2.5-1_all.deb"
    assert (first.name, first.version) == ("some-doc", "1:2.5-1")
    assert first.sha256 == hashlib.sha256(deb.read_bytes()).hexdigest()
    assert (first.folder / "usr/share/doc/some-doc/guide.rst").is_file()


def test_a_fetch_that_fails_leaves_nothing_half_done(archive, tmp_path):
    cache = tmp_path / "cache"

    def broken(package: str, folder: Path) -> None:
        (folder / f"{package}_1_all.deb").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="No space left"):
        debian_package("some-doc", cache, fetch=broken, unpack=archive.unpack)
    assert list((cache / "debian").iterdir()) == []
    assert get(archive, cache).version == "1:2.5-1"


def test_an_unpacking_that_fails_is_done_again_from_the_same_file(archive, tmp_path):
    cache = tmp_path / "cache"

    def broken(deb: Path, folder: Path) -> None:
        (folder / "usr").mkdir(parents=True)
        raise InvalidInput("cannot unpack")

    with pytest.raises(InvalidInput, match="cannot unpack"):
        debian_package("some-doc", cache, fetch=archive.fetch, unpack=broken)
    assert (get(archive, cache).folder / "usr/share/doc/some-doc/guide.rst").is_file()
    assert archive.fetched == ["some-doc"]


def test_a_fetch_that_brings_nothing_and_two_versions_in_the_cache_are_refused(archive, tmp_path):
    cache = tmp_path / "cache"
    with pytest.raises(InvalidInput, match=r"some-doc brought no some-doc_\*\.deb"):
        debian_package("some-doc", cache, fetch=lambda package, folder: None, unpack=archive.unpack)
    get(archive, cache)
    (cache / "debian" / "some-doc_3_all.deb").write_bytes(b"")
    with pytest.raises(InvalidInput, match=r"several versions of one package .*some-doc_3_all\.deb"):
        get(archive, cache)


def test_a_system_without_apt_is_told_what_to_do_instead(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependency, match=r'no apt-get.*kind = "tree"'):
        apt_fetch("some-doc", tmp_path)
    with pytest.raises(MissingDependency, match="no dpkg-deb"):
        dpkg_unpack(tmp_path / "a.deb", tmp_path / "files")


def test_what_apt_says_is_what_the_error_says(tmp_path, monkeypatch):
    apt = tmp_path / "apt-get"
    apt.write_text(
        "#!/bin/sh\necho 'W: a warning' >&2\necho 'E: Unable to locate package '$3 >&2\nexit 100\n"
    )
    apt.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(
        InvalidInput, match="cannot fetch the Debian package nope: E: Unable to locate package nope"
    ):
        apt_fetch("nope", tmp_path)


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("OPENK3_CACHE", str(tmp_path / "mine"))
    assert default_cache() == tmp_path / "mine"
    monkeypatch.delenv("OPENK3_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "openk3"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache() == Path.home() / ".cache" / "openk3"


def test_a_debian_source_reads_its_files_and_records_the_package(archive, tmp_path):
    recipe = Recipe.model_validate(
        {
            "name": "docs",
            "sources": [
                {
                    "name": "some",
                    "kind": "debian",
                    "package": "some-doc",
                    "include": ["usr/share/doc/some-doc/*.rst"],
                    "exclude": ["*/html/*"],
                }
            ],
        }
    )
    corpus = gather(recipe, tmp_path / "cache", package=lambda name, cache: get(archive, cache))
    (document,) = corpus.documents
    assert document.source == "some/usr/share/doc/some-doc/guide.rst"
    assert corpus.sources["some"].package.split()[:2] == ["some-doc", "1:2.5-1"]


def test_a_user_without_a_home_is_told_what_to_set(tmp_path, monkeypatch):
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("OPENK3_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(InvalidInput, match="OPENK3_CACHE"):
        default_cache()
    monkeypatch.setenv("OPENK3_CACHE", str(tmp_path))
    assert default_cache() == tmp_path
