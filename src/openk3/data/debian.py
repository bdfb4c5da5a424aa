"""Documentation packages of Debian as corpora: fetched once with apt, unpacked into a cache, never installed.

The cache holds each package file under its own name beside the folder it unpacks to, so what is there is
what was fetched; version and sha256 go into the manifest. A package that is in the cache is not fetched
again: remove it to get a newer one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from openk3.checkpoint.atomic import make_folder, storage_errors
from openk3.errors import InvalidInput, MissingDependency

Fetch = Callable[[str, Path], None]  # puts the .deb of a package into a folder
Unpack = Callable[[Path, Path], None]  # unpacks a .deb into a folder


@dataclass(frozen=True)
class UnpackedPackage:
    """A package in the cache."""

    name: str
    version: str
    sha256: str  # of the .deb
    folder: Path


def default_cache() -> Path:
    """`$OPENK3_CACHE`, else `openk3` in the user's cache folder.

    Raises:
        InvalidInput: this user has no home folder.
    """
    if chosen := os.environ.get("OPENK3_CACHE"):
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "openk3"
    except RuntimeError:
        raise InvalidInput("no cache: this user has no home folder; set OPENK3_CACHE to a folder") from None


def apt_fetch(package: str, folder: Path) -> None:
    """`apt-get download`: asks the configured archives, checks their signatures, needs no rights."""
    _run(["apt-get", "download", "-qq", package], folder, f"cannot fetch the Debian package {package}")


def dpkg_unpack(deb: Path, folder: Path) -> None:
    """`dpkg-deb -x`: the files of a package, none of its scripts."""
    _run(["dpkg-deb", "-x", str(deb), str(folder)], deb.parent, f"cannot unpack {deb.name}")


def debian_package(
    package: str, cache: Path, *, fetch: Fetch = apt_fetch, unpack: Unpack = dpkg_unpack
) -> UnpackedPackage:
    """The unpacked package, from the cache if it is there.

    Raises:
        InvalidInput: apt knows no such package, or cannot reach its archive; the text is apt's own.
        MissingDependency: this system has no apt-get or dpkg-deb.
        StorageError: the cache cannot be written; nothing half-done stays in it.
    """
    folder = make_folder(cache / "debian")
    deb = _cached(folder, package)
    if deb is None:
        with storage_errors(folder), tempfile.TemporaryDirectory(dir=folder) as building:
            fetch(package, Path(building))
            fetched = _cached(Path(building), package)
            if fetched is None:
                raise InvalidInput(f"fetching the Debian package {package} brought no {package}_*.deb")
            deb = fetched.rename(folder / fetched.name)
    unpacked = folder / deb.stem
    if not unpacked.is_dir():
        with storage_errors(folder), tempfile.TemporaryDirectory(dir=folder) as building:
            unpack(deb, Path(building) / "files")
            (Path(building) / "files").rename(unpacked)
    version = deb.stem.split("_")[1].replace("%3a", ":")  # apt writes the epoch's colon so
    return UnpackedPackage(package, version, hashlib.sha256(deb.read_bytes()).hexdigest(), unpacked)


def _cached(folder: Path, package: str) -> Path | None:
    found = sorted(folder.glob(f"{package}_*.deb"))
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise InvalidInput(f"{folder}: several versions of one package ({names}); keep one")
    return found[0] if found else None


def _run(command: list[str], folder: Path, failure: str) -> None:
    if shutil.which(command[0]) is None:
        raise MissingDependency(
            f"{failure}: this system has no {command[0]}; Debian and Ubuntu have it. Elsewhere, unpack the "
            'files yourself and name their folder in a source of kind = "tree"'
        )
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("E:")] or [done.stderr.strip()]
        raise InvalidInput(f"{failure}: {said[-1]} (try `apt-get update`; the recipe names a Debian release)")
