"""Reads a tokenizer's files: the tokens by id, the added and special ones, and the ids that its settings name.

The files are hostile until parsed: every text, id, pair and score is checked before it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from typing import Any, NoReturn

from bowline.checkpoint.formats.strict_json import loads, shown
from bowline.checkpoint.places.file_set import FileSet
from bowline.edit.tokenizer.id_places import REPAIR, settings_with, token_id, tokenizer_with
from bowline.errors import FormatError, UsageError

__all__ = ["Kind", "StoredTokenizer", "read_json_object", "read_tokenizer"]

TOKENIZER, SETTINGS, SPECIAL, ADDED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
SPECIAL_LISTS = ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")
SLOW_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.txt", "vocab.json", "tekken.json")
RESAVE = (
    "load the tokenizer with transformers.AutoTokenizer and save it with save_pretrained, "
    "which writes a complete tokenizer.json"
)
BYTE_PIECES = tuple(f"<0x{byte:02X}>" for byte in range(256))


class Kind(StrEnum):
    """How a tokenizer splits a word."""

    BYTE_LEVEL_BPE = "byte-level BPE"
    BYTE_FALLBACK_BPE = "BPE with byte fallback"
    BPE = "BPE"
    WORDPIECE = "WordPiece"
    UNIGRAM = "Unigram"
    WORDLEVEL = "WordLevel"

    @property
    def merges(self) -> bool:
        """Whether tokens are built from others by merges."""
        return self in (Kind.BYTE_LEVEL_BPE, Kind.BYTE_FALLBACK_BPE, Kind.BPE)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTokenizer:
    """A tokenizer as `tokenizer.json` describes it, checked."""

    data: bytes
    content: Mapping[str, Any]
    """The parsed `data`."""
    kind: Kind
    ids: Mapping[str, int]
    """The id of each token, added ones included; ids can have holes."""
    texts: Mapping[int, str]
    """The token of each id."""
    size: int
    """The number of rows that the tokens need: the largest id plus one."""
    added: Mapping[int, bool]
    """The ids of added tokens, and whether each is special."""
    merges: tuple[tuple[str, str], ...]
    """The pairs that BPE merges, by rank; empty in other kinds."""
    named: Mapping[int, str]
    """The ids that must stay because the tokenizer's own files name them, with the place."""

    @property
    def model(self) -> Mapping[str, Any]:
        """The object `model` of `tokenizer.json`."""
        model: Mapping[str, Any] = self.content["model"]
        return model

    @property
    def prefix(self) -> str:
        """Stands before a piece that continues a word, as `##` does in BERT; empty if there is none."""
        return self.model.get("continuing_subword_prefix") or ""

    @property
    def suffix(self) -> str:
        """Stands after a piece that ends a word, as `</w>` does in CLIP; empty if there is none."""
        return self.model.get("end_of_word_suffix") or ""

    @property
    def decodes_bytes(self) -> bool:
        """Whether any character can be spelled by byte pieces and is read from them again."""
        falls_back = self.model.get("byte_fallback") is True and all(piece in self.ids for piece in BYTE_PIECES)
        return falls_back and has_type(self.content.get("decoder"), "ByteFallback")


def read_tokenizer(files: FileSet) -> StoredTokenizer:
    """Read `tokenizer.json` and what the files beside it say about its tokens.

    Raises:
        FormatError: a file is malformed, or two files give one token different ids.
        UsageError: there is no `tokenizer.json`, or it does not describe the tokenizer alone: the tokenizer is
            Python code in the checkpoint, or another file names a token that `tokenizer.json` does not have.
    """
    if not files.has(TOKENIZER):
        _refuse_without_tokenizer(files)
    data = files.read(TOKENIZER)
    content = _object(loads(data, TOKENIZER), TOKENIZER)
    model = _object(content.get("model"), f"{TOKENIZER}: model")
    kind = _kind(content, model)
    _check_marks(model)
    ids = dict(_vocabulary(model, kind))
    _check_unique(ids)
    added = _added_tokens(content, ids)
    named: dict[int, str] = {}

    def record(number: int, place: str) -> int:
        named.setdefault(number, place)
        return number

    tokenizer_with(content, record)
    _record_unknown_token(model, ids, named)
    settings = read_json_object(files, SETTINGS)
    _refuse_code(settings)
    settings_with({key: value for key, value in settings.items() if key != "added_tokens_decoder"}, record)
    for place, text, stated in _named_tokens(files, settings):
        if text not in ids:
            raise UsageError(f"{place} names the token {shown(text)}, which {TOKENIZER} does not have", help=RESAVE)
        if stated is not None and ids[text] != stated:
            raise FormatError(
                f"{place}: the token {shown(text)} has the id {stated}, in {TOKENIZER} it has {ids[text]}", help=RESAVE
            )
        if ids[text] not in added:
            named.setdefault(ids[text], place)
    return StoredTokenizer(
        data=data,
        content=content,
        kind=kind,
        ids=ids,
        texts={number: text for text, number in ids.items()},
        size=max(ids.values(), default=-1) + 1,
        added=added,
        merges=tuple(_merges(model, ids)) if kind.merges else (),
        named=named,
    )


