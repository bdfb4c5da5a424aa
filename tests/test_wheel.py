"""The wheel as a user gets it: built, installed into an environment of its own, used from an empty folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def succeed(command: list[str | Path], **options: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built without isolation, so without network: the build backend is in the `dev` extra."""
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT]
    succeed(build)
    (path,) = out.glob("openk3-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A fresh environment with the wheel in it, and with the dependencies that these tests run on."""
    home = tmp_path_factory.mktemp("user")
    venv.create(home, with_pip=False)
    site = home / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    pip = [sys.executable, "-m", "pip", f"--python={home / 'bin' / 'python'}", "install"]
    succeed([*pip, "--no-deps", "--no-index", wheel])
    # Comes behind the wheel in sys.path, and the .pth files of that folder (an editable openk3) stay unread.
    (site / "dependencies-of-the-tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin"


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    return tmp_path_factory.mktemp("empty")


def run(installed: Path, empty: Path, *words: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return succeed([installed / words[0], *words[1:]], cwd=empty, env=environment)


def test_the_wheel_carries_the_whole_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    package = {name for name in names if name.startswith("openk3/")}
    source = ROOT / "src"
    files = [path for path in (source / "openk3").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert package == {str(path.relative_to(source)) for path in files}
    assert {"openk3/py.typed", "openk3/recipes/nano.toml"} <= package
    assert {name.partition("/")[0].rpartition(".")[-1] for name in set(names) - package} == {"dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_command_and_the_package_are_those_of_the_wheel(installed, empty):
    assert "quickstart" in run(installed, empty, "openk3", "--help")
    where = run(installed, empty, "python", "-c", "import openk3; print(openk3.__file__)")
    assert Path(where.strip()).is_relative_to(installed.parent)


def test_parameters_are_counted_from_an_empty_folder(installed, empty):
    counts = json.loads(run(installed, empty, "openk3", "params", "nano", "--json"))
    assert counts["total"] > counts["active"] > counts["active_non_embedding"] > 0
    assert run(installed, empty, "openk3", "params", "nano").count("total") >= 2


def test_recipes_are_found_by_name_from_an_empty_folder(installed, empty):
    code = """
from openk3.data.recipe import load_recipe as corpus, recipe_names as corpora
from openk3.train.recipes import load_recipe, recipe_names
print(*[name for name in recipe_names() if load_recipe(name)], *[name for name in corpora() if corpus(name)])
"""
    found = set(run(installed, empty, "python", "-c", code).split())
    assert found == {path.stem for path in ROOT.glob("src/openk3/**/recipes/*.toml")} != set()


def test_the_version_is_the_one_of_the_metadata(installed, empty):
    code = "from importlib.metadata import version; print(version('openk3'))"
    assert (
        run(installed, empty, "openk3", "--version").split()[-1]
        == run(installed, empty, "python", "-c", code).strip()
    )
