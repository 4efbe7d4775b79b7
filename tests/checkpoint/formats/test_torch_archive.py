"""An archive is read by ranges, and refused if readers could understand it differently."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bowline.checkpoint.formats import torch_archive
from bowline.checkpoint.formats.pickle_file import read_pickle
from bowline.checkpoint.places.byte_source import ByteSource
from bowline.errors import FormatError
from tests.checkpoint.pickled import (
    PROGRAM,
    SIX,
    archive,
    archive_entry,
    assert_sound,
    dictionary,
    patched,
    read,
    read_watched,
    saved,
    storage,
    tensor,
    values,
)

# --- the archive ------------------------------------------------------------------------------------------------------


def in_directory(file: bytes, entry: str, field: int, value: bytes) -> bytes:
    """The file with `value` at byte `field` of the entry's record in the central directory."""
    raw = entry.encode()
    at = file.rindex(raw) - 46
    assert file[at : at + 4] == b"PK\x01\x02"
    return file[: at + field] + value + file[at + field + len(value) :]


def in_header(file: bytes, entry: str, field: int, value: bytes) -> bytes:
    """The file with `value` at byte `field` of the entry's local header."""
    at = archive_entry(file, entry).header_offset + field
    return file[:at] + value + file[at + len(value) :]


GOOD = saved(dictionary({"w": tensor()}))
DATA = "model/data/0"
ENCRYPTED = struct.pack("<H", 1)


def bad_archives() -> Iterator[tuple[str, bytes, str]]:
    yield "an empty file", b"", "begins with b''"
    yield "another format", b"\x00" * 100, "expected the zip archive that torch.save writes"
    yield "a Git LFS pointer", b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"
    yield "a bare pickle", pickle.dumps({}), "a bare pickle"
    yield "a legacy file", b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.", "before 1.6"
    yield "a tar file", b"x" * 257 + b"ustar" + b"x" * 250, "before 1.6"
    yield "a legacy file with an archive behind", b"\x80\x02\x8a\x0alxxxx" + GOOD, "a bare pickle"
    yield "bytes before the archive", b"PK\x03\x04" + GOOD, "its directory spans"
    yield "bytes after the archive", GOOD + b"\0", "bytes were cut off or added"
    yield "a cut archive", GOOD[:-1], "bytes were cut off or added"
    yield "a comment", GOOD[:-2] + b"\x05\x00", "a zip archive with a comment"
    yield (
        "a count too high",
        GOOD[:-14] + struct.pack("<HH", 9, 9) + GOOD[-10:],
        "its directory has 3 entries, expected 9",
    )
    yield "a count too low", GOOD[:-14] + struct.pack("<HH", 1, 1) + GOOD[-10:], "bytes after the 1 entries"
    yield "several disks", GOOD[:-18] + b"\x01\x00" + GOOD[-16:], "in several parts"
    yield "DEFLATE", archive({"data.pkl": b"}."}, method=zipfile.ZIP_DEFLATED), "compressed (DEFLATE), expected stored"
    yield "encryption", in_directory(GOOD, DATA, 8, ENCRYPTED), "is encrypted"
    yield "encryption in the header", in_header(GOOD, DATA, 6, ENCRYPTED), "does not match the archive's directory"
    yield (
        "compression in the header",
        in_header(GOOD, DATA, 8, b"\x08\x00"),
        "does not match the archive's directory",
    )
    yield (
        "another name in the header",
        in_header(GOOD, DATA, 30, b"Model"),
        "does not match the archive's directory",
    )
    yield "another size in the header", in_header(GOOD, DATA, 18, b"\x10\0\0\0"), "24 bytes by its header, but"
    yield "no header", in_header(GOOD, DATA, 0, b"PK\x01\x02"), "does not match the archive's directory"
    yield (
        "a header that runs into others",
        in_header(GOOD, DATA, 28, b"\xff\xff"),
        "where the next part of the archive begins",
    )
    yield "two sizes", in_directory(GOOD, DATA, 20, struct.pack("<I", 23)), "stored with two sizes"
    yield "past the end", in_directory(GOOD, DATA, 20, struct.pack("<II", 10**9, 10**9)), "overlaps what begins"
    yield (
        "past its neighbour",
        in_directory(GOOD, "model/data.pkl", 20, struct.pack("<II", 400, 400)),
        "overlaps what begins",
    )
    yield "on another", in_directory(GOOD, DATA, 42, struct.pack("<I", 0)), "overlaps what begins"
    yield "wide sizes that are missing", in_directory(GOOD, DATA, 20, b"\xff" * 8), "lacks its 64-bit sizes"
    yield "a name of no path", GOOD.replace(b"model/data/0", b"model/../ata"), "stays within the archive"
    yield "an absolute name", GOOD.replace(b"model/data/0", b"/odel/data/0"), "stays within the archive"
    yield "a Windows name", GOOD.replace(b"model/data/0", b"model\\data/0"), "stays within the archive"
    yield "a name with a NUL", GOOD.replace(b"model/data/0", b"model/data/\0"), "stays within the archive"
    yield "a name that is not UTF-8", GOOD.replace(b"model/data/0", b"model/data/\xff"), "expected UTF-8"
    yield "two directories", GOOD.replace(b"model/data/0", b"nodel/data/0"), "expected one directory for all"
    yield "no pickle", archive({"other": b""}), "without data.pkl"


