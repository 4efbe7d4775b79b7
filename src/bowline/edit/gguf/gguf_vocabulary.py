"""The vocabulary of a GGUF file: the tensors with a row for each token, the tokens, and the ids that keys name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bowline.checkpoint.formats.gguf.value_bytes import array_items, array_value, value_numbers, with_numbers
from bowline.checkpoint.formats.strict_json import shown
from bowline.edit.gguf.gguf_draft import GGUFDraft
from bowline.errors import FormatError, TieError, UsageError
from bowline.families.gguf_names import GGUF_EMBEDDING

__all__ = ["GGUFVocabulary", "read_vocabulary", "texts_of", "with_tokens"]

Ids = npt.NDArray[np.int64]
PREFIX = "tokenizer.ggml."
TOKENS, SCORES, TYPES, MERGES = PREFIX + "tokens", PREFIX + "scores", PREFIX + "token_type", PREFIX + "merges"
PER_TOKEN: Mapping[str, tuple[str, ...]] = {
    TOKENS: ("STRING",),
    SCORES: ("FLOAT32", "INT32"),
    TYPES: ("INT32",),
}
"""The keys whose arrays have an item for each token, and the types of items that llama.cpp takes."""
NOT_PER_TOKEN = (MERGES, PREFIX + "precompiled_charsmap")
WHOLE_TOKENIZERS = ("tokenizer.huggingface.json", "tokenizer.rwkv.world")
TABLES = re.compile(
    r"(token_embd|output|per_layer_token_embd|blk\.\d+\.(nextn\.(embed_tokens|shared_head_head)|ffn_gate_tid2eid))"
    r"\.weight|output\.bias"
)
"""The tensors of llama.cpp's models with a row for each token."""
TOKEN_IDS = re.compile(r"(.*\.)?(\w*token_ids?(_\w+)?|suppress_tokens|invocation_tokens)")
SIZE = re.compile(r"(.*\.)?vocab_size")
HASHED_IDS = re.compile(r".*\.ple\.ngram_size")
"""The key of a model that hashes token ids (Qwen 4's experiment): no id may change."""
DEFAULT_IDS: Mapping[str, Mapping[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "gpt2": {"bos": 11, "eos": 11},
    "bert": {"bos": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
    "plamo2": {"bos": 1, "eos": 2, "unknown": 0, "padding": 3},
}
"""By the tokenizer's model: the ids that llama.cpp assumes where the file names none, or one past its last token."""
CONVERT_AGAIN = "convert the model again, after the edit of the checkpoint that it was converted from"
UNUSED = 5
"""The type of a token that stands for no text: a converter's padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFVocabulary:
    """The vocabulary of a file: its number of tokens, the tensors with a row for each, and its tokens.

    `named` has each id that a key names, with the key. `fixed` is how many of the first ids must stay as they are,
    because llama.cpp assumes one of them. Without tokens in the file, `tokens` is empty.
    """

    size: int
    tables: tuple[str, ...]
    model: str | None
    tokens: tuple[bytes, ...]
    types: tuple[int, ...]
    named: Mapping[int, str]
    fixed: int


def read_vocabulary(draft: GGUFDraft) -> GGUFVocabulary:
    """Find the vocabulary of a file by the names and by the sizes of its tensors and keys.

    Raises:
        TieError: a tensor or a key may or may not belong to it, or two have different sizes.
        UsageError: a key holds a whole tokenizer of another kind.
        FormatError: an array has another type than llama.cpp reads.
    """
    for key in draft.extents:
        if key in WHOLE_TOKENIZERS:
            raise UsageError(f"{key}: holds a tokenizer with its ids, which cannot be rewritten", help=CONVERT_AGAIN)
        if HASHED_IDS.fullmatch(key):
            raise TieError(f"{key}: the model hashes token ids, so no token can get another id", help=CONVERT_AGAIN)
        if key in PER_TOKEN or key == MERGES:
            _check_type(draft, key)
    model = draft.header.values.get(PREFIX + "model")
    value = draft.value(TOKENS)
    tokens: tuple[bytes, ...] = ()
    if value is not None:
        tokens = tuple(array_items(value)[1])
    size = len(tokens) if value is not None else _stated_size(draft)
    tables = tuple(_tables(draft, size))
    _check_arrays(draft, size)
    stated = draft.value(TYPES)
    types = tuple(int(number) for number in value_numbers(stated)) if stated is not None else (1,) * len(tokens)
    name = model if isinstance(model, str) else None
    named, fixed = _named_ids(draft, name, size)
    return GGUFVocabulary(size=size, tables=tables, model=name, tokens=tokens, types=types, named=named, fixed=fixed)


def with_tokens(draft: GGUFDraft, vocabulary: GGUFVocabulary, kept: Ids, merges: Ids | None = None) -> GGUFDraft:
    """The draft with the tokens `kept`, ascending old ids, in each tensor and key; `merges` are the ranks that stay.

    Every id that a key names must be among them.
    """
    remap = np.full(vocabulary.size, -1, np.int64)
    remap[kept] = np.arange(len(kept))
    tensors = {name: rows.kept(kept) if name in vocabulary.tables else rows for name, rows in draft.tensors.items()}
    values: dict[str, bytes] = {}
    for key in draft.extents:
        value = draft.value(key) if _follows(key) else None
        if value is None:
            continue
        if key in PER_TOKEN:
            kind, items = array_items(value)
            values[key] = array_value(kind, [items[old] for old in kept.tolist()])
        elif key == MERGES:
            kind, items = array_items(value)
            if merges is not None:
                values[key] = array_value(kind, [items[rank] for rank in merges.tolist()])
        elif SIZE.fullmatch(key):
            if value_numbers(value) == [vocabulary.size]:
                values[key] = with_numbers(value, lambda number: len(kept))
        else:
            values[key] = with_numbers(value, lambda number: _moved(number, remap))
    values = {key: value for key, value in values.items() if value != draft.value(key)}
    return draft.with_tensors(tensors).with_values(values)


def _moved(number: Any, remap: Ids) -> Any:
    if type(number) is not int or not 0 <= number < len(remap):
        return number
    assert remap[number] >= 0
    return int(remap[number])


def _follows(key: str) -> bool:
    return key in PER_TOKEN or key == MERGES or bool(SIZE.fullmatch(key) or TOKEN_IDS.fullmatch(key))


def _stated_size(draft: GGUFDraft) -> int:
    stated = draft.value(f"{draft.architecture}.vocab_size")
    numbers = value_numbers(stated) if stated is not None else []
    if len(numbers) == 1 and isinstance(numbers[0], int):
        return numbers[0]
    embedding = draft.tensors.get(GGUF_EMBEDDING)
    return embedding.rows if embedding is not None else 0


def _tables(draft: GGUFDraft, size: int) -> Iterator[str]:
    if GGUF_EMBEDDING not in draft.tensors:
        raise TieError(f"{GGUF_EMBEDDING} is not stored, so the vocabulary is unknown", help="fetch the file again")
    for name, rows in draft.tensors.items():
        if TABLES.fullmatch(name):
            if rows.rows != size or not rows.shape:
                raise TieError(
                    f"{name} has {rows.rows} rows for {size} tokens, expected a row for each",
                    help="`bowline audit` says what llama.cpp does with it",
                )
            yield name
        elif size in rows.shape:
            raise TieError(
                f"{name} {list(rows.shape)} may or may not have a row for each of the {size} tokens",
                help=CONVERT_AGAIN,
            )


def _check_arrays(draft: GGUFDraft, size: int) -> None:
    for key, length in draft.array_lengths().items():
        if key in PER_TOKEN:
            if length != size:
                raise FormatError(
                    f"{draft.header.file}: {key} has {length} items for {size} tokens", help="convert the model again"
                )
        elif length == size and key not in NOT_PER_TOKEN and not TOKEN_IDS.fullmatch(key):
            raise TieError(f"{key} may or may not have an item for each of the {size} tokens", help=CONVERT_AGAIN)


def _check_type(draft: GGUFDraft, key: str) -> None:
    expected = PER_TOKEN.get(key, ("STRING",))
    kind = getattr(draft.header.values[key], "kind", "no array")
    if kind not in expected:
        raise FormatError(
            f"{draft.header.file}: {key} is {kind}, expected an array of {' or '.join(expected)}",
            help="llama.cpp refuses such a file too; convert the model again",
        )


def _named_ids(draft: GGUFDraft, model: str | None, size: int) -> tuple[dict[int, str], int]:
    named: dict[int, str] = {}
    for key in draft.extents:
        if TOKEN_IDS.fullmatch(key):
            for number in value_numbers(draft.value(key) or b""):
                if type(number) is int and 0 <= number < size:
                    named.setdefault(number, key)
    fixed = 0
    for role, number in DEFAULT_IDS.get(model or "", {}).items():
        key = f"{PREFIX}{role}_token_id"
        stated = value_numbers(draft.value(key) or b"\x08\0\0\0")
        if number < size and not (stated and 0 <= stated[0] < size):
            named.setdefault(number, f"llama.cpp's default of {key}")
            fixed = max(fixed, number + 1)
    return named, fixed


def texts_of(draft: GGUFDraft, vocabulary: GGUFVocabulary) -> tuple[str, ...]:
    """The text of each token; an empty one is called as llama.cpp calls it.

    Raises:
        FormatError: a token is not UTF-8, or two have one text.
    """
    texts = []
    for number, raw in enumerate(vocabulary.tokens):
        try:
            texts.append(raw.decode("utf-8") or f"[EMPTY_{number}]")
        except UnicodeDecodeError:
            raise FormatError(
                f"{draft.header.file}: token {number} is {raw[:40]!r}, expected UTF-8", help="convert the model again"
            ) from None
    twice = next((text for text, count in Counter(texts).items() if count > 1), None)
    if twice is not None:
        raise FormatError(
            f"{draft.header.file}: two tokens have the text {shown(twice)}",
            help="llama.cpp refuses such a file too; convert the model again",
        )
    return tuple(texts)
