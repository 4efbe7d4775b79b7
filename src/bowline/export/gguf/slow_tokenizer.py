"""Writes the tokenizer of a directory with SentencePiece's model (`spiece.model`, ...) and no `tokenizer.json`.

llama.cpp's tokenizers follow SentencePiece, so pieces, scores and types are written as they stand. The files beside the
model add tokens to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from bowline.checkpoint.formats.sentencepiece_model import SentencePieceModel, is_tiktoken, read_model
from bowline.checkpoint.formats.strict_json import shown
from bowline.checkpoint.places.file_set import FileSet
from bowline.edit.tokenizer.stored_tokenizer import BYTE_PIECES, RESAVE, read_json_object
from bowline.errors import FormatError, UsageError
from bowline.export.gguf.character_map import checked_charsmap
from bowline.export.gguf.key_values import boolean, number, octets, text
from bowline.export.gguf.sentencepiece_tokens import SPACE
from bowline.export.gguf.token_types import TokenizerKeys, TokenType, listed_tokens
from bowline.export.gguf.unigram_tokens import ADDED_SCORE, BYTES_UNKNOWN

__all__ = ["SlowTokenizer", "slow_tokenizer"]

FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
UNIGRAM, BPE = 1, 2
SENTINEL = re.compile(r"<extra_id_(\d{1,4})>")
SENTINELS = 100
"""The number of T5's sentinels where no file says it."""


@dataclass(frozen=True, kw_only=True)
class SlowTokenizer:
    """The tokens of SentencePiece's model and of the files beside it."""

    file: str
    model: SentencePieceModel
    texts: Mapping[int, str]
    added: Mapping[int, bool]
    """The ids that the files beside it name, and whether each is special."""

    @cached_property
    def ids(self) -> dict[str, int]:
        """The id of each token."""
        return {found: token for token, found in self.texts.items()}

    @property
    def adds(self) -> tuple[bool, bool]:
        """Whether the classes of transformers put a token in front of a text, and one behind, unless told otherwise."""
        return (False, True) if self.model.algorithm == UNIGRAM else (True, False)

    def keys(self, rows: int) -> TokenizerKeys:
        """The keys of the model.

        Raises:
            UsageError: llama.cpp would split text in another way.
            FormatError: the map of characters is malformed.
        """
        model = self.model
        types = {token: self._type(token) for token in self.texts}
        unigram = model.algorithm == UNIGRAM
        self._check(unigram)
        scores = {token: model.pieces[token].score if token < len(model.pieces) else ADDED_SCORE for token in types}
        keys = {
            "tokenizer.ggml.model": text("t5" if unigram else "llama"),
            "tokenizer.ggml.pre": text("default"),
            **listed_tokens(self.texts, types, rows, scores),
            "tokenizer.ggml.add_space_prefix": boolean(model.add_dummy_prefix),
        }
        unknown = next((token for token, kind in types.items() if kind is TokenType.UNKNOWN), None)
        if unknown is not None:
            keys["tokenizer.ggml.unknown_token_id"] = number(unknown)
        if unigram:
            keys["tokenizer.ggml.remove_extra_whitespaces"] = boolean(model.remove_extra_whitespaces)
            charsmap = checked_charsmap(model.charsmap, f"{self.file}: precompiled_charsmap")
            if charsmap:
                keys["tokenizer.ggml.precompiled_charsmap"] = octets(charsmap)
        notes = (BYTES_UNKNOWN,) if unigram and model.byte_fallback else ()
        return TokenizerKeys(keys=keys, notes=(f"the tokenizer is read from {self.file}", *notes))

    def _type(self, token: int) -> TokenType:
        stored = self.model.pieces[token].type if token < len(self.model.pieces) else None
        if token in self.added and stored != TokenType.UNKNOWN:
            if self.added[token]:
                return TokenType.CONTROL
            stored = TokenType.USER_DEFINED
        if stored == TokenType.USER_DEFINED and SPACE in self.texts[token]:
            return TokenType.NORMAL  # llama.cpp looks for it in raw text, which has spaces; merges make it
        try:
            return TokenType(stored or TokenType.UNUSED)
        except ValueError:
            raise FormatError(
                f"{self.file}: piece {token} has the type {stored}", help="fetch the file again"
            ) from None

    def _check(self, unigram: bool) -> None:
        model = self.model
        if model.space_as_suffix:
            raise UsageError(f"{self.file}: spaces belong to the word before them, expected after", help=RESAVE)
        unknown = sum(piece.type == TokenType.UNKNOWN for piece in model.pieces)
        if unigram and unknown != 1:
            raise FormatError(
                f"{self.file}: {unknown} pieces are for unknown text, expected 1", help="fetch the file again"
            )
        if unigram:
            return
        if model.charsmap or model.remove_extra_whitespaces:
            raise UsageError(
                f"{self.file}: BPE with normalised text (a map of {len(model.charsmap)} bytes, spaces "
                f"{'merged' if model.remove_extra_whitespaces else 'kept'}), but llama.cpp does not normalise for BPE",
                help="convert the model with another runtime",
            )
        missing = [piece for piece in BYTE_PIECES if piece not in self.ids]
        if missing:
            raise UsageError(
                f"{self.file} lacks {len(missing)} of the 256 byte pieces, the first {missing[0]}: llama.cpp stops at "
                "a character that needs one",
                help="run the model in transformers or vLLM",
            )


