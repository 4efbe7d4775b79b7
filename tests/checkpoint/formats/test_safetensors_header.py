"""The strict header reader: every malformed header one by one, and every valid one read as safetensors reads it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from bowline.checkpoint.formats.dtypes import BITS
from bowline.checkpoint.formats.safetensors_header import LONGEST_HEADER, Header, read_header
from bowline.checkpoint.places.byte_source import LocalFile, MemoryBytes
from bowline.errors import FormatError

from .header_fuzz import FILE_NAME, as_reading, check_error, read_by_safetensors, safetensors_file


def read(file: bytes) -> Header:
    return read_header(MemoryBytes(FILE_NAME, file))


def header(text: str | bytes, data: int = 0, *, length: int | None = None) -> bytes:
    """A file with this header and so many bytes of data."""
    encoded = text.encode() if isinstance(text, str) else text
    return safetensors_file(encoded, bytes(range(data)), length=length)


def one(dtype: str = '"F32"', shape: str = "[1]", offsets: str = "[0,4]", data: int = 4) -> bytes:
    """A file with one tensor `a`, its fields as JSON."""
    return header(f'{{"a":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}}}', data)


def several(*extents: tuple[int, int], data: int) -> bytes:
    """A file of U8 tensors `t0`, `t1`... at these extents."""
    infos = {
        f"t{index}": {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
        for index, (begin, end) in enumerate(extents)
    }
    return header(json.dumps(infos), data)


def named(name: str) -> bytes:
    """A file with one tensor, its name as JSON."""
    return header(f"{{{name}:{F32}}}", 4)


F32 = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
A = f'"a":{F32}'
GOOD = header(f"{{{A}}}", 4)
DEEP = "[" * 100_000

REJECTED_BY_BOTH = [
    # the frame
    ("no bytes at all", b"", "0 bytes"),
    ("under eight bytes", b"\x02\0\0\0\0\0\0", "7 bytes"),
    ("a length of zero", header(""), "is empty"),
    ("a length of zero with data after it", header("", 4), "is empty"),
    ("a length over the limit", header("{}", length=LONGEST_HEADER + 1), "100000001 bytes"),
    ("a length of all ones", header("{}", length=2**64 - 1), "18446744073709551615 bytes"),
    ("a length past the end of the file", header("{}", length=3), "only 2 follow"),
    ("a length with nothing after it", header("", length=2), "only 0 follow"),
    ("a length that cuts the header", header("{}", length=1), "not JSON"),
    ("a length that takes in data", header(f"{{{A}}}", 4, length=len(A) + 3), "not JSON"),
    ("data cut short", GOOD[:-1], "truncated"),
    ("no data", GOOD[:-4], "truncated"),
    ("a byte after the last tensor", GOOD + b"\0", "bytes after the last tensor"),
    ("data without tensors", header("{}", 1), "bytes after the last tensor"),
    ("a git-lfs pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "at most 100000000"),
    # the text
    ("bad UTF-8 in a name", header(b'{"\xff":{}}'), "invalid start byte"),
    ("overlong UTF-8", header(b'{"\xc0\x80":{}}'), "invalid start byte"),
    ("a surrogate in UTF-8", header(b'{"__metadata__":{"a":"\xed\xa0\x80"}}'), "invalid continuation byte"),
    ("a byte order mark", header(b"\xef\xbb\xbf{}"), "expected it to begin with '{'"),
    ("UTF-16", header("{}".encode("utf-16-le")), "not JSON"),
    ("NULs after the value", header(b"{}\0\0\0\0\0\0"), "not JSON"),
    ("a second value", header("{}{}"), "not JSON"),
    ("a form feed after the value", header("{}\f"), "not JSON"),
    ("only spaces", header("        "), "expected it to begin with '{'"),
    ("an array", header("[]"), "expected it to begin with '{'"),
    ("null", header("null"), "expected it to begin with '{'"),
    ("a string", header('"{}"'), "expected it to begin with '{'"),
    ("an unclosed object", header("{"), "not JSON"),
    ("a comma too many", header(f"{{{A},}}", 4), "not JSON"),
    ("single quotes", header("{'__metadata__':{}}"), "not JSON"),
    ("a key that is not a string", header("{1:{}}"), "not JSON"),
    ("a comment", header("{}//"), "not JSON"),
    ("a control character in a name", header('{"\n":{}}'), "not JSON"),
    ("an unknown escape", header('{"\\x61":{}}'), "not JSON"),
    ("deep nesting", header(f'{{"a":{DEEP}'), "levels"),
    ("deep nesting that closes", header(f'{{"a":{DEEP}{DEEP.replace("[", "]")}}}'), "levels"),
    ("deep nesting after a string of quotes and brackets", header('{"\\\\\\"[{":' + DEEP), "levels"),
    ("NaN", one(offsets="[NaN,4]"), "NaN is not a JSON value"),
    ("Infinity", one(offsets="[0,Infinity]"), "Infinity is not a JSON value"),
    ("a number out of range", one(offsets="[0,1e999]"), "float64's range"),
    ("an integer of 5000 digits", one(offsets=f"[0,{'9' * 5000}]"), "5000 digits"),
    ("a lone surrogate in a name", header('{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), "surrogate"),
    ("a lone surrogate in metadata", header('{"__metadata__":{"a":"\\udc00"}}'), "surrogate"),
    ("surrogates the wrong way round", header('{"__metadata__":{"a":"\\udc00\\ud800"}}'), "surrogate"),
    # metadata
    ("metadata twice", header('{"__metadata__":{},"__metadata__":{}}'), "'__metadata__' occurs twice"),
    ("metadata as an array", header('{"__metadata__":[]}'), "an array of 0"),
    ("metadata as a string", header('{"__metadata__":"pt"}'), "expected an object of strings"),
    ("a number in metadata", header('{"__metadata__":{"step":1}}'), "1 for 'step', expected a string"),
    ("null in metadata", header('{"__metadata__":{"step":null}}'), "null for 'step'"),
    ("an object in metadata", header('{"__metadata__":{"step":{}}}'), "an object of 0 for 'step'"),
    ("a tensor named as metadata", header('{"\\u005f_metadata__":{"dtype":"U8","shape":[0]}}'), "for 'shape'"),
    # a tensor's fields
    ("null for a tensor", header('{"a":null}'), "is null, expected an object"),
    ("a string for a tensor", header('{"a":"F32"}'), "is 'F32', expected an object"),
    ("no fields", header('{"a":{}}'), "has no data_offsets"),
    ("no dtype", header('{"a":{"shape":[1],"data_offsets":[0,4]}}', 4), "has no dtype"),
    ("no shape", header('{"a":{"dtype":"F32","data_offsets":[0,4]}}', 4), "has no shape"),
    ("no data_offsets", header('{"a":{"dtype":"F32","shape":[1]}}', 4), "has no data_offsets"),
    ("an upper-case field", header('{"a":{"Dtype":"F32","shape":[1],"data_offsets":[0,4]}}', 4), "has no dtype"),
    ("dtype twice", header(f'{{{A[:-1]},"dtype":"F32"}}}}', 4), "'dtype' occurs twice"),
    ("shape twice", header(f'{{{A[:-1]},"shape":[1]}}}}', 4), "'shape' occurs twice"),
    ("data_offsets twice", header(f'{{{A[:-1]},"data_offsets":[0,4]}}}}', 4), "'data_offsets' occurs twice"),
    ("an unknown dtype", one('"F128"'), "'F128'"),
    ("a lower-case dtype", one('"f32"'), "'f32'"),
    ("torch's name for a dtype", one('"float32"'), "'float32'"),
    ("an empty dtype", one('""'), "the dtype ''"),
    ("null as dtype", one("null"), "null as dtype"),
    ("a number as dtype", one("32"), "32 as dtype"),
    # numbers
    ("null as shape", one(shape="null"), "the shape null"),
    ("a number as shape", one(shape="1"), "the shape 1"),
    ("a negative size", one(shape="[-1]"), "-1 in its shape"),
    ("two negative sizes", one(shape="[-1,-1]"), "-1 in its shape"),
    ("a float size", one(shape="[1.0]"), "1.0 in its shape"),
    ("a size with an exponent", one(shape="[1e0]"), "1.0 in its shape"),
    ("true as size", one(shape="[true]"), "true in its shape"),
    ("a string as size", one(shape='["1"]'), "'1' in its shape"),
    ("an array as size", one(shape="[[1]]"), "an array of 1 in its shape"),
    ("a size past 64 bits", one(shape="[0,18446744073709551616]", offsets="[0,0]", data=0), "overflows"),
    ("null as data_offsets", one(offsets="null"), "null as data_offsets"),
    ("no offsets", one(offsets="[]"), "an array of 0 as data_offsets"),
    ("one offset", one(offsets="[4]"), "an array of 1 as data_offsets"),
    ("three offsets", one(offsets="[0,4,4]"), "an array of 3 as data_offsets"),
    ("offsets as an object", one(offsets='{"0":0,"1":4}'), "an object of 2 as data_offsets"),
    ("a negative offset", one(offsets="[-4,0]", data=0), "-4 in data_offsets"),
    ("negative zero as offset", one(offsets="[-0,4]"), "-0.0 in data_offsets"),
    ("a float offset", one(offsets="[0,4.0]"), "4.0 in data_offsets"),
    ("an offset with an exponent", one(offsets="[0,4e0]"), "4.0 in data_offsets"),
    ("false as offset", one(offsets="[false,4]"), "false in data_offsets"),
    ("a string as offset", one(offsets='["0","4"]'), "'0' in data_offsets"),
    ("a leading zero", one(offsets="[00,4]"), "not JSON"),
    ("a plus sign", one(offsets="[+0,4]"), "not JSON"),
    # sizes
    ("the end before the begin", one(offsets="[4,0]"), "4 to 0"),
    ("a shape larger than its extent", one(shape="[2]"), "expected 8 bytes"),
    ("a shape smaller than its extent", one('"F16"'), "expected 2 bytes"),
    ("an extent without elements", one(shape="[0]"), "expected 0 bytes"),
    ("a shape that overflows", one(shape="[4294967296,4294967296,4294967296]"), "overflows"),
    ("a shape that wraps to its extent", one('"U8"', "[9223372036854775808,2]", "[0,0]", 0), "overflows"),
    ("a shape that overflows before its zero", one(shape="[4294967296,4294967296,0]", offsets="[0,0]"), "overflows"),
    ("bits that overflow by one", one(shape="[576460752303423488]", offsets="[0,0]", data=0), "overflows"),
    ("half a byte", one('"F4"', "[1]", "[0,1]", 1), "1 elements of 4 bits"),
    ("three halves of a byte", one('"F4"', "[3]", "[0,1]", 1), "3 elements of 4 bits"),
    ("six bits", one('"F6_E2M3"', "[]", "[0,1]", 1), "1 elements of 6 bits"),
    ("twelve bits", one('"F6_E3M2"', "[2]", "[0,2]", 2), "2 elements of 6 bits"),
    # tiling
    ("a hole at the start", several((1, 4), data=4), "a gap: the data begins"),
    ("a hole in the middle", several((0, 2), (3, 4), data=4), "a gap: tensor 't0' ends"),
    ("a partial overlap", several((0, 3), (2, 4), data=4), "an overlap: tensor 't0' ends"),
    ("two tensors on one extent", several((0, 4), (0, 4), data=4), "an overlap: tensor 't0' ends"),
    ("a tensor inside another", several((0, 4), (1, 3), data=4), "an overlap: tensor 't0' ends"),
    ("an empty tensor inside another", several((0, 4), (2, 2), data=4), "an overlap: tensor 't0' ends"),
    ("an empty tensor past the end", several((0, 4), (5, 5), data=4), "a gap: tensor 't0' ends"),
    ("an extent past the file", several((0, 4), (4, 8), data=4), "truncated"),
    ("offsets from the start of the file", several((8, 12), data=4), "a gap: the data begins"),
]  # fmt: skip

REJECTED_BY_BOWLINE_ALONE = [
    ("a tensor name twice", header(f"{{{A},{A}}}", 4), "'a' occurs twice"),
    ("a tensor name twice, once escaped", header(f'{{{A},"\\u0061":{F32}}}', 4), "'a' occurs twice"),
    (
        "a tensor name twice, the first without data",
        header(f'{{"a":{{"dtype":"U8","shape":[0],"data_offsets":[9,9]}},{A}}}', 4),
        "'a' occurs twice",
    ),
    ("a metadata key twice", header('{"__metadata__":{"k":"1","k":"2"}}'), "'k' occurs twice"),
    ("a space before the header", header(" {}"), "expected it to begin with '{'"),
    ("a newline before the header", header(f"\n{{{A}}}", 4), "expected it to begin with '{'"),
    ("a tensor as an array", header('{"a":["F32",[1],[0,4]]}', 4), "is an array of 3"),
    ("an extra field", header(f'{{{A[:-1]},"strides":[1]}}}}', 4), "the field 'strides'"),
    ("extra fields with a key twice", header(f'{{{A[:-1]},"x":0,"x":0}}}}', 4), "'x' occurs twice"),
    ("a dtype as an object", one('{"F32":null}'), "an object of 1 as dtype"),
    ("a zero before sizes that overflow", one(shape="[0,4294967296,4294967296]", offsets="[0,0]", data=0), "overflows"),
    ("a zero before a size that no tensor has", one('"U8"', "[0,18446744073709551615]", "[0,0]", 0), "overflows"),
]  # fmt: skip


def refusal_of(file: bytes) -> FormatError:
    with pytest.raises(FormatError) as raised:
        read(file)
    return raised.value


@pytest.mark.parametrize(("file", "seen"), [pytest.param(file, seen, id=name) for name, file, seen in REJECTED_BY_BOTH])
def test_what_safetensors_rejects_is_refused_for_its_own_reason(file: bytes, seen: str) -> None:
    assert read_by_safetensors(file) is None
    error = refusal_of(file)
    check_error(error)
    assert seen in error.message


@pytest.mark.parametrize(
    ("file", "seen"), [pytest.param(file, seen, id=name) for name, file, seen in REJECTED_BY_BOWLINE_ALONE]
)
def test_what_readers_take_differently_is_refused_though_safetensors_accepts_it(file: bytes, seen: str) -> None:
    assert read_by_safetensors(file) is not None
    error = refusal_of(file)
    check_error(error)
    assert seen in error.message


VALID = [
    ("no tensors", header("{}")),
    ("no tensors but padding", header("{}      ")),
    ("padding of every JSON space", header("{} \n\r\t")),
    ("spaces within", header('{ "a" : {\n"dtype" :\t"F32" , "shape":[ 1 ],\r"data_offsets":[ 0 , 4 ] } }', 4)),
    ("fields in any order", header('{"a":{"data_offsets":[0,4],"shape":[1],"dtype":"F32"}}', 4)),
    ("a scalar", one(shape="[]")),
    ("many axes of size one", one(shape=str([1] * 200))),
    ("an empty tensor alone", one(shape="[0]", offsets="[0,0]", data=0)),
    ("an empty tensor with wide axes", one(shape="[0,4294967296]", offsets="[0,0]", data=0)),
    ("empty tensors at both ends and between", several((0, 0), (0, 2), (2, 2), (2, 2), (2, 4), (4, 4), data=4)),
    ("tensors in no order", several((2, 4), (4, 7), (0, 2), data=7)),
    ("an empty tensor named after the one that it stands before", several((0, 2), (2, 4), (2, 2), (0, 0), data=4)),
    ("two F4", one('"F4"', "[2]", "[0,1]", 1)),
    ("no F4", one('"F4"', "[0,3]", "[0,0]", 0)),
    ("metadata", header('{"__metadata__":{"format":"pt","":"","é":"\\u0000\\ud83d\\ude00"}}')),
    ("empty metadata", header('{"__metadata__":{}}')),
    ("null metadata", header('{"__metadata__":null}')),
    ("metadata after the tensors", header(f'{{{A},"__metadata__":{{"k":"v"}}}}', 4)),
    ("a metadata key that is a tensor's name", header(f'{{"__metadata__":{{"a":"v"}},{A}}}', 4)),
    ("a Unicode name", named('"重み😀"')),
    ("an escaped Unicode name", named('"\\u91cd\\ud83d\\ude00"')),
    ("a name with a byte order mark", named('"\ufeff"')),
    ("a name of brackets and quotes", named('"' + '[{\\"\\\\' * 99 + '"')),
    ("names that differ in composition", header('{"é":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
                                                '"e\u0301":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}')),
    ("misaligned tensors", header('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
                                  '"b":{"dtype":"F64","shape":[1],"data_offsets":[1,9]}}', 9)),
    ("an empty name", named('""')),
    ("a name with a NUL", named('"a\\u0000"')),
    *((f"four {dtype}", one(f'"{dtype}"', "[4]", f"[0,{bits // 2}]", bits // 2)) for dtype, bits in BITS.items()),
]  # fmt: skip


@pytest.mark.parametrize("file", [pytest.param(file, id=name) for name, file in VALID])
def test_a_valid_file_is_read_exactly_as_safetensors_reads_it(file: bytes) -> None:
    assert as_reading(read(file), file) == read_by_safetensors(file)


def test_offsets_are_absolute_and_tile_the_file() -> None:
    file = several((2, 4), (4, 7), (0, 2), data=7)
    got = read(file)
    assert list(got.tensors) == ["t2", "t0", "t1"]
    assert [t.offset - got.data_start for t in got.tensors.values()] == [0, 2, 4]
    assert got.data_start == len(file) - 7
    assert got.size == len(file)
    assert {t.file for t in got.tensors.values()} == {FILE_NAME}


def test_only_the_header_is_read() -> None:
    class Watched(MemoryBytes):
        reached = 0

        def _fill(self, offset: int, buffer: memoryview) -> None:
            self.reached = max(self.reached, offset + len(buffer))
            super()._fill(offset, buffer)

    file = several((0, 200), data=200)
    source = Watched(FILE_NAME, file)
    assert read_header(source).data_start == source.reached == len(file) - 200


def test_a_file_that_shrinks_while_it_is_read_is_a_format_error(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    path.write_bytes(GOOD)
    with LocalFile(path) as source:
        path.write_bytes(GOOD[:20])
        with pytest.raises(FormatError, match="ended at byte 20"):
            read_header(source)


def test_a_misaligned_tensor_is_a_warning_that_names_it() -> None:
    text = '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F64","shape":[1],"data_offsets":[1,9]}}'
    text += " " * (-len(text) % 8)
    (warning,) = read(header(text, 9)).warnings
    assert (warning.kind, warning.tensors) == ("misaligned", ("b",))
    assert warning.message == (
        f"{FILE_NAME}: 1 of 2 tensors do not begin at a multiple of their element's size, "
        f"first 'b' (F64) at byte {8 + len(text) + 1}"
    )


def test_an_unpadded_header_misaligns_all_but_single_bytes() -> None:
    infos = {"bytes": ("U8", 0, 1), "halves": ("F4", 1, 2), "empty": ("F64", 2, 2), "words": ("I16", 2, 4)}
    text = json.dumps(
        {
            name: {"dtype": dtype, "shape": [(end - begin) * 8 // BITS[dtype]], "data_offsets": [begin, end]}
            for name, (dtype, begin, end) in infos.items()
        }
    )
    text += " " * ((-len(text) % 8) + 1)
    assert [(warning.kind, warning.tensors) for warning in read(header(text, 4)).warnings] == [
        ("misaligned", ("words",))
    ]


def test_an_empty_name_and_a_name_with_a_nul_are_warnings() -> None:
    text = '{"":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
    text += '"a\\u0000b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}'
    warnings = read(header(text, 2)).warnings
    assert [(warning.kind, warning.tensors) for warning in warnings] == [("empty-name", ("",)), ("nul-name", ("a\0b",))]
    assert all(warning.message.isprintable() for warning in warnings)


def test_a_tidy_file_has_no_warnings() -> None:
    text = f"{{{A}}}"
    assert read(header(text + " " * (-len(text) % 8), 4)).warnings == ()


def test_absent_null_and_empty_metadata_are_all_empty() -> None:
    for text in ("{}", '{"__metadata__":null}', '{"__metadata__":{}}'):
        assert read(header(text)).metadata == {}


def test_a_hostile_name_is_escaped_and_clipped_in_messages() -> None:
    name = "\x1b[2J\n\u202e" + "x" * 1_000_000
    error = refusal_of(header(json.dumps({name: 1})))
    check_error(error)
    assert f"({len(name)} characters)" in error.message
    assert "\\x1b" in error.message


def test_a_git_lfs_pointer_is_called_one() -> None:
    assert "git lfs pull" in str(refusal_of(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"))


def test_a_length_over_the_limit_takes_no_memory() -> None:
    class Claimed(MemoryBytes):
        """A file that claims to be a terabyte."""

        def __init__(self) -> None:
            super().__init__(FILE_NAME, header("{}", length=LONGEST_HEADER + 1))
            self.size = 1 << 40

    with pytest.raises(FormatError, match="expected at most 100000000"):
        read_header(Claimed())


def test_a_raised_recursion_limit_does_not_let_nesting_reach_the_stack() -> None:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000_000)
    try:
        assert "levels" in refusal_of(header('{"a":' + "[" * 5_000_000)).message
    finally:
        sys.setrecursionlimit(limit)


def test_a_hundred_thousand_tensors_take_about_as_long_as_parsing_their_json_a_few_times() -> None:
    count = 100_000
    infos = {
        f"model.layers.{index}.weight": {"dtype": "BF16", "shape": [1, 2], "data_offsets": [4 * index, 4 * index + 4]}
        for index in range(count)
    }
    text = json.dumps(infos).encode()
    file = safetensors_file(text, bytes(4 * count))

    began = time.perf_counter()
    json.loads(text)
    parsed = time.perf_counter()
    assert len(read(file).tensors) == count
    read_at = time.perf_counter()
    assert read_at - parsed < 10 * (parsed - began) + 1  # a quadratic step would take minutes
