"""What a corpus is made of: sources, cleaning, deduplication, split. Configuration only; `corpus` reads it.

A recipe is a TOML file. Those that come with the package go by name (`stdlib`, `debian-docs`); paths in a
file of your own are relative to that file.
"""

from __future__ import annotations

import importlib.resources
import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from openk3.config import StrictModel, parse, parse_toml, read_toml
from openk3.data.documents import Errors
from openk3.errors import InvalidInput


class _Source(StrictModel):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    errors: Errors = "strict"  # what to do with bytes that are not UTF-8
    document_characters: int | None = Field(
        default=None, ge=1024
    )  # cut longer documents at about this length


class TextSource(_Source):
    """One file, one document."""

    kind: Literal["text"]
    path: Path


class JsonlSource(_Source):
    """One document per line."""

    kind: Literal["jsonl"]
    path: Path
    field: str = "text"


class ParquetSource(_Source):
    """One document per row."""

    kind: Literal["parquet"]
    path: Path
    column: str = "text"


class TreeSource(_Source):
    """Every file below a folder that matches."""

    kind: Literal["tree"]
    path: Path
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()


class StdlibSource(_Source):
    """The sources of the Python standard library that runs this."""

    kind: Literal["python-stdlib"]


class PackagesSource(_Source):
    """The Python files of the packages that are installed beside it."""

    kind: Literal["python-packages"]


class TopicsSource(_Source):
    """The language documentation that CPython carries for `help()`."""

    kind: Literal["pydoc-topics"]


class DebianSource(_Source):
    """Files of a Debian package, fetched with apt into the cache."""

    kind: Literal["debian"]
    package: str = Field(pattern=r"^[a-z0-9][a-z0-9+.-]+$")
    include: tuple[str, ...]
    exclude: tuple[str, ...] = ()


Source = Annotated[
    TextSource
    | JsonlSource
    | ParquetSource
    | TreeSource
    | StdlibSource
    | PackagesSource
    | TopicsSource
    | DebianSource,
    Field(discriminator="kind"),
]


class SplitRules(StrictModel):
    """Which documents are held out, by a hash of their source."""

    validation_share: float = Field(default=0.05, gt=0, lt=1)  # of the documents
    validation_bytes: int = Field(default=4_000_000, gt=0)  # at most


class CleaningRules(StrictModel):
    """See `openk3.data.cleaning`."""

    nfc: bool = False  # prose only: it can change the meaning of source code
    min_characters: int = Field(default=64, ge=1)
    max_repeated_lines: float = Field(
        default=0.5, gt=0, le=1
    )  # share of characters; the stdlib's worst is 0.34
    min_compressed: float = Field(default=0.05, ge=0, lt=1)  # zlib size / size; the stdlib's smallest is 0.18
    max_controls: float = Field(default=0.01, ge=0, le=1)  # share of control and replacement characters


class DeduplicationRules(StrictModel):
    """See `openk3.data.dedup`. Exact duplicates are always dropped."""

    near: bool = True
    jaccard: float = Field(default=0.75, gt=0, le=1)
    shingle_words: int = Field(default=5, ge=1)
    bands: int = Field(default=14, ge=2, le=1024)
    rows: int = Field(default=8, ge=1, le=1024)


class Recipe(StrictModel):
    """A corpus, ready to be gathered."""

    name: str
    description: str = ""
    sources: tuple[Source, ...] = Field(min_length=1)
    split: SplitRules = SplitRules()
    cleaning: CleaningRules = CleaningRules()
    deduplication: DeduplicationRules = DeduplicationRules()


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    files = importlib.resources.files("openk3.data") / "recipes"
    return sorted(file.name.removesuffix(".toml") for file in files.iterdir() if file.name.endswith(".toml"))


def load_recipe(name: str | Path) -> Recipe:
    """A recipe of the package by name, or a TOML file.

    Raises:
        InvalidInput: no such recipe or file, not TOML, or a wrong field (named).
    """
    folder = None
    if str(name) in recipe_names():
        content = (importlib.resources.files("openk3.data") / "recipes" / f"{name}.toml").read_bytes()
        values = parse_toml(content, str(name))
    else:
        file = Path(name)
        if not os.path.isfile(file):  # unlike `file.is_file()` also for a name that is too long
            raise InvalidInput(
                f"{name}: neither a recipe of the package ({', '.join(recipe_names())}) nor a TOML file"
            )
        values, folder = read_toml(file), file.parent
    recipe = parse(Recipe, values, str(name))
    names = [source.name for source in recipe.sources]
    if twice := {source for source in names if names.count(source) > 1}:
        raise InvalidInput(f"{name}: source names must differ; {sorted(twice)} stand twice")
    if folder is None:
        return recipe
    sources = tuple(
        source.model_copy(update={"path": folder / source.path}) if hasattr(source, "path") else source
        for source in recipe.sources
    )
    return recipe.model_copy(update={"sources": sources})
