"""The pieces of `tokenizer.model`: as SentencePiece writes them, in any other order of fields, damaged and lying."""

from __future__ import annotations

import contextlib
import random
import struct
import tracemalloc

import pytest

from bowline.checkpoint.formats.sentencepiece_model import Piece, PieceType, is_tiktoken, read_model, read_pieces
from bowline.errors import FormatError
from tests.checkpoint.sentencepiece_files import field, model, number, piece

NAME = "tokenizer.model"
VOCABULARY = [
    ("<unk>", 0.0, PieceType.UNKNOWN),
    ("<s>", 0.0, PieceType.CONTROL),
    ("<0x00>", 0.0, PieceType.BYTE),
    ("▁the", -1.5, PieceType.NORMAL),
    ("é", -2.0, PieceType.NORMAL),
    ("", -3.0, PieceType.USER_DEFINED),
    ("x" * 300, -4.0, PieceType.UNUSED),
    ("b", -5.0, PieceType.NORMAL),
]


def test_pieces_in_the_order_of_their_ids() -> None:
    assert read_pieces(model(VOCABULARY), NAME) == [Piece(*one) for one in VOCABULARY]


def test_other_fields_are_passed_over_wherever_they_stand() -> None:
    trainer = field(2, field(1, b"corpus.txt") + number(3, 7) + struct.pack("<Bd", 12 << 3 | 1, 1.0))
    between = piece("a", -1.0) + trainer + piece("b", -2.0) + field(3, b"nfkc")
    assert [one.text for one in read_pieces(trainer + between, NAME)] == ["a", "b"]


def test_the_fields_of_a_piece_in_any_order_the_last_of_two_counts() -> None:
    swapped = field(1, number(3, 3) + struct.pack("<Bf", 2 << 3 | 5, -7.0) + field(1, b"a") + field(1, b"b"))
    assert read_pieces(swapped, NAME) == [Piece("b", -7.0, PieceType.CONTROL)]


def test_the_settings_of_a_model_and_their_defaults() -> None:
    found = read_model(model(VOCABULARY), NAME)
    assert found == ([Piece(*one) for one in VOCABULARY], 1, False, False, b"", True, True)
    trainer = field(2, number(3, 2) + number(24, 1) + number(35, 1) + field(1, b"corpus.txt"))
    normalizer = field(3, field(1, b"nmt_nfkc") + field(2, b"map") + number(3, 0) + number(4, 0))
    found = read_model(normalizer + model(VOCABULARY) + trainer, NAME)
    assert found[1:] == (2, True, True, b"map", False, False)
    with pytest.raises(FormatError, match="settings of wire type 0, expected 2"):
        read_model(model(VOCABULARY) + number(3, 1), NAME)


def test_a_piece_without_score_and_type_is_a_normal_one() -> None:
    assert read_pieces(field(1, field(1, b"a")), NAME) == [Piece("a", 0.0, PieceType.NORMAL)]


def test_bytes_that_are_not_utf_8_are_replaced() -> None:
    assert read_pieces(field(1, field(1, b"\xff")), NAME)[0].text == "\ufffd"


def test_protobufs_own_writer_is_read() -> None:
    """Python's protobuf, with the message described here, writes what is read."""
    descriptor_pb2 = pytest.importorskip("google.protobuf.descriptor_pb2")
    descriptor_pool = pytest.importorskip("google.protobuf.descriptor_pool")
    message_factory = pytest.importorskip("google.protobuf.message_factory")
    described = descriptor_pb2.FileDescriptorProto(name="pieces.proto", package="pieces")
    one = described.message_type.add(name="Piece")
    for at, (name, kind) in enumerate([("piece", 9), ("score", 2), ("type", 5)], start=1):
        one.field.add(name=name, number=at, type=kind, label=1)
    whole = described.message_type.add(name="Model")
    whole.field.add(name="pieces", number=1, type=11, label=3, type_name=".pieces.Piece")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(described)
    written = message_factory.GetMessageClass(pool.FindMessageTypeByName("pieces.Model"))()
    for text, score, kind in VOCABULARY:
        written.pieces.add(piece=text, score=score, type=int(kind))
    assert read_pieces(written.SerializeToString(), NAME) == [Piece(*one) for one in VOCABULARY]


@pytest.mark.parametrize(
    ("data", "seen"),
    [
        pytest.param(b"", "no pieces", id="empty"),
        pytest.param(b"version https://git-lfs.github.com/spec/v1\n", "wire type 6", id="lfs-pointer"),
        pytest.param(b'{"model": {}}', "wire type 3", id="json"),
        pytest.param(field(2, b"trainer"), "no pieces", id="no-pieces"),
        pytest.param(b"\x0a\x7f\x0a", "a field of 127 bytes, of which 1 are there", id="cut"),
        pytest.param(b"\x0a" + b"\xff" * 9 + b"\x01", "a field of 18446744073709551615 bytes", id="2^64"),
        pytest.param(b"\x0a" + b"\xff" * 20, "a number that does not end", id="endless-number"),
        pytest.param(b"\x0a\x03\x0a\x7fa", "a field of 127 bytes, of which 1 are there", id="text-beyond-its-piece"),
        pytest.param(b"\x08\x01", "a piece of wire type 0", id="piece-as-number"),
        pytest.param(field(1, number(1, 3)), "field 1 of a piece has the wire type 0", id="text-as-number"),
        pytest.param(b"\x00\x00", "a field of number 0", id="zeros"),
    ],
)
def test_what_is_not_a_model_is_one_error(data: bytes, seen: str) -> None:
    with pytest.raises(FormatError, match=seen.replace("^", r"\^")) as raised:
        read_pieces(data, NAME)
    assert raised.value.message.startswith(f"{NAME}: ")


def test_damaged_models_raise_no_other_error_and_take_no_more_memory_than_a_vocabulary() -> None:
    chance = random.Random(0)
    whole = model(VOCABULARY) + field(2, number(3, 2) + number(35, 1)) + field(3, field(2, b"map") + number(3, 0))
    tracemalloc.start()
    for _ in range(3000):
        damaged = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        with contextlib.suppress(FormatError):
            read_model(bytes(damaged[: chance.randint(1, len(damaged))]), NAME)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize(
    ("data", "is_one"),
    [(b"IQ== 0\nIg== 1\n", True), (b"YQ== 0", True), (model(VOCABULARY), False), (b"", False), (b"a b\n", False)],
)
def test_tiktokens_file_of_the_same_name_is_known(data: bytes, is_one: bool) -> None:
    assert is_tiktoken(data) == is_one
