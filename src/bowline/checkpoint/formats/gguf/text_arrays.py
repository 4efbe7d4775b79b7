"""Decodes the texts of a GGUF file's arrays on demand: the tokens of a vocabulary, by number and by text."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from functools import cached_property

from bowline.checkpoint.formats.gguf.header import ArrayAt
from bowline.checkpoint.places.byte_source import ByteSource
from bowline.checkpoint.places.file_set import SMALL_FILE_LIMIT
from bowline.errors import FormatError

__all__ = ["TOKENS", "TokenIds", "read_token_ids"]

TOKENS = "tokenizer.ggml.tokens"
"""The key of the vocabulary."""


class TokenIds(Mapping[str, int]):
    """The tokens of a vocabulary, by text: the number of each. They are decoded when one is first asked for.

    A byte that is not UTF-8 is shown as U+FFFD. Of two tokens of one text the later has it.

    Example:
        >>> ids = TokenIds((1).to_bytes(8, "little") + b"a" + (2).to_bytes(8, "little") + b"bc", 2)
        >>> ids["bc"], ids.last
        (1, 'bc')
    """

    def __init__(self, raw: bytes, length: int) -> None:
        self.length = length
        """The number of tokens, those of equal text counted singly."""
        self._raw = raw

    @cached_property
    def texts(self) -> list[str]:
        """The text of each token."""
        raw, at, texts = self._raw, 0, []
        for _ in range(self.length):
            begin = at + 8
            at = begin + int.from_bytes(raw[at:begin], "little")
            texts.append(raw[begin:at].decode("utf-8", "replace"))
        return texts

    @property
    def last(self) -> str | None:
        """The text of the last token."""
        return self.texts[-1] if self.length else None

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {text: number for number, text in enumerate(self.texts)}

    def __getitem__(self, text: str) -> int:
        return self._ids[text]

    def __iter__(self) -> Iterator[str]:
        return iter(self._ids)

    def items(self) -> ItemsView[str, int]:
        """Each text with its number, as a view of the dictionary, which is faster than a mapping's own."""
        return self._ids.items()

    def values(self) -> ValuesView[int]:
        """The numbers, as such a view."""
        return self._ids.values()

    def __len__(self) -> int:
        return len(self._ids)


def read_token_ids(source: ByteSource, array: ArrayAt) -> TokenIds:
    """Read the bytes of an array of texts, whose extent `read_gguf_header` has checked.

    Raises `FormatError` if it is longer than 256 MB.
    """
    if array.nbytes > SMALL_FILE_LIMIT:
        raise FormatError(
            f"{source.name}: {array.length} tokens have {array.nbytes} bytes, expected at most {SMALL_FILE_LIMIT}",
            help="no vocabulary is that large; convert the model again",
        )
    return TokenIds(source.read_at(array.offset, array.nbytes), array.length)
