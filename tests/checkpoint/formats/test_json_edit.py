"""Flags are set in the text of a config, and nothing else in it changes: not a space, not a number's spelling."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bowline.checkpoint.formats.json_edit import set_values
from bowline.errors import ConfigError

FLAG = "tie_word_embeddings"


@pytest.mark.parametrize(
    ("before", "path", "after"),
    [
        ('{"tie": false}', "tie", '{"tie": true}'),
        ('{"tie":false,"a":1}', "tie", '{"tie":true,"a":1}'),
        ('{\n  "tie" :\tfalse\r\n}', "tie", '{\n  "tie" :\ttrue\r\n}'),
        ('{"tie": null}\n', "tie", '{"tie": true}\n'),
        ('{"tie": {"deep": [1, {"tie": false}]}}', "tie", '{"tie": true}'),
        ('{"tie": "false"}', "tie", '{"tie": true}'),
        ("{}", "tie", '{"tie": true}'),
        ("{ }", "tie", '{"tie": true }'),
        ('{"a": 1e-05}', "tie", '{"tie": true, "a": 1e-05}'),
        ('{\n  "a": 1\n}', "tie", '{\n  "tie": true,\n  "a": 1\n}'),
        ('{\r\n\t"a": 1\r\n}', "tie", '{\r\n\t"tie": true,\r\n\t"a": 1\r\n}'),
        ('{"a": {}, "b": {"a": 1}}', "a.tie", '{"a": {"tie": true}, "b": {"a": 1}}'),
        ('{"tie": false, "t": {"tie": false}}', "t.tie", '{"tie": false, "t": {"tie": true}}'),
        ('{"t": {"tie": false}, "tie": false}', "tie", '{"t": {"tie": false}, "tie": true}'),
        ('{"s": "\\"tie\\": false", "tie": false}', "tie", '{"s": "\\"tie\\": false", "tie": true}'),
        ('{"t\\u0069e": false}', "tie", '{"t\\u0069e": true}'),
        ('{"ключ": "значение", "tie": false}', "tie", '{"ключ": "значение", "tie": true}'),
        ('{"a": [NaN, -Infinity], "tie": false}', "tie", '{"a": [NaN, -Infinity], "tie": true}'),
        ('  {"tie": false}  ', "tie", '  {"tie": true}  '),
    ],
)
def test_only_the_value_changes(before: str, path: str, after: str) -> None:
    assert set_values(before, {path: True}) == after


def test_several_levels_are_set_at_once() -> None:
    before = '{"tie": true, "text_config": {"tie": true, "deep": {"tie": true}}}'
    after = '{"tie": false, "text_config": {"tie": false, "deep": {"tie": false}}}'
    assert set_values(before, {"tie": False, "text_config.tie": False, "text_config.deep.tie": False}) == after


@pytest.mark.parametrize("text", ["[]", "null", '"x"', "", "   ", '{"a": [1]}', '{"a": null}', "{}"])
def test_an_object_that_is_not_there_is_an_error_and_not_made(text: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: "):
        set_values(text, {"a.tie": True})


# --- any config -----------------------------------------------------------------------------------------------------

KEYS = st.sampled_from(["a", "b", FLAG, "text_config", "ключ", 'q"uote', "back\\slash", "", "\n", "{", "}", ","])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6)
    | st.sampled_from(["\\", '"', '{"tie": false}', "\u2028", "😀", "}"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
CONFIGS = st.dictionaries(KEYS, VALUES, max_size=6)


@st.composite
def texts(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A config as some writer spells it, and the config."""
    config = draw(CONFIGS)
    indent = draw(st.sampled_from([None, 0, 2, 4, "\t"]))
    ascii_only = draw(st.booleans())
    separators = draw(st.sampled_from([None, (",", ":"), (" , ", " : ")]))
    text = json.dumps(config, indent=indent, ensure_ascii=ascii_only, separators=separators)
    if draw(st.booleans()):
        text = text.replace("\n", "\r\n")  # json.dumps escapes those within strings
    return draw(st.sampled_from(["", "\n", " \t"])) + text + draw(st.sampled_from(["", "\n"])), config


def objects(config: dict[str, Any], prefix: str = "") -> list[str]:
    """The dotted paths of all objects that a dotted path can name."""
    paths = [prefix]
    for key, value in config.items():
        if isinstance(value, dict) and key and "." not in key:
            paths += objects(value, f"{prefix}{key}.")
    return paths


@settings(max_examples=300)
@given(texts(), st.data())
def test_any_config_changes_as_its_dict_would(spelled: tuple[str, dict[str, Any]], data: st.DataObject) -> None:
    text, config = spelled
    path = data.draw(st.sampled_from(objects(config))) + FLAG
    value = data.draw(st.booleans())
    changed = set_values(text, {path: value})

    expected = json.loads(text)
    level = expected
    for key in path.split(".")[:-1]:
        level = level[key]
    was_there, old = FLAG in level, level.get(FLAG)
    level[FLAG] = value
    assert json.loads(changed) == expected

    if changed == text:
        assert was_there
        assert old is value
        return
    word = json.dumps(value)
    kept_before, kept_after = common_prefix(text, changed), common_suffix(text, changed)
    if was_there:  # all but the value's own characters is the old text
        assert any(
            text[:start] + word + text[stop:] == changed and parses_to(text[start:stop], old)
            for start in range(max(0, kept_before - len(word)), kept_before + 1)
            for stop in range(len(text) - kept_after, min(len(text), len(text) - kept_after + len(word)) + 1)
            if start < stop
        )
    else:  # all of the old text is there, with one member and its comma and space put in
        member = f'"{FLAG}": {word}'
        at = changed.rfind(member, 0, kept_before + len(member) + 1)
        added = len(changed) - len(text) - len(member)
        assert text == changed[:at] + changed[at + len(member) + added :]
        assert changed[at + len(member) :][:added].strip() in ("", ",")


def parses_to(text: str, value: object) -> bool:
    try:
        return bool(json.loads(text) == value)
    except json.JSONDecodeError:
        return False


def common_prefix(left: str, right: str) -> int:
    return next(
        (at for at, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), min(len(left), len(right))
    )


def common_suffix(left: str, right: str) -> int:
    return common_prefix(left[::-1], right[::-1])


@settings(max_examples=100)
@given(texts(), st.booleans())
def test_setting_a_flag_twice_is_setting_it_once(spelled: tuple[str, dict[str, Any]], value: bool) -> None:
    once = set_values(spelled[0], {FLAG: value})
    assert set_values(once, {FLAG: value}) == once


@settings(max_examples=100)
@given(texts(), st.booleans())
def test_setting_a_flag_back_gives_the_old_text(spelled: tuple[str, dict[str, Any]], value: bool) -> None:
    there = set_values(spelled[0], {FLAG: value})
    assert set_values(set_values(there, {FLAG: not value}), {FLAG: value}) == there
