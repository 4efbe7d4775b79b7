"""Reads a SentencePiece model (`tokenizer.model`) straight from the protobuf: its pieces, and how it normalises text.

The file is hostile until parsed: each length is checked before bytes are taken, and fields that are not needed are
passed over unread. Protobuf's wire format: https://protobuf.dev/programming-guides/encoding; the fields:
https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from bowline.errors import FormatError

__all__ = ["Piece", "PieceType", "SentencePieceModel", "is_tiktoken", "read_model", "read_pieces"]

PIECES, TEXT, SCORE, TYPE = 1, 1, 2, 3
"""Field numbers: the pieces of the model, and of each piece its text, score and type."""
TRAINER, MODEL_TYPE, AS_SUFFIX, BYTE_FALLBACK = 2, 3, 24, 35
"""Field numbers: the settings of the training, and of these the algorithm, where a word's space goes, and bytes."""
NORMALIZER, CHARSMAP, DUMMY_PREFIX, EXTRA_SPACES = 3, 2, 3, 4
"""Field numbers: the normaliser, and of it the map of characters and what becomes of spaces."""
SETTINGS = frozenset(
    {
        (TRAINER, MODEL_TYPE),
        (TRAINER, AS_SUFFIX),
        (TRAINER, BYTE_FALLBACK),
        (NORMALIZER, DUMMY_PREFIX),
        (NORMALIZER, EXTRA_SPACES),
    }
)
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
FIXED = {FIXED64: 8, FIXED32: 4}
SCORE_FORMAT = Struct("<f")
LONGEST_VARINT = 10


