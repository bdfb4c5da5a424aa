"""The base of every configuration: frozen, typed, and intolerant of unknown fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from openk3.errors import InvalidInput


class StrictModel(BaseModel):
    """Frozen and `extra="forbid"`: a typo is an error that names the field."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


Config = TypeVar("Config", bound=BaseModel)


def parse(kind: type[Config], values: Mapping[str, Any], source: str) -> Config:
    """`values` as a `kind`; `source` says where they came from (a file, the command line).

    Raises:
        InvalidInput: every unknown, missing or wrong field by name, in one line.
    """
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        raise InvalidInput(f"{source}: {explain(error)}") from None


def explain(error: ValidationError) -> str:
    """pydantic's findings as `field: what is wrong`, joined to one line."""
    findings = []
    for item in error.errors():
        field = ".".join(str(part) for part in item["loc"]) or "(whole)"
        what = (
            "unknown field"
            if item["type"] == "extra_forbidden"
            else item["msg"].removeprefix("Value error, ")
        )
        findings.append(f"{field}: {what}")
    return "; ".join(findings)
