"""Writes a changed JSON value in the style of the text that it was read from."""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["written_like"]

_SECOND_LINE = re.compile(rb"\s*[\[{][ \t]*\r?\n([ \t]+)")
_SEPARATOR = re.compile(rb'"\s*:(\s)')


def written_like(value: Any, original: bytes) -> bytes:
    """The JSON text of `value`, with the indent, the escapes and the last line end of `original`.

    Example:
        >>> written_like({"ä": [1]}, b'{"a": 1}\\n').decode()
        '{"ä": [1]}\\n'
        >>> written_like({"a": [1]}, b'{\\n  "b": 2\\n}').decode()
        '{\\n  "a": [\\n    1\\n  ]\\n}'
    """
    start = original[:4096]
    indented = _SECOND_LINE.match(start)
    spaced = _SEPARATOR.search(start) is not None or indented is not None
    text = json.dumps(
        value,
        ensure_ascii=original.isascii() and b"\\u" in original,
        indent=indented.group(1).decode() if indented else None,
        separators=("," if indented else ", " if spaced else ",", ": " if spaced else ":"),
    )
    return text.encode("utf-8") + (b"\n" if original.endswith(b"\n") else b"")
