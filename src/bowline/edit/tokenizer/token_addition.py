"""Adds tokens to a tokenizer, and splits their texts with the tokenizer as it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bowline.checkpoint.formats.strict_json import shown
from bowline.checkpoint.places.file_set import FileSet
from bowline.edit.tokenizer.json_style import written_like
from bowline.edit.tokenizer.library import check_ids, load, load_checked
from bowline.edit.tokenizer.stored_tokenizer import ADDED, SETTINGS, TOKENIZER, StoredTokenizer, read_json_object
from bowline.errors import UsageError

__all__ = ["TokenAddition", "added_tokens", "pieces"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAddition:
    """The new content of each file that changes, and the id of each new token."""

    files: Mapping[str, bytes]
    ids: Mapping[str, int]


def added_tokens(files: FileSet, tokenizer: StoredTokenizer, texts: Sequence[str]) -> TokenAddition:
    """Add tokens that stand for exactly their text wherever it occurs, after the last token.

    The entries go into `tokenizer.json`, and into `added_tokens_decoder` and `added_tokens.json` where they are.

    Arguments:
        files: the tokenizer's files.
        tokenizer: what `read_tokenizer` returned.
        texts: the new tokens, in the order of their ids.

    Raises:
        UsageError: a text is empty, occurs twice or is a token already.
        FormatError: the `tokenizers` library would give a token another id, because the ids have holes.
    """
    ids: dict[str, int] = {}
    for text in texts:
        if not text:
            raise UsageError("a new token is empty", help="leave it out")
        if text in ids:
            raise UsageError(f"the new token {shown(text)} occurs twice", help="name it once")
        if text in tokenizer.ids:
            raise UsageError(
                f"{shown(text)} is a token already, with the id {tokenizer.ids[text]}", help="leave it out"
            )
        ids[text] = tokenizer.size + len(ids)
    entries: list[dict[str, Any]] = [_entry(text) for text in ids]
    numbered = [{"id": ids[entry["content"]], **entry} for entry in entries]
    present = tokenizer.content.get("added_tokens") or []
    changed = {TOKENIZER: written_like({**tokenizer.content, "added_tokens": [*present, *numbered]}, tokenizer.data)}
    settings = read_json_object(files, SETTINGS)
    decoder = settings.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        extended = decoder | {str(ids[entry["content"]]): entry for entry in entries}
        changed[SETTINGS] = written_like(settings | {"added_tokens_decoder": extended}, files.read(SETTINGS))
    if files.has(ADDED):
        changed[ADDED] = written_like(read_json_object(files, ADDED) | ids, files.read(ADDED))
    texts_by_id = tokenizer.texts
    check_ids(load(changed[TOKENIZER]), {texts_by_id[number]: number for number in tokenizer.added} | ids)
    return TokenAddition(files=changed, ids=ids)


def pieces(tokenizer: StoredTokenizer, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
    """The ids of each text under the tokenizer, without the special tokens that frame a text."""
    backend = load_checked(tokenizer)
    encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.asarray(encoding.ids, np.int64) for encoding in encodings]


def _entry(text: str) -> dict[str, Any]:
    return {
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": False,
    }