def read_json_object(files: FileSet, name: str) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    return _object(loads(files.read(name), name), name) if files.has(name) else {}


def has_type(part: Any, kind: str) -> bool:
    """Whether a normalizer, pre-tokenizer or decoder is of a kind, or has one of that kind inside."""
    if isinstance(part, list):
        return any(has_type(one, kind) for one in part)
    return isinstance(part, dict) and (part.get("type") == kind or any(has_type(one, kind) for one in part.values()))


def _refuse_without_tokenizer(files: FileSet) -> NoReturn:
    found = [name for name in SLOW_FILES if files.has(name)]
    if found:
        raise UsageError(
            f"the tokenizer is {' and '.join(found)} without a {TOKENIZER}, and only {TOKENIZER} can be edited",
            help=RESAVE,
        )
    raise UsageError(f"there is no {TOKENIZER} in {files.location}", help="add the tokenizer of the model")


def _refuse_code(settings: Mapping[str, Any]) -> None:
    code = settings.get("auto_map")
    named = code.get("AutoTokenizer") if isinstance(code, dict) else code
    if named:
        classes = [str(name) for name in (named if isinstance(named, list) else [named]) if name]
        raise UsageError(
            f"{SETTINGS}: auto_map names Python code for the tokenizer ({', '.join(map(shown, classes))}), "
            "which can hold token ids of its own",
            help=f"if {TOKENIZER} alone splits text in the same way, remove auto_map from {SETTINGS}",
        )


def _object(value: object, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"{place}: {shown(value)}, expected an object", help=REPAIR)
    return value


def _kind(content: Mapping[str, Any], model: Mapping[str, Any]) -> Kind:
    kind = model.get("type")
    if kind is None:  # written before the type was, where the library goes by the fields
        vocabulary_is_list = isinstance(model.get("vocab"), list)
        kind = "BPE" if "merges" in model else "Unigram" if vocabulary_is_list else None
        kind = kind or ("WordPiece" if "continuing_subword_prefix" in model else "WordLevel")
    if kind == "BPE":
        if any(has_type(content.get(part), "ByteLevel") for part in ("normalizer", "pre_tokenizer")):
            return Kind.BYTE_LEVEL_BPE
        return Kind.BYTE_FALLBACK_BPE if model.get("byte_fallback") is True else Kind.BPE
    for known in (Kind.WORDPIECE, Kind.UNIGRAM, Kind.WORDLEVEL):
        if kind == known.value:
            return known
    raise UsageError(
        f"{TOKENIZER}: a model of type {shown(kind)}, which Bowline does not know how to edit",
        help="tokenizers of the types BPE, WordPiece, Unigram and WordLevel can be edited",
    )


def _check_marks(model: Mapping[str, Any]) -> None:
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "unk_token"):
        if not isinstance(value := model.get(key), str | None):
            raise FormatError(f"{TOKENIZER}: model.{key}: {shown(value)}, expected a text or null", help=REPAIR)


def _vocabulary(model: Mapping[str, Any], kind: Kind) -> Iterator[tuple[str, int]]:
    vocabulary, place = model.get("vocab"), f"{TOKENIZER}: model.vocab"
    if isinstance(vocabulary, dict) and kind is not Kind.UNIGRAM:
        for text, number in vocabulary.items():
            yield text, number if type(number) is int and 0 <= number < 1 << 20 else token_id(number, place)
    elif isinstance(vocabulary, list) and kind is Kind.UNIGRAM:
        for number, pair in enumerate(vocabulary):
            if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str) or not _is_score(pair[1]):
                raise FormatError(f"{place}[{number}]: {shown(pair)}, expected a token and its score", help=REPAIR)
            yield pair[0], number
    else:
        wanted = "a list of pairs" if kind is Kind.UNIGRAM else "an object"
        raise FormatError(f"{place}: {shown(vocabulary)}, expected {wanted}", help=REPAIR)


