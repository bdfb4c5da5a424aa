"""Recipes: `TrainConfig` from a TOML file or by name, any field set on the command line, and back to TOML.

TOML has no null: where a field may be absent, the word "none" says so. Paths are relative to the working
folder.
"""

from __future__ import annotations

import copy
import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import tomli_w
from pydantic import BaseModel

from openk3.config import parse, parse_toml, read_toml
from openk3.errors import InvalidInput
from openk3.train.config import TrainConfig

NONE = "none"
NOT_A_FIELD = "model.preset"
"""What the fields of the model's table start from."""
INSTEAD = {"train.steps": "train.tokens", "train.tokens": "train.steps"}
"""Setting the one on the command line takes back the other."""


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    folder = files("openk3") / "recipes"
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


def load_recipe(
    recipe: str | Path | Mapping[str, Any], overrides: Mapping[str, str] | None = None
) -> TrainConfig:
    """A recipe of the package by name, a TOML file, or what such a file holds, with fields set from text.

    Args:
        overrides: text by dotted field name, as `{"optim.lr": "2e-3"}`; read as the field's type. Lists and
            tables are written as in TOML.

    Raises:
        InvalidInput: no such recipe, or an unknown or wrong field; names it and the nearest one that exists.
    """
    values, source = _read(recipe)
    _check_names(_dotted(values), source)
    _check_names(overrides or {}, "command line", flag="--")
    for name, text in (overrides or {}).items():
        if name in INSTEAD:
            _unset(values, INSTEAD[name].split("."))
        _set(values, name.split("."), _value(name, text))
    where = source if not overrides else f"{source} with {' '.join(f'--{name}' for name in overrides)}"
    return parse(TrainConfig, read_table(TrainConfig, values), where)


def parse_overrides(words: Sequence[str]) -> dict[str, str]:
    """`--a.b value`, `--a.b=value` and a bare `--a.b` (true) as `{"a.b": "value"}`.

    Raises:
        InvalidInput: a word belongs to no field.
    """
    overrides: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or len(word) == 2:
            raise InvalidInput(f"command line: {word!r} belongs to no field; write --FIELD VALUE")
        name, equals, text = word[2:].partition("=")
        if not equals:
            text = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        overrides[name.replace("-", "_")] = text
    return overrides


def as_table(config: BaseModel) -> dict[str, Any]:
    """The config as plain TOML values; absent fields are left out, or "none" where that is no default."""
    table: dict[str, Any] = {}
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if value is None:
            if not (field.default is None and not field.is_required()):
                table[name] = NONE
        else:
            table[name] = _plain(value)
    return table


def as_toml(config: TrainConfig) -> str:
    """The resolved recipe; `load_recipe` of it gives an equal config."""
    return tomli_w.dumps(as_table(config))


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return as_table(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _read(recipe: str | Path | Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """A recipe's table, the caller's to change, and its name in messages."""
    if isinstance(recipe, Mapping):
        return copy.deepcopy(dict(recipe)), "recipe"
    if str(recipe) in recipe_names():
        content = (files("openk3") / "recipes" / f"{recipe}.toml").read_bytes()
        return parse_toml(content, f"recipe {recipe}"), f"recipe {recipe}"
    path = Path(recipe)
    if os.path.isfile(path):  # unlike `path.is_file()` also for a name that is too long
        return read_toml(path), str(path)
    near = difflib.get_close_matches(str(recipe), recipe_names(), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise InvalidInput(
        f"{recipe}: neither a recipe of the package ({', '.join(recipe_names())}) nor a TOML file{hint}"
    )


def _fields(kind: type[BaseModel]) -> Iterator[str]:
    """Dotted names of all fields, tables among them."""
    for name, field in kind.model_fields.items():
        yield name
        for table in _tables(field.annotation):
            yield from (f"{name}.{below}" for below in _fields(table))


def _tables(annotation: Any) -> list[type[BaseModel]]:
    """The config classes that a field can hold directly."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) not in (Union, UnionType, Annotated):  # what a list holds has no dotted name
        return []
    return [table for part in get_args(annotation) for table in _tables(part)]


def _check_names(names: Mapping[str, Any], source: str, flag: str = "") -> None:
    known = {*_fields(TrainConfig), NOT_A_FIELD}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
            hint = f"; did you mean {flag}{near[0]}?" if near else ""
            raise InvalidInput(f"{source}: unknown field {flag}{name}{hint}")


def _dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every key of nested tables by dotted name."""
    out = {}
    for key, value in values.items():
        out[prefix + key] = value
        if isinstance(value, Mapping):
            out |= _dotted(value, f"{prefix}{key}.")
    return out


def _value(name: str, text: str) -> Any:
    """Lists and tables are TOML; everything else is text, which the field's type reads."""
    if not text.startswith(("[", "{")):
        return text
    table = parse_toml(f"value = {text}".encode(errors="surrogateescape"), f"command line: --{name} {text}")
    if table.keys() != {"value"}:
        raise InvalidInput(f"command line: --{name} {text}: more than one value")
    return table["value"]


def _set(values: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *above, last = path
    for key in above:
        below = values.get(key)
        if key == "model" and isinstance(below, str):
            below = {"preset": below}
        values[key] = dict(below) if isinstance(below, Mapping) else {}
        values = values[key]
    values[last] = value


def _unset(values: dict[str, Any], path: Sequence[str]) -> None:
    *above, last = path
    for key in above:
        values = values.get(key, {})
    values.pop(last, None)


def read_table(kind: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `as_table`: "none" is None in the fields of `kind` that may be absent."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        field = kind.model_fields.get(key)
        annotation = field.annotation if field else None
        if value == NONE and NoneType in get_args(annotation):
            out[key] = None
        elif isinstance(value, Mapping):
            out[key] = dict(value)
            for table in _tables(annotation):
                out[key] = read_table(table, out[key])
        else:
            out[key] = value
    return out
