"""JSON on which every reader agrees is read; the rest is refused, and nothing in it can crash the reader."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bowline.checkpoint.formats.strict_json import DEEPEST, loads, shown
from bowline.errors import FormatError


@pytest.mark.parametrize(
    ("data", "seen"),
    [
        (b"", "not JSON"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (b'"\xff"', "byte 0xff at 1: invalid start byte"),
        ('{"a": 1}'.encode("utf-16"), "byte 0xff at 0"),
        (b"{} {}", "not JSON at character 3 (Extra data)"),
        (b"{}\0", "not JSON"),
        (b'{"a": 1, "a": 1}', "the key 'a' occurs twice"),
        (b'{"a": {"b": [{"c": 1, "\\u0063": 2}]}}', "the key 'c' occurs twice"),
        (b"[NaN]", "NaN is not a JSON value"),
        (b"[-Infinity]", "-Infinity is not a JSON value"),
        (b"[1e999]", "the number 1e999"),
        (b"[-" + b"9" * 700 + b"]", "an integer of 701 digits"),
        (b'["\\ud800"]', "the lone surrogate '\\ud800'"),
        (b'{"\\uDFFF": 1}', "the lone surrogate '\\udfff'"),
        (b"[" * (DEEPEST + 1) + b"]" * (DEEPEST + 1), "128 levels"),
        (b'{"a":' * 100_000, "100000 levels"),
        (b"[[]," * 100_000, "100001 levels"),
        (b'["\\\\",' * 100_000, "100000 levels"),
        (b'["\\"",' * 100_000, "100000 levels"),
    ],
)
def test_what_readers_may_disagree_on_is_refused(data: bytes, seen: str) -> None:
    with pytest.raises(FormatError) as raised:
        loads(data, "config.json", help="restore it")
    assert raised.value.message.startswith("config.json: ")
    assert seen in raised.value.message
    assert raised.value.message.isprintable()
    assert raised.value.help == "restore it"


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"[" * DEEPEST + b"]" * DEEPEST, None),
        (b'{"a": "[[{{\\"[[\\\\"}', None),
        (b'["\\ud83d\\ude00", "\\u00e9", "\\\\ud800"]', ["😀", "é", "\\ud800"]),
        (b" \n\t\r null ", None),
        (b"[18446744073709551616, -1, 1e3, 0.5]", [2**64, -1, 1000.0, 0.5]),
    ],
)
def test_json_is_read_as_python_reads_it(data: bytes, value: object) -> None:
    assert loads(data, "x") == json.loads(data)
    assert value is None or loads(data, "x") == value


def test_negative_zero_is_a_float_as_it_is_outside_of_python() -> None:
    value = loads(b"-0", "x")
    assert isinstance(value, float)
    assert math.copysign(1, value) == -1


def test_nonfinite_tokens_are_read_where_they_are_allowed() -> None:
    assert loads(b'{"time_step_limit": [0.0, Infinity]}', "config.json", allow_nonfinite=True) == {
        "time_step_limit": [0.0, math.inf]
    }
    with pytest.raises(FormatError, match="1e999"):
        loads(b"[1e999]", "config.json", allow_nonfinite=True)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(json_values, st.booleans(), st.sampled_from([None, 2]))
def test_what_python_writes_is_read_back(value: object, ascii_only: bool, indent: int | None) -> None:
    assert loads(json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode(), "x") == value


@given(st.text(alphabet='[]{}"\\,:0a \n\ud7ffé', max_size=60))
def test_any_text_is_read_as_python_reads_it_or_refused(text: str) -> None:
    try:
        value = loads(text.encode(), "x")
    except FormatError:
        return
    assert value == json.loads(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a\x1b\u202e\n", r"'a\x1b\u202e\n'"),
        ("x" * 81, "'" + "x" * 80 + "'... (81 characters)"),
        (None, "null"),
        (False, "false"),
        ([1] * 10**6, "an array of 1000000"),
        ({"a": 1}, "an object of 1"),
        (-0.0, "-0.0"),
        (10**100, "1" + "0" * 79 + "... (101 characters)"),
    ],
)
def test_a_value_is_shown_in_one_short_printable_line(value: object, text: str) -> None:
    assert shown(value) == text
