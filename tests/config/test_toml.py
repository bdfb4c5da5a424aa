"""What TOML may bring: every odd file is either read as meant or refused in one line with its name."""

from __future__ import annotations

import pytest

from openk3.config import parse_toml, read_toml
from openk3.errors import InvalidInput


def test_windows_files_with_a_byte_order_mark_are_read():
    assert parse_toml(b"\xef\xbb\xbfa = 1\r\n[b]\r\nc = 2\r\n", "w.toml") == {"a": 1, "b": {"c": 2}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a = ", "not TOML"),
        (b"a = 1\na = 2", "not TOML"),
        (b"a = '\xff'", "not TOML"),
        (b"a = 1\0", "not TOML"),
        (b"a = " + b"9" * 6000, "not TOML"),
        (b"a = " + b"[" * 5000 + b"]" * 5000, "nested"),
        (b"a = " + b"{a = " * 5000 + b"1" + b"}" * 5000, "nested"),
        (b"[" + b"a." * 5000 + b"a]", "nested"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(content, message):
    with pytest.raises(InvalidInput, match=f"^odd.toml: .*{message}"):
        parse_toml(content, "odd.toml")


def test_a_name_that_is_no_file_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "absent", tmp_path / ("x" * 300), tmp_path / "nul\0"):
        with pytest.raises(InvalidInput, match=r"no such file|cannot read"):
            read_toml(path)