class PieceType(IntEnum):
    """What a piece is; only a normal one is a text that a tokenizer's other file must have under the same id."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Piece(NamedTuple):
    """One piece. Its id is its position in the model."""

    text: str
    score: float = 0.0
    type: int = PieceType.NORMAL


class SentencePieceModel(NamedTuple):
    """A whole model; the defaults are those of the format."""

    pieces: list[Piece]
    algorithm: int = 1
    """1 is Unigram, 2 is BPE, 3 words, 4 characters."""
    byte_fallback: bool = False
    space_as_suffix: bool = False
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True


def read_model(data: bytes, name: str, *, most: int | None = None) -> SentencePieceModel:
    """The pieces of a model, and how it splits and normalises.

    Raises:
        FormatError: `data` is not such a model, or has more than `most` pieces.
    """
    pieces = read_pieces(data, name, most=most)
    numbers: dict[tuple[int, int], int] = {}
    charsmap = b""
    for number, wire, start, stop in _fields(data, 0, len(data), name):
        if number not in (TRAINER, NORMALIZER):
            continue
        if wire != BYTES:
            raise _malformed(name, start, f"settings of wire type {wire}, expected {BYTES}")
        for inner, kind, begin, end in _fields(data, start, stop, name):
            if kind == VARINT and (number, inner) in SETTINGS:
                numbers[number, inner], _ = _varint(data, begin, end, name)
            elif (number, inner, kind) == (NORMALIZER, CHARSMAP, BYTES):
                charsmap = data[begin:end]
    return SentencePieceModel(
        pieces=pieces,
        algorithm=numbers.get((TRAINER, MODEL_TYPE), 1),
        byte_fallback=numbers.get((TRAINER, BYTE_FALLBACK), 0) != 0,
        space_as_suffix=numbers.get((TRAINER, AS_SUFFIX), 0) != 0,
        charsmap=charsmap,
        add_dummy_prefix=numbers.get((NORMALIZER, DUMMY_PREFIX), 1) != 0,
        remove_extra_whitespaces=numbers.get((NORMALIZER, EXTRA_SPACES), 1) != 0,
    )


def read_pieces(data: bytes, name: str, *, most: int | None = None) -> list[Piece]:
    """The pieces of a model in the order of their ids; raises `FormatError` if `data` is not a SentencePiece model.

    More than `most` pieces are such an error, too.

    A byte that is not UTF-8 is shown as U+FFFD.

    Example:
        >>> read_pieces(bytes([10, 10, 10, 1, 97, 21, 0, 0, 128, 191, 24, 1]), "tokenizer.model")
        [Piece(text='a', score=-1.0, type=1)]
    """
    pieces, at = _usual_pieces(data)
    for number, wire, start, stop in _fields(data, at, len(data), name):
        if number != PIECES:
            continue
        if wire != BYTES:
            raise _malformed(name, start, f"a piece of wire type {wire}, expected {BYTES}")
        pieces.append(_piece(data, start, stop, name))
        if most is not None and len(pieces) > most:
            break
    if most is not None and len(pieces) > most:
        raise FormatError(
            f"{name}: more than {most} pieces, expected at most a piece for each of the table's rows",
            help="fetch the tokenizer of this model",
        )
    if not pieces:
        raise FormatError(f"{name}: no pieces, expected a SentencePiece model", help="fetch the file again")
    return pieces


def is_tiktoken(data: bytes) -> bool:
    """Whether a file of the same name is tiktoken's instead, as Llama 3's original is: a base64 token and rank a line.

    Example:
        >>> is_tiktoken(b"IQ== 0\\nIg== 1\\n"), is_tiktoken(b"version https://git-lfs.github.com/spec/v1")
        (True, False)
    """
    first = data[:1024].partition(b"\n")[0].rstrip(b"\r")
    token, _, rank = first.partition(b" ")
    return rank.isdigit() and bool(token) and token.rstrip(b"=").translate(None, b"+/").isalnum()


def _usual_pieces(data: bytes) -> tuple[list[Piece], int]:
    """The pieces at the beginning that are stored as SentencePiece writes short ones, and where they end.

    This is what `_fields` and `_piece` would find, ten times as fast: a vocabulary has up to 262,144 pieces.
    """
    pieces: list[Piece] = []
    at, size, normal = 0, len(data), int(PieceType.NORMAL)
    while at + 4 <= size and data[at] == 0x0A and data[at + 1] < 0x80 and data[at + 2] == 0x0A:
        stop, text = at + 2 + data[at + 1], at + 4
        end = text + data[at + 3]
        rest = stop - end
        if stop > size or data[at + 3] >= 0x80 or rest not in (5, 7) or data[end] != 0x15:
            break
        kind = normal
        if rest == 7:
            kind = data[end + 6]
            if data[end + 5] != 0x18 or kind >= 0x80:
                break
        (score,) = SCORE_FORMAT.unpack_from(data, end + 1)
        pieces.append(Piece(data[text:end].decode("utf-8", "replace"), score, kind))
        at = stop
    return pieces, at


def _piece(data: bytes, start: int, stop: int, name: str) -> Piece:
    text, score, kind = "", 0.0, int(PieceType.NORMAL)
    for number, wire, begin, end in _fields(data, start, stop, name):
        if number == TEXT and wire == BYTES:
            text = data[begin:end].decode("utf-8", "replace")
        elif number == SCORE and wire == FIXED32:
            (score,) = SCORE_FORMAT.unpack_from(data, begin)
        elif number == TYPE and wire == VARINT:
            kind, _ = _varint(data, begin, end, name)
        elif number in (TEXT, SCORE, TYPE):
            raise _malformed(name, begin, f"field {number} of a piece has the wire type {wire}")
    return Piece(text, score, kind)


def _fields(data: bytes, start: int, stop: int, name: str) -> Iterator[tuple[int, int, int, int]]:
    """The fields of a message: number, wire type, and the bytes of the value, `[begin, end)`."""
    at = start
    while at < stop:
        tag, begin = _varint(data, at, stop, name)
        number, wire = tag >> 3, tag & 7
        if not number:
            raise _malformed(name, at, "a field of number 0")
        if wire == VARINT:
            _, end = _varint(data, begin, stop, name)
        elif wire == BYTES:
            length, begin = _varint(data, begin, stop, name)
            end = begin + length
        elif wire in FIXED:
            end = begin + FIXED[wire]
        else:
            raise _malformed(name, at, f"wire type {wire}")
        if end > stop:
            raise _malformed(name, at, f"a field of {end - begin} bytes, of which {stop - begin} are there")
        yield number, wire, begin, end
        at = end


def _varint(data: bytes, at: int, stop: int, name: str) -> tuple[int, int]:
    value = 0
    for count in range(min(LONGEST_VARINT, stop - at)):
        byte = data[at + count]
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value, at + count + 1
    raise _malformed(name, at, "a number that does not end")


def _malformed(name: str, at: int, seen: str) -> FormatError:
    return FormatError(
        f"{name}: not a SentencePiece model: {seen} at byte {at}", help="fetch the file again, or remove it"
    )
