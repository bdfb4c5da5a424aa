"""The state of a run as a tree, and its two halves on disk: tensors by path, everything else as JSON.

A state is a nested dict with string keys. Its leaves are tensors, or what JSON holds exactly: None, bool,
int, float (every value: Python's JSON also carries NaN and the infinities), str, and lists of these. A
tensor's path is its keys joined by "/", so that names with dots, such as parameters', stay what they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from openk3.errors import InvalidInput

State = dict[str, Any]


def split_state(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], State]:
    """The tensors of a state by path, and the tree without them.

    Raises:
        InvalidInput: a key or a leaf that would not come back as it was; names its path.
    """
    tensors: dict[str, torch.Tensor] = {}

    def rest(node: Mapping[str, Any], above: str) -> State:
        values: State = {}
        for key, leaf in node.items():
            if not isinstance(key, str) or not key or "/" in key:
                where = f"under {above[:-1]}" if above else "at the root"
                raise InvalidInput(f"state: key {key!r} {where} must be a non-empty string without '/'")
            path = above + key
            if isinstance(leaf, torch.Tensor):
                if leaf.is_meta:
                    raise InvalidInput(f"state: {path} is a meta tensor, which has no numbers to save")
                tensors[path] = leaf
            elif isinstance(leaf, Mapping):
                values[key] = rest(leaf, path + "/")
            else:
                _check_value(leaf, path)
                values[key] = leaf
        return values

    return tensors, rest(state, "")


def join_state(tensors: Mapping[str, torch.Tensor], values: State) -> State:
    """The inverse of `split_state`, but for the order of keys; puts the tensors into `values` itself."""
    for path, tensor in tensors.items():
        *folders, name = path.split("/")
        node = values
        for key in folders:
            node = node[key]
        node[name] = tensor
    return values


def differences(there: Any, here: Any, path: str = "") -> Iterator[str]:
    """One phrase per field in which two JSON trees differ, by its dotted path: the saved one, then ours."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in sorted(there.keys() | here.keys()):
            below = f"{path}.{key}" if path else key
            if key not in here:
                yield f"{below} is {there[key]!r} there and absent here"
            elif key not in there:
                yield f"{below} is absent there and {here[key]!r} here"
            else:
                yield from differences(there[key], here[key], below)
    elif there != here:
        yield f"{path} is {there!r} there and {here!r} here"


def _check_value(leaf: Any, path: str) -> None:
    if isinstance(leaf, list):
        for index, item in enumerate(leaf):
            _check_value(item, f"{path}[{index}]")
    elif leaf is not None and type(leaf) not in (bool, int, float, str):
        raise InvalidInput(
            f"state: {path} is a {type(leaf).__name__}; a leaf must be a tensor, None, bool, int, float, str "
            "or a list of such values"
        )