def test_a_good_archive_is_read() -> None:
    assert list(read(GOOD).tensors) == ["w"]


@pytest.mark.parametrize(("file", "seen"), [pytest.param(*rest, id=what) for what, *rest in bad_archives()])
def test_an_archive_that_can_be_read_two_ways_is_refused(file: bytes, seen: str) -> None:
    with pytest.raises(FormatError) as caught:
        read(file)
    assert seen in caught.value.message
    assert caught.value.message.isprintable()


@pytest.mark.parametrize("second", ["data.pkl", "DATA.PKL"])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_entries_of_one_name_are_refused(second: str) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as writer:
        writer.writestr("model/data.pkl", b"}.")
        writer.writestr(f"model/{second}", b"N.")
    with pytest.raises(FormatError, match="two entries are called"):
        read(file.getvalue())


def test_a_directory_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_archive, "MOST_ENTRIES", 2)
    with pytest.raises(FormatError, match="3 entries in a directory of"):
        read(GOOD)


def test_zip64_records_are_read_and_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 8)  # zipfile then thinks 9 bytes too large for the plain fields
    file = saved(dictionary({"w": tensor()}))
    end = file.index(b"PK\x06\x06")
    assert values(file, read(file).tensors["w"]).tolist() == [[0, 1, 2], [3, 4, 5]]
    for at in (end + 4, end + 24, end + 40, end + 48, end + 56 + 8):
        with pytest.raises(FormatError):
            read(file[:at] + b"\x01" + file[at + 1 :])
    with pytest.raises(FormatError, match="its zip64 end record and its plain end record disagree"):
        read(file[:-14] + struct.pack("<HH", 2, 2) + file[-10:])


class Sparse(ByteSource):
    """A file of mostly zeros, larger than memory, that notes which ranges were read."""

    def __init__(self, size: int, segments: Mapping[int, bytes]) -> None:
        self.name = "pytorch_model.bin"
        self.size = size
        self.segments = segments
        self.reads: list[tuple[int, int]] = []

    def _fill(self, offset: int, buffer: memoryview) -> None:
        self.reads.append((offset, len(buffer)))
        buffer[:] = bytes(len(buffer))
        for start, segment in self.segments.items():
            begin, end = max(start, offset), min(start + len(segment), offset + len(buffer))
            if begin < end:
                buffer[begin - offset : end - offset] = segment[begin - start : end - start]


def test_storages_past_four_gibibytes_are_found_and_no_data_is_read() -> None:
    five = 5 << 30
    pickled = b"\x80\x02" + dictionary(
        {
            "big": tensor((five,), (1,), of=storage(kind="ByteStorage", numel=five)),
            "last": tensor(of=storage("1")),
        }
    )
    pickled += b"."
    position = 0
    segments: dict[int, bytes] = {}
    directory = b""
    for entry, content, size in (("data.pkl", pickled, len(pickled)), ("data/0", b"", five), ("data/1", SIX, len(SIX))):
        raw = f"model/{entry}".encode()
        wide = struct.pack("<HHQQQ", 1, 24, size, size, position)
        header = struct.pack("<4s5H3I2H", b"PK\x03\x04", 45, 0, 0, 0, 0, 0, 2**32 - 1, 2**32 - 1, len(raw), 20)
        segments[position] = header + raw + struct.pack("<HHQQ", 1, 16, size, size) + content
        fields = (45, 45, 0, 0, 0, 0, 0, 2**32 - 1, 2**32 - 1, len(raw), len(wide), 0, 0, 0, 0, 2**32 - 1)
        directory += struct.pack("<4s6H3I5H2I", b"PK\x01\x02", *fields) + raw + wide
        position += len(header) + len(raw) + 20 + size
    record = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 3, 3, len(directory), position)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, position + len(directory), 1)
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 3, 3, len(directory), 2**32 - 1, 0)
    segments[position] = directory + record + locator + end
    source = Sparse(position + len(segments[position]), segments)

    found = read_pickle(source)
    big, last = found.tensors["big"], found.tensors["last"]
    assert (big.nbytes, last.nbytes) == (five, 24)
    assert source.read_at(last.offset, 24) == SIX
    assert sum(length for _, length in source.reads) < 200_000
    assert len(source.reads) < 10


WHOLE = archive({"data.pkl": PROGRAM, "byteorder": b"little", "data/0": SIX})


@given(
    changes=st.lists(
        st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 4), st.binary(max_size=4)), min_size=1, max_size=4
    )
)
@settings(max_examples=400)
def test_any_change_of_an_archive_is_read_or_refused_and_nothing_runs(changes: list[tuple[int, int, bytes]]) -> None:
    file = patched(WHOLE, changes)
    assert_sound(read_watched(file), len(file))


@pytest.mark.parametrize("bit", range(8))
def test_any_one_bit_of_an_archive_may_flip(bit: int) -> None:
    for at in range(len(GOOD)):
        file = GOOD[:at] + bytes([GOOD[at] ^ (1 << bit)]) + GOOD[at + 1 :]
        assert_sound(read_watched(file), len(file))
