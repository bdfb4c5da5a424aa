"""Rules of the repository that no linter knows: light imports, short files, docstrings, no local paths."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "openk3"
MODULES = sorted(PACKAGE.rglob("*.py"))
TEXT = {".py", ".md", ".toml", ".txt", ".sh", ".json", ".html", ".css", ".js", ""}
FOLDERS = (".ci", "bench", "docs", "recipes", "src", "tests", "tools")

SERVER = {"fastapi", "starlette", "uvicorn", "aiohttp", "flask"}
GRAMMAR = {"xgrammar", "llguidance", "outlines", "outlines_core", "lark"}
DEDUP = {"datasketch", "scipy", "pyarrow"}
DRAWING = {"matplotlib", "PIL"}
HEAVY = {"torch", "tokenizers", "transformers", "typer", *SERVER, *GRAMMAR, *DEDUP, *DRAWING}


def written_by_hand() -> list[Path]:
    """Every text file of the repository; build products and environments lie outside these folders."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    files += [path for path in ROOT.iterdir() if path.name != "LICENSE"]
    return sorted(p for p in files if p.is_file() and p.suffix in TEXT and "__pycache__" not in p.parts)


def python(code: str) -> str:
    """What `code` prints in a fresh interpreter that sees the package and nothing of this process."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(PACKAGE.parent)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_by(module: str) -> set[str]:
    """The top-level packages that `import module` loads."""
    code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    return set(python(code).split())


@pytest.mark.parametrize(
    "module", ["openk3", "openk3.errors", "openk3.config", "openk3.chat", "openk3.cli.main"]
)
def test_what_needs_no_tensors_imports_no_torch(module):
    allowed = {"typer"} if module == "openk3.cli.main" else set()
    assert loaded_by(module) & (HEAVY - allowed) == set()


def test_training_imports_no_server_no_grammar_and_no_deduplication():
    loaded = loaded_by("openk3.ops, openk3.model, openk3.optim, openk3.train")
    assert loaded & (SERVER | GRAMMAR | DEDUP | DRAWING | {"typer", "transformers"}) == set()


@pytest.mark.parametrize(
    ("module", "seconds"), [("openk3", 0.1), ("openk3.config", 1.5), ("openk3.chat", 1.5)]
)
def test_light_modules_import_quickly(module, seconds):
    """CPU time of the process, so that a busy machine does not count; best of three, against a cold disk."""
    code = f"import time; t = time.process_time(); import {module}; print(time.process_time() - t)"
    assert min(float(python(code)) for _ in range(3)) < seconds


def test_every_operator_is_importable_alone():
    """An operator can be used as a library: it loads nothing of openk3 above its own floor.

    Each is the first import of a process of its own, forked after the slow import of torch.
    """
    names = [f"openk3.ops.{path.parent.name}" for path in sorted(PACKAGE.glob("ops/*/__init__.py"))]
    code = f"""
import importlib, os, sys, torch
for name in {names}:
    if os.fork() == 0:
        importlib.import_module(name)
        ours = [module for module in sys.modules if module.startswith("openk3.")]
        print(name, *(m for m in ours if m.split(".")[1] not in ("ops", "errors")), flush=True)
        os._exit(0)
    os.wait()
"""
    assert python(code).splitlines() == names


def test_every_module_opens_with_a_docstring():
    silent = [str(path) for path in MODULES if not ast.get_docstring(ast.parse(path.read_text()))]
    assert silent == []


def test_every_file_can_be_held_in_the_head():
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "check_file_sizes.py"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_no_file_names_a_machine_or_a_package_host():
    """What is committed works anywhere: no path of a home or work folder, no host to install from."""
    place = re.compile(r"(?<![\w.~}>)])/(home|root|work|workspace|Users|mnt|opt)/\w")
    host = re.compile(r"py[p]i\.|python[h]osted|--(extra-)?index[-]url|--find[-]links|download\.py[t]orch")
    for path in written_by_hand():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found = place.search(line) or host.search(line)
            assert not found, f"{path.relative_to(ROOT)}:{number}: {found and found.group()}"


def test_library_code_holds_no_stub_and_no_note_to_self():
    unfinished = re.compile(r"NotImplementedError|\b(TODO|FIXME|XXX|HACK)\b")
    swallowed = re.compile(r"except\s*:|except (Base)?Exception\b")
    for path in MODULES:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found = unfinished.search(line) or swallowed.search(line)
            assert not found, f"{path.relative_to(ROOT)}:{number}: {line.strip()}"


def test_no_two_test_files_share_a_name():
    """pytest collects `tests/` without packages: two files of one name would shadow each other."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_everything_imported_is_declared():
    """Whatever the code imports, at the top of a module or inside a function, is a dependency or an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(r for extra in project["optional-dependencies"].values() for r in extra),
    ]
    declared = {re.split(r"[<>=\[;~! ]", requirement)[0].lower().replace("-", "_") for requirement in wanted}
    provided = {
        "openk3",
        "tomli_w",
        "tensorboardx",
        "triton",
        *declared,
        *map(str.lower, sys.stdlib_module_names),
    }
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for name in names:
                top = name.partition(".")[0].lower()
                assert top in provided, (
                    f"{path.relative_to(ROOT)} imports {top}, which pyproject.toml does not declare"
                )
