"""The header of GGUF files: what is read, what is refused, and that hostile sizes cost no memory."""

from __future__ import annotations

import struct
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest

from bowline.checkpoint.formats.gguf.header import MOST_KEYS, MOST_TENSORS, ArrayAt, TextAt, read_gguf_header
from bowline.checkpoint.formats.gguf.text_arrays import TokenIds, read_token_ids
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.checkpoint.places.byte_source import MemoryBytes
from bowline.errors import FormatError
from tests.checkpoint.gguf_files import EMBEDDING, HEAD, LLAMA, Stored, Typed, gguf_file, q8_0, text, vocabulary

TABLE = np.arange(64, dtype=np.float32).reshape(2, 32)


def read(file: bytes) -> Any:
    return read_gguf_header(MemoryBytes("model.gguf", file))


def refused(file: bytes) -> str:
    """The message about a file that is refused: one printable line that begins with the file's name, and a way out."""
    with pytest.raises(FormatError) as caught:
        read(file)
    assert caught.value.message.startswith("model.gguf: ")
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 400
    assert caught.value.help
    return caught.value.message


def head(tensors: int, keys: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def key(name: str, kind: int, raw: bytes = b"") -> bytes:
    return text(name) + struct.pack("<I", kind) + raw


def entry(name: str, shape: tuple[int, ...] = (32, 2), kind: int = 0, offset: int = 0) -> bytes:
    """A tensor's entry as it is in the file: the row's length first."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


# --- what is read ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 3])
def test_tensors_have_their_rows_first_and_the_place_of_their_bytes(version: int) -> None:
    file = gguf_file({EMBEDDING: TABLE, HEAD: q8_0(TABLE)}, version=version)
    header = read(file)
    assert (header.version, header.architecture) == (version, "llama")
    table, quantised = header.tensors[EMBEDDING], header.tensors[HEAD]
    assert table == StoredTensor(EMBEDDING, "F32", (2, 32), "model.gguf", header.data_start, 256)
    assert quantised == StoredTensor(HEAD, "Q8_0", (2, 32), "model.gguf", header.data_start + 256, 68)
    assert file[table.offset : table.offset + table.nbytes] == TABLE.tobytes()


def test_every_type_of_value_is_read_or_its_place_is_kept() -> None:
    layouts = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    values = {f"k{kind}": Typed(kind, struct.pack(f"<{layout}", 1)) for kind, layout in layouts.items()}
    header = read(gguf_file({}, {**values, "text": "é", "long": "x" * 5000, "texts": ["a", "bc"], "numbers": [1, 2]}))
    assert [header.values[f"k{kind}"] for kind in layouts] == [1] * len(layouts)
    assert header.values["k7"] is True
    assert header.values["text"] == "é"
    assert header.values["long"] == TextAt(header.values["long"].offset, 5000)
    assert (header.values["texts"].kind, header.values["texts"].length) == ("STRING", 2)
    assert (header.values["numbers"].kind, header.values["numbers"].nbytes) == ("INT32", 8)
    assert (header.number("k4"), header.number("k7"), header.number("text")) == (1, None, None)


def test_a_file_without_an_architecture_has_none() -> None:
    assert read(gguf_file({}, {})).architecture is None
    assert read(gguf_file({}, {"general.architecture": 3})).architecture is None


@pytest.mark.parametrize("alignment", [1, 8, 32, 4096])
def test_data_begins_at_the_stated_alignment(alignment: int) -> None:
    values = {"general.alignment": alignment, **LLAMA}
    header = read(gguf_file({"a": np.zeros(3, np.float32), EMBEDDING: TABLE}, values, alignment=alignment))
    assert header.data_start % alignment == 0
    assert header.tensors[EMBEDDING].offset == header.data_start + -(-12 // alignment) * alignment


def test_the_last_tensor_needs_no_padding_behind_it() -> None:
    file = gguf_file({"a": np.zeros(3, np.float32)})
    assert read(file[:-20]).tensors["a"].nbytes == 12
    assert "truncated: tensor 'a' has the bytes" in refused(file[:-21])


def test_tokens_are_decoded_on_demand() -> None:
    tokens = ["<s>", "", "é", "x" * 3000, "last"]
    file = gguf_file({}, vocabulary(tokens))
    array = read(file).values["tokenizer.ggml.tokens"]
    ids = read_token_ids(MemoryBytes("model.gguf", file), array)
    assert ids.texts == tokens
    assert (ids["é"], ids.last, len(ids), ids.length) == (2, "last", 5, 5)
    assert TokenIds(text(b"\xff") + text("a") * 2, 3).texts == ["\ufffd", "a", "a"]
    assert dict(TokenIds(text("a") * 2, 2)) == {"a": 1}
    assert TokenIds(b"", 0).last is None


@pytest.mark.parametrize("texts", [1, 7, 100_000])
def test_an_array_of_texts_that_crosses_pieces_of_the_file_is_passed_over(texts: int) -> None:
    lengths = np.random.default_rng(texts).integers(0, 40, texts)
    tokens = ["x" * int(length) for length in lengths]
    header = read(gguf_file({EMBEDDING: TABLE}, {**vocabulary(tokens), "behind": 7}))
    assert header.values["tokenizer.ggml.tokens"].nbytes == sum(lengths) + 8 * texts
    assert header.values["behind"] == 7
    assert list(header.tensors) == [EMBEDDING]


def test_a_vocabulary_of_262144_is_passed_over_quickly() -> None:
    file = gguf_file({}, vocabulary(262_144))
    best = min(_seconds(file) for _ in range(3))
    assert best < 0.5  # 0.03 on an idle machine


def _seconds(file: bytes) -> float:
    begin = time.perf_counter()
    read(file)
    return time.perf_counter() - begin


# --- what is refused ------------------------------------------------------------------------------------------------


def test_what_is_no_gguf_file_is_refused() -> None:
    assert "begins with b'', expected b'GGUF'" in refused(b"")
    assert "begins with b'GG', expected b'GGUF'" in refused(b"GG")
    with pytest.raises(FormatError, match="git lfs pull"):
        read(b"version https://git-lfs.github.com/spec/v1")


def test_other_versions_and_the_other_byte_order_are_refused() -> None:
    assert "has version 1, expected 2 or 3" in refused(head(0, 0, version=1))
    assert "has version 0, expected 2 or 3" in refused(head(0, 0, version=0))
    assert "has version 4, expected 2 or 3" in refused(head(0, 0, version=4))
    assert "is big-endian (version 0x03000000)" in refused(head(0, 0, version=3 << 24))


def test_every_truncation_is_refused() -> None:
    file = gguf_file({EMBEDDING: TABLE, HEAD: q8_0(TABLE)}, vocabulary(3, bos_token_id=1))
    end = read(file).tensors[HEAD]
    for length in range(end.offset + end.nbytes):
        refused(file[:length])
    read(file[: end.offset + end.nbytes])


@pytest.mark.parametrize("count", [1 << 63, (1 << 64) - 1, 1 << 40])
def test_counts_that_the_file_cannot_hold_are_refused(count: int) -> None:
    assert f"states {count} keys, but only 100 bytes follow" in refused(head(0, count, bytes(100)))
    assert f"states {count} tensors, but only 100 bytes follow" in refused(head(count, 0, bytes(100)))


def test_more_keys_or_tensors_than_any_model_has_are_refused() -> None:
    assert f"expected at most {MOST_KEYS}" in refused(head(0, MOST_KEYS + 1, bytes(16 * MOST_KEYS)))
    assert f"expected at most {MOST_TENSORS}" in refused(head(MOST_TENSORS + 1, 0, bytes(40 * MOST_TENSORS)))


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 1 << 62, 1000])
def test_lengths_of_texts_that_the_file_cannot_hold_are_refused(length: int) -> None:
    lying = struct.pack("<Q", length)
    assert f"needs {length} bytes, but only 30 follow" in refused(head(0, 1, key("a", 8, lying + bytes(30))))
    array = struct.pack("<IQ", 8, 3) + text("x") + lying + bytes(30)
    assert "the value of 'a' has a text that ends at byte" in refused(head(0, 1, key("a", 9, array)))
    last = struct.pack("<IQ", 8, 2) + text("x") + lying + bytes(30)
    assert "beyond the file" in refused(head(0, 1, key("a", 9, last)))
    assert "expected 1 to 65535" in refused(head(0, 1, lying + bytes(70_000))) or length == 1000
    assert "bytes, expected 1 to 63" in refused(head(1, 0, lying + bytes(70_000)))


@pytest.mark.parametrize("count", [1 << 63, (1 << 64) - 1, 1 << 40])
@pytest.mark.parametrize("kind", [0, 4, 8, 12])
def test_arrays_longer_than_the_file_are_refused(kind: int, count: int) -> None:
    array = struct.pack("<IQ", kind, count) + bytes(64)
    assert "but only 64 follow" in refused(head(0, 1, key("a", 9, array)))


def test_arrays_of_arrays_and_unknown_types_are_refused() -> None:
    assert "'a' is an array of arrays" in refused(head(0, 1, key("a", 9, struct.pack("<IQ", 9, 1) + bytes(99))))
    assert "'a' is an array of arrays" in refused(head(0, 1, key("a", 9, struct.pack("<IQ", 9, 0))))
    assert "'a' is an array of the type 13" in refused(head(0, 1, key("a", 9, struct.pack("<IQ", 13, 0))))
    assert "'a' has the type 13, expected one of the 13" in refused(head(0, 1, key("a", 13, bytes(8))))
    assert "tensor 'x' has the type 43" in refused(head(1, 0, entry("x", kind=43) + bytes(999)))
    assert "tensor 'x' has the type 31 (Q4_0_4_4, which ggml has removed)" in refused(head(1, 0, entry("x", kind=31)))


def test_keys_and_names_are_unique_texts() -> None:
    assert "the key 'a' occurs twice" in refused(head(0, 2, key("a", 0, b"1") * 2))
    assert "two tensors have the name 'x'" in refused(head(2, 0, entry("x") * 2) + bytes(999))
    assert "key 0 has 0 bytes, expected 1 to 65535" in refused(head(0, 1, key("", 0, b"1") + bytes(9)))
    assert "key 0 is b'\\xff', expected UTF-8" in refused(head(0, 1, text(b"\xff") + bytes(9)))
    assert "key 0 contains a NUL" in refused(head(0, 1, text("a\0b") + bytes(9)))
    assert "the name of tensor 0 contains a NUL" in refused(head(1, 0, entry("a\0b")))
    assert "the name of tensor 0 is b'\\xff'" in refused(head(1, 0, text(b"\xff") + bytes(99)))
    assert "the name of tensor 0 has 64 bytes, expected 1 to 63" in refused(head(1, 0, entry("x" * 64)))
    assert read(head(1, 0, entry("x" * 63)) + bytes(999)).tensors


@pytest.mark.parametrize("alignment", [0, 3, 48, "32", True, Typed(10, struct.pack("<Q", 32)), Typed(0, b"\x20")])
def test_an_alignment_that_is_no_power_of_two_is_refused(alignment: object) -> None:
    assert "expected a power of two" in refused(gguf_file({}, {"general.alignment": alignment}))


def test_shapes_are_checked() -> None:
    assert "tensor 'x' has 5 axes, expected at most 4" in refused(head(1, 0, entry("x", (1,) * 5)))
    assert "tensor 'x' has 4294967295 axes" in refused(head(1, 0, text("x") + b"\xff" * 4 + bytes(99)))
    for shape in ((1 << 63,), (1 << 32, 1 << 31), (1 << 63, 0), (1 << 40,) * 4):
        assert "expected fewer than 2^63 elements" in refused(head(1, 0, entry("x", shape)))
    assert "has rows of 33, expected a multiple of 32, the block of Q8_0" in refused(head(1, 0, entry("x", (33,), 8)))
    assert "has rows of 1, expected a multiple of 256" in refused(head(1, 0, entry("x", (), 12)))
    empty = read(head(1, 0, entry("x", (32, 0))) + bytes(99)).tensors["x"]
    assert (empty.shape, empty.nbytes) == ((0, 32), 0)


def test_a_tensor_that_leaves_the_file_overlaps_or_leaves_a_gap_is_refused() -> None:
    assert "truncated: tensor 'x' has the bytes" in refused(head(1, 0, entry("x", (1 << 40,))) + bytes(999))
    assert "a gap: tensor 'x' begins at byte 32" in refused(head(1, 0, entry("x", offset=32)) + bytes(999))
    assert "a gap: tensor 'x' begins at byte 18446744073709551615" in refused(
        head(1, 0, entry("x", offset=(1 << 64) - 1)) + bytes(999)
    )
    same = head(2, 0, entry("x") + entry("y", offset=0)) + bytes(999)
    assert "an overlap: tensor 'y' begins at byte 0 of the data, expected 256" in refused(same)
    partly = head(2, 0, entry("x") + entry("y", offset=128)) + bytes(999)
    assert "an overlap: tensor 'y' begins at byte 128" in refused(partly)


# --- what a hostile file costs --------------------------------------------------------------------------------------


class Endless(MemoryBytes):
    """A file that says it has 2^62 bytes; all of those behind `start` are zero."""

    def __init__(self, start: bytes) -> None:
        super().__init__("model.gguf", start)
        self.size = 1 << 62
        self.largest = 0

    def _fill(self, offset: int, buffer: memoryview) -> None:
        self.largest = max(self.largest, len(buffer))
        known = self._data[offset : offset + len(buffer)]
        buffer[:] = known + bytes(len(buffer) - len(known))


@pytest.mark.parametrize(
    "start",
    [
        head(1 << 40, 0),
        head(0, 1 << 40),
        head(0, 2, key("a", 8, struct.pack("<Q", 1 << 50))),
        head(0, 2, key("a", 9, struct.pack("<IQ", 0, 1 << 50))),
        head(0, 2, key("a", 9, struct.pack("<IQ", 8, 1 << 50))),
        head(0, 2, key("a", 9, struct.pack("<IQQ", 8, 2, 1 << 50))),
        head(0, 1, struct.pack("<Q", 1 << 50)),
        head(1, 0, struct.pack("<Q", 1 << 50)),
    ],
)
def test_a_huge_file_that_lies_costs_little_memory(start: bytes) -> None:
    source = Endless(start)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            read_gguf_header(source)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert source.largest <= 4 << 20


def test_a_vocabulary_beyond_any_is_not_read() -> None:
    with pytest.raises(FormatError, match="expected at most 268435456"):
        read_token_ids(Endless(b""), ArrayAt("STRING", 9, 0, 1 << 40))


def test_stored_shapes_are_those_that_were_written() -> None:
    cube = Stored("F16", (2, 3, 4), bytes(48))
    assert read(gguf_file({"x": cube})).tensors["x"].shape == (2, 3, 4)
