"""Reads lists of tokens: those to keep, and those to add."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from bowline.checkpoint.formats.strict_json import shown
from bowline.edit.tokenizer.stored_tokenizer import StoredTokenizer
from bowline.errors import UsageError

__all__ = ["keep_file", "read_token_list"]

MOST_BYTES = 256 << 20


def read_token_list(path: Path) -> list[str]:
    """The tokens of a file, one a line, UTF-8. Empty lines do not count.

    A line in double quotes is a JSON string, for tokens with line ends, quotes or spaces at an end: `"\\n"`.

    Raises:
        UsageError: the file is missing or not UTF-8, or a quoted line is not JSON.
    """
    return [text for _, text in _lines(path)]


def keep_file(tokenizer: StoredTokenizer, path: Path) -> list[int]:
    """The ids of the tokens that a file names, one a line, as in the vocabulary (`Ġthe`, `##ing`).

    A line in double quotes is a JSON string. A line that is not a token, but a whole number, is an id.

    Raises:
        UsageError: the file cannot be read, or a line names a token or an id that the tokenizer does not have.
    """
    texts = set(tokenizer.ids.values())
    found: list[int] = []
    for line, text in _lines(path):
        number = tokenizer.ids.get(text)
        if number is None and text.isascii() and text.isdigit() and len(text) < 16 and int(text) in texts:
            number = int(text)
        if number is None:
            raise UsageError(
                f"{path}: line {line}: {shown(text)} is not a token, and not the id of one",
                help="write tokens as the vocabulary of tokenizer.json does, or their ids",
                argument="keep_tokens",
            )
        found.append(number)
    return found


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The number of each line with its token."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UsageError(f"{path}: more than {MOST_BYTES} bytes, expected a list of tokens", help="name a list")
        lines = path.read_bytes().decode("utf-8").split("\n")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", help="name a file with one token a line") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}", help="convert the file to UTF-8") from None
    for number, line in enumerate(lines, start=1):
        line = line.removesuffix("\r")
        if len(line) > 1 and line.startswith('"') and line.endswith('"'):
            try:
                line = json.loads(line)
            except json.JSONDecodeError as error:
                raise UsageError(
                    f"{path}: line {number}: not a JSON string ({error.msg})", help="leave the quotes out, or escape it"
                ) from None
        if line:
            yield number, line
