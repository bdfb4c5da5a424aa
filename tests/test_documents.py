"""What the documents say is true: snippets run, commands exist, paths lead somewhere, trees are complete."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from openk3.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "openk3"
README = (ROOT / "README.md").read_text()
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "bench").glob("*.md")),
]


def fences(text: str, language: str) -> list[str]:
    """The fenced blocks of `language`, without their fences."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


SNIPPETS = [
    (named(document), block) for document in DOCUMENTS for block in fences(document.read_text(), "python")
]
COMMAND_LINES = [
    line.removeprefix("$ ")
    for document in DOCUMENTS
    for block in fences(document.read_text(), "console")
    for line in block.splitlines()
    if line.startswith("$ ")
]


def run(arguments: list[str], folder: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("document", "code"), SNIPPETS, ids=[f"{d}-{i}" for i, (d, _) in enumerate(SNIPPETS)]
)
def test_python_snippets_run_as_printed(document, code, tmp_path):
    run(["-c", code], tmp_path)


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_console_commands_run_as_printed(line, tmp_path):
    """Blocks marked `console` are quick and need nothing; those that train or fetch are marked `sh`."""
    program, *words = shlex.split(line)
    assert program == "openk3"
    assert run(["-m", "openk3", *words], tmp_path)


def test_the_table_of_commands_is_the_command_line():
    assert re.findall(r"^\| `openk3 ([a-z]+)", README, flags=re.MULTILINE) == list(COMMANDS)


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_make_target_and_subcommand_in_a_document_exists(document):
    text = document.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    shell = "\n".join(
        [*fences(text, "sh"), *fences(text, "console"), *re.findall(r"`((?:make|openk3) [^`]*)`", text)]
    )
    assert set(re.findall(r"^\W*make ([a-z-]+)", shell, flags=re.MULTILINE)) <= targets
    assert set(re.findall(r"^\W*openk3 ([a-z]+)", shell, flags=re.MULTILINE)) <= set(COMMANDS)


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_links_lead_to_files_of_the_repository(document):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
        assert target.startswith("https://") or (document.parent / target).exists(), target


def tree() -> dict[str, str]:
    """The README's file tree: path from the root -> what is said of it. Two spaces of indent are a folder."""
    (block,) = [b for b in fences(README, "text") if "src/openk3/" in b]
    folders: list[str] = []
    found = {}
    for line in block.splitlines():
        indent, name, said = re.fullmatch(r"( *)(\S+) +(.*)", line).groups()
        folders = [*folders[: len(indent) // 2], name]
        found["".join(folders)] = said
    return found


def test_the_file_tree_names_what_exists():
    assert [path for path, said in tree().items() if not (ROOT / path).exists() or not said] == []


def test_the_file_tree_misses_nothing_of_the_package():
    """Each file, and each operator as one folder; for a package's `__init__.py` its folder speaks."""
    children = [path for path in PACKAGE.glob("*") if path.name != "py.typed"]
    children += [path for folder in children if folder.is_dir() for path in folder.glob("*")]
    wanted = {named(p) + "/" * p.is_dir() for p in children if "__" not in named(p)}
    assert wanted - set(tree()) == set()


def test_the_index_of_documents_and_the_list_of_benchmarks_are_complete():
    index, benchmarks = (ROOT / "docs" / "README.md").read_text(), (ROOT / "bench" / "README.md").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    scripts = {path.name for path in (ROOT / "bench").glob("*.py") if "__main__" in path.read_text()}
    assert {name for name in pages if f"({name})" not in index} == set()
    assert {name for name in scripts if f"({name})" not in benchmarks} == set()


def test_the_paper_map_names_files_that_exist_and_every_operator():
    text = (ROOT / "docs" / "paper-map.md").read_text()
    paths = re.findall(r"`([a-z_0-9]+/[^`\s]+)`", text)
    assert len(paths) > 20
    assert [p for p in paths if not (ROOT / p).exists() and not (PACKAGE / p).exists()] == []
    operators = {path.parent.name for path in PACKAGE.glob("ops/*/__init__.py")}
    assert {name for name in operators if f"ops/{name}/" not in text} == set()
