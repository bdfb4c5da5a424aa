"""Numbers and texts that no configuration may hold, whichever field they come to."""

from __future__ import annotations

import pytest
from pydantic import PositiveFloat

from openk3.config import Count, ModelConfig, StrictModel, parse, preset
from openk3.errors import InvalidInput


class Inner(StrictModel):
    share: float = 0.5


class Outer(StrictModel):
    steps: Count = 1
    rate: PositiveFloat = 1.0
    path: str = ""
    switch: bool = False
    maybe: bool | None = None
    inner: Inner = Inner()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": True}, "steps must not be true"),
        ({"rate": False}, "rate must not be false"),
        ({"inner": {"share": True}}, "share must not be true"),
        ({"rate": float("inf")}, "rate: .*finite"),
        ({"rate": float("nan")}, "rate: "),
        ({"inner": {"share": "nan"}}, "inner.share: .*finite"),
        ({"steps": 10**30}, "steps: "),
        ({"path": "a\0b"}, "path holds a NUL"),
    ],
)
def test_what_is_no_plain_value_is_refused_by_field(values, message):
    with pytest.raises(InvalidInput, match=f"^here: .*{message}"):
        parse(Outer, values, "here")


def test_switches_and_the_text_of_a_command_line_are_read_as_their_type():
    found = parse(Outer, {"switch": True, "maybe": False, "steps": "7", "rate": "1e-3"}, "here")
    assert (found.switch, found.maybe, found.steps, found.rate) == (True, False, 7, 1e-3)


@pytest.mark.parametrize("field", ["num_layers", "vocab_size", "hidden_size", "dense_width", "max_context"])
def test_a_model_of_absurd_size_is_refused_at_once(field):
    with pytest.raises(InvalidInput, match=field):
        parse(ModelConfig, preset("nano").model_dump() | {field: 10**26}, "here")


@pytest.mark.parametrize("name", [3, None, ["nano"], ""])
def test_a_preset_is_named_by_text(name):
    with pytest.raises(InvalidInput, match="does not exist"):
        preset(name)
