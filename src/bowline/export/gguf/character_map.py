"""SentencePiece's map of characters as llama.cpp walks it: a trie over bytes, and the texts that replace them.

A unit of the trie has a label in its lowest byte, a leaf's mark in bit 8, and the distance to its children in the rest
(the double array of Darts-clone). llama.cpp stops with an error in the middle of a text if a unit points outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from bowline.errors import FormatError

__all__ = ["REPAIR", "checked_charsmap"]

REPAIR = "load the tokenizer with transformers.AutoTokenizer and save it with save_pretrained"
Units = npt.NDArray[np.int64]
BLOCK, LABEL, LEAF, WIDE = 255, 1 << 31 | 255, 1 << 8, 1 << 9
LABELS = np.arange(1, 256, dtype=np.int64)
AT_ONCE = 4096
DEEPEST = 1024
"""Bytes of the longest sequence of characters that is replaced; SentencePiece's own have some dozens."""


def checked_charsmap(data: bytes, place: str) -> bytes:
    """The map of characters, if llama.cpp can read it: the length of a trie, the trie, and texts that end in zero.

    Raises:
        FormatError: it is malformed, or a unit of the trie points outside.
    """
    if not data:
        return data
    length = int.from_bytes(data[:4], "little")
    if len(data) < 5 or length % 4 or 4 + length >= len(data) or data[-1] != 0:
        raise FormatError(
            f"{place}: {len(data)} bytes, expected 4 for a length, a trie of that length and texts that end in zero",
            help=REPAIR,
        )
    units = np.frombuffer(data, "<u4", length // 4, 4)
    for problem in _problems(units, len(data) - 4 - length):
        raise FormatError(f"{place}: {problem}", help=REPAIR)
    return data


def _problems(units: npt.NDArray[Any], texts: int) -> Iterator[str]:
    """The fault of a trie whose leaves point into this many bytes of texts."""
    seen = np.zeros(len(units), bool)
    leaves = np.zeros(0, np.int64)
    starts = _distances(units[:1].astype(np.int64))
    for _ in range(DEEPEST):
        if not len(starts):
            return
        if int((starts | BLOCK).max()) >= len(units):
            yield f"the trie has {len(units)} units, and one points to {int(starts.max())}"
            return
        if len(leaves) and int((units[leaves] & 0x7FFFFFFF).max()) >= texts:
            yield f"a leaf of the trie points outside the {texts} bytes of texts"
            return
        nodes = np.concatenate(
            [_children(units, seen, part) for part in np.array_split(starts, len(starts) // AT_ONCE + 1)]
        )
        found = units[nodes].astype(np.int64)
        starts = nodes ^ _distances(found)
        leaves = starts[found & LEAF != 0]
    yield f"the trie is deeper than {DEEPEST} bytes"


def _distances(units: Units) -> Units:
    return (units >> 10) << ((units & WIDE) >> 6)


def _children(units: npt.NDArray[Any], seen: npt.NDArray[np.bool_], starts: Units) -> Units:
    """The children of nodes that were not seen before; marks them as seen."""
    places = starts[:, None] ^ LABELS
    found: Units = places[(units[places] & LABEL) == LABELS]
    found = found[~seen[found]]
    seen[found] = True
    return found
