"""Compares how the old and the pruned tokenizer split a corpus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bowline.auditing.progress import Progress
from bowline.checkpoint.formats.strict_json import shown
from bowline.edit.tokenizer.library import load, load_checked
from bowline.edit.tokenizer.selection import TokenSelection
from bowline.edit.tokenizer.stored_tokenizer import StoredTokenizer
from bowline.edit.tokenizer.token_counts import batches

__all__ = ["SplitCheck", "check_split"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCheck:
    """What was compared, up to the first difference."""

    documents: int
    tokens: int
    difference: str | None
    """The first difference in words, or `None` if the pruned tokenizer gives exactly the mapped ids."""


def check_split(
    tokenizer: StoredTokenizer,
    pruned: bytes,
    selection: TokenSelection,
    paths: Sequence[Path] = (),
    progress: Progress | None = None,
) -> SplitCheck:
    """Whether the pruned `tokenizer.json` has each token under its new id and splits each document to the mapped ids.

    The documents are split with the special tokens that frame them. Without `paths` only the ids are compared.

    Raises:
        UsageError: a file of the corpus is missing, empty or not UTF-8.
        FormatError: the library refuses the pruned tokenizer.
    """
    before, after = load_checked(tokenizer), load(pruned)
    texts = tokenizer.texts
    for new, old in enumerate(selection.kept.tolist()):
        found = after.token_to_id(texts[old]) if old in texts else new
        if found != new:
            seen = f"the token {shown(texts[old])} has the id {found}, expected {new} (before: {old})"
            return SplitCheck(documents=0, tokens=0, difference=seen)
    documents = tokens = 0
    for batch in batches(paths, progress) if paths else ():
        contents = [document.text for document in batch]
        for document, old_split, new_split in zip(
            batch, before.encode_batch_fast(contents), after.encode_batch_fast(contents), strict=True
        ):
            old_ids = np.asarray(old_split.ids, np.int64)
            expected, seen_ids = selection.remap[old_ids], np.asarray(new_split.ids, np.int64)
            documents += 1
            tokens += len(expected)
            if not np.array_equal(expected, seen_ids):
                seen = _difference(old_ids, expected, seen_ids, texts)
                return SplitCheck(documents=documents, tokens=tokens, difference=f"{document.place}: {seen}")
    return SplitCheck(documents=documents, tokens=tokens, difference=None)


def _difference(
    old: npt.NDArray[np.int64], expected: npt.NDArray[np.int64], seen: npt.NDArray[np.int64], texts: Mapping[int, str]
) -> str:
    shared = min(len(expected), len(seen))
    differing = np.flatnonzero(expected[:shared] != seen[:shared])
    at = int(differing[0]) if len(differing) else shared
    if at >= len(expected):
        return f"{len(seen)} tokens, expected {len(expected)}"
    token, found = texts.get(int(old[at]), ""), int(seen[at]) if at < len(seen) else None
    return (
        f"token {at} is {shown(token)}, expected the id {int(expected[at])}, got {'none' if found is None else found}"
    )