def slow_tokenizer(files: FileSet, rows: int) -> SlowTokenizer | None:
    """The tokenizer in SentencePiece's model, for a table of `rows` rows; `None` if there is no such file.

    Raises:
        UsageError: it is of an algorithm that is not written, or a file beside it names a token without an id.
        FormatError: a file is malformed, or two tokens have one text.
    """
    name = next((name for name in FILES if files.has(name)), None)
    if name is None:
        return None
    data = files.read(name)
    if is_tiktoken(data):
        raise UsageError(f"{name} is a list of tokens by tiktoken, expected SentencePiece's model", help=RESAVE)
    model = read_model(data, name, most=rows)
    if model.algorithm not in (UNIGRAM, BPE):
        raise UsageError(f"{name}: algorithm {model.algorithm}, expected 1 (Unigram) or 2 (BPE)", help=RESAVE)
    texts = {token: piece.text for token, piece in enumerate(model.pieces)}
    added: dict[int, bool] = {}
    for place, token, found, special in list(_added(files, model, rows)):
        if not 0 <= token < 1 << 24:
            raise FormatError(f"{place}: {shown(found)} has the id {token}", help="mend the file")
        if added.get(token) is not None and texts[token] != found:
            raise FormatError(
                f"{place}: {shown(found)} has the id {token}, as {shown(texts[token])} has", help="give one another id"
            )
        texts[token], added[token] = found, special
    seen: set[str] = set()
    for found in texts.values():
        if found in seen:
            raise FormatError(f"{name}: two tokens are {shown(found)}", help="fetch the tokenizer's files again")
        seen.add(found)
    return SlowTokenizer(file=name, model=model, texts=texts, added=added)


def _added(files: FileSet, model: SentencePieceModel, rows: int) -> Iterator[tuple[str, int, str, bool]]:
    """The tokens that the files beside the model name: the file, the id, the text, and whether it is special."""
    settings = read_json_object(files, "tokenizer_config.json")
    decoder = settings.get("added_tokens_decoder")
    named = {piece.text for piece in model.pieces}
    size = len(model.pieces)
    for written, entry in decoder.items() if isinstance(decoder, dict) else ():
        found = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(found, str) or not (written.isascii() and written.isdigit() and len(written) < 9):
            raise FormatError(
                f"tokenizer_config.json: added_tokens_decoder: {shown(written)}: {shown(entry)}, expected an id and a "
                "token",
                help="mend the file",
            )
        named.add(found)
        yield "tokenizer_config.json", int(written), found, entry.get("special") is True
    for found, token in read_json_object(files, "added_tokens.json").items():
        if type(token) is not int:
            raise FormatError(f"added_tokens.json: {shown(found)} has the id {shown(token)}", help="mend the file")
        if found not in named:
            named.add(found)
            yield "added_tokens.json", token, found, False
    listed = [settings, read_json_object(files, "special_tokens_map.json")]
    further = [one for place in listed for one in _texts(place.get("additional_special_tokens")) if one not in named]
    sentinels = [one for one in dict.fromkeys(further) if SENTINEL.fullmatch(one)]
    usual = SENTINELS if model.algorithm == UNIGRAM and size + SENTINELS <= rows else 0
    count = settings.get("extra_ids", len(sentinels) or usual)
    if type(count) is not int or not 0 <= count < 10_000:
        raise FormatError(f"tokenizer_config.json: extra_ids is {shown(count)}", help="mend the file")
    for one in further:
        match = SENTINEL.fullmatch(one)
        if match is None or int(match[1]) >= count:
            raise UsageError(f"the token {shown(one)} is named without an id", help=RESAVE)
    if not any(SENTINEL.fullmatch(found) for found in named):
        for place in range(count):
            yield "tokenizer_config.json", size + place, f"<extra_id_{count - 1 - place}>", True


def _texts(value: Any) -> list[str]:
    found = [one.get("content") if isinstance(one, dict) else one for one in (value if isinstance(value, list) else [])]
    return [one for one in found if isinstance(one, str)]