def _is_score(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _check_unique(ids: Mapping[str, int]) -> None:
    if len(set(ids.values())) == len(ids):
        return
    seen: dict[int, str] = {}
    for text, number in ids.items():
        if number in seen:
            raise FormatError(
                f"{TOKENIZER}: the tokens {shown(seen[number])} and {shown(text)} both have the id {number}",
                help=REPAIR,
            )
        seen[number] = text


def _added_tokens(content: Mapping[str, Any], ids: dict[str, int]) -> dict[int, bool]:
    """The added tokens' ids, and whether each is special; puts their texts into `ids`."""
    entries, place = content.get("added_tokens"), f"{TOKENIZER}: added_tokens"
    if entries is None:
        return {}
    if not isinstance(entries, list):
        raise FormatError(f"{place}: {shown(entries)}, expected a list", help=REPAIR)
    added: dict[int, bool] = {}
    for entry in entries:
        text = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(text, str) or not text:
            raise FormatError(f"{place}: {shown(entry)}, expected an object with the token's content", help=REPAIR)
        number = token_id(entry.get("id"), f"{place}: {shown(text)}")
        if ids.setdefault(text, number) != number:
            raise FormatError(
                f"{place}: {shown(text)} has the id {number}, in model.vocab it has {ids[text]}", help=REPAIR
            )
        added[number] = entry.get("special") is True
    _check_unique(ids)
    return added


def _record_unknown_token(model: Mapping[str, Any], ids: Mapping[str, int], named: dict[int, str]) -> None:
    text, number = model.get("unk_token"), model.get("unk_id")
    if isinstance(text, str) and text in ids:
        named.setdefault(ids[text], f"{TOKENIZER}: model.unk_token")
    if number is not None:
        place = f"{TOKENIZER}: model.unk_id"
        if token_id(number, place) >= len(model["vocab"]):
            raise FormatError(f"{place}: {number}, expected less than the {len(model['vocab'])} tokens", help=REPAIR)
        named.setdefault(number, place)


def _named_tokens(files: FileSet, settings: Mapping[str, Any]) -> Iterator[tuple[str, str, int | None]]:
    """The tokens that the other files name: the place, the token, and its id if the place gives one."""
    for place, named in ((SETTINGS, settings), (SPECIAL, read_json_object(files, SPECIAL))):
        for key, value in named.items():
            if key.endswith("_token") or key in SPECIAL_LISTS:
                for text in _texts(value):
                    yield f"{place}: {key}", text, None
    decoder = settings.get("added_tokens_decoder")
    for written, token in decoder.items() if isinstance(decoder, dict) else ():
        place = f"{SETTINGS}: added_tokens_decoder"
        content = token.get("content") if isinstance(token, dict) else token
        if not isinstance(content, str) or not (written.isascii() and written.isdigit() and len(written) < 16):
            raise FormatError(f"{place}: {shown(written)}: {shown(token)}, expected an id and a token", help=REPAIR)
        yield place, content, int(written)
    for text, number in read_json_object(files, ADDED).items():
        yield ADDED, text, token_id(number, f"{ADDED}: {shown(text)}")


def _texts(value: Any) -> Iterator[str]:
    """The tokens in a setting: a text, an object with the text as its content, or several of either."""
    if isinstance(value, str) and value:
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, dict):
        yield from _texts(value["content"] if "content" in value else list(value.values()))


def _merges(model: Mapping[str, Any], ids: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    merges, place = model.get("merges"), f"{TOKENIZER}: model.merges"
    if not isinstance(merges, list):
        raise FormatError(f"{place}: {shown(merges)}, expected a list", help=REPAIR)
    for rank, merge in enumerate(merges):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise FormatError(f"{place}[{rank}]: {shown(merge)}, expected two tokens", help=REPAIR)
        left, right = pair
        if left not in ids or right not in ids:
            raise FormatError(
                f"{place}[{rank}]: {shown(left if left not in ids else right)} is not in model.vocab", help=REPAIR
            )
        yield left, right
