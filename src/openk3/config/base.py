"""The base of every configuration: frozen, typed, and intolerant of unknown fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from openk3.errors import InvalidInput

Size = Annotated[int, Field(ge=1, le=2**20)]
"""A width or a number of things in a model: the product of three, in bytes, is still an int64."""

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""A number of steps, tokens or the like that fits an int32."""


class StrictModel(BaseModel):
    """Frozen and `extra="forbid"`: a typo is an error that names the field.

    Numbers are finite where the field does not say otherwise. Text is read as the type of the field, as a
    command line needs; but true is no number, and no text holds a NUL, which would end a path in it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_kinds(cls, values: Any) -> Any:
        for name, value in values.items() if isinstance(values, Mapping) else ():
            kind = cls.model_fields[name].annotation if name in cls.model_fields else bool
            if isinstance(value, bool) and bool not in (kind, *get_args(kind)):
                raise ValueError(f"{name} must not be {str(value).lower()}")
            if isinstance(value, str) and "\0" in value:
                raise ValueError(f"{name} holds a NUL character")
        return values


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
