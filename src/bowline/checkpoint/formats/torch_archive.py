"""Reads the zip archives that torch writes strictly and by ranges: their directory, and the places of their entries.

`zipfile` reads whatever it can. Here two readers must not see different content in one file, so this module refuses
everything that zip readers may understand differently: a comment or any bytes after the archive, two entries of one
name, overlapping entries, a local header that disagrees with the directory, compression, encryption. Files that
`torch.save` and `torch.export.save` write have none of these. Only ranges are read, never the whole file: the end with
the directory, and one header for each entry that is asked for.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from bowline.checkpoint.formats.strict_json import shown
from bowline.checkpoint.places.byte_source import ByteSource
from bowline.errors import FormatError

__all__ = ["CONVERT", "LARGEST_DIRECTORY", "MOST_ENTRIES", "StoredZip", "TorchArchive", "ZipEntry"]

MOST_ENTRIES: Final = 1 << 16
"""The most entries of an archive that is read: torch writes one for each storage, and half a dozen more."""

LARGEST_DIRECTORY: Final = 16 << 20
"""The most bytes of central directory that are read."""

CONVERT: Final = (
    "convert it to safetensors on an isolated machine: read it by torch.load(path, weights_only=True), "
    "write it by safetensors.torch.save_file"
)

_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_SEE_ZIP64 = 0xFFFFFFFF
_TAIL = 64 << 10  # holds the directory of most checkpoints, so that one range request is enough
_USUAL_EXTRA = 160  # torch pads a local header to the next multiple of 64 bytes, behind a zip64 field

_ENCRYPTED = 0x0001 | 0x0040 | 0x2000
_SIZES_FOLLOW = 0x0008  # the local header may have zeros; the directory has the sizes
_METHODS = {8: "DEFLATE", 9: "DEFLATE64", 12: "BZIP2", 14: "LZMA", 93: "ZSTD", 95: "XZ"}

_LEGACY = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."  # torch's magic number, itself a pickle


@dataclass(frozen=True, slots=True, kw_only=True)
class ZipEntry:
    """One entry of the central directory; `limit` is where the next entry, or the directory, begins."""

    name: str
    header: int
    size: int
    crc: int
    limit: int
    sizes_follow: bool


class StoredZip:
    """A zip archive of stored entries in one directory, as torch's writer makes it; `writer` names it in messages.

    `prefix` is the directory, and `find("data/0")` is the entry `PREFIX/data/0`. Opening reads the archive's directory
    alone.

    Raises:
        FormatError: the file is not such an archive, or readers could understand it differently.
    """

    writer = "torch.save"

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._refuse_other_formats(source.read_at(0, min(source.size, 512)))
        tail_start = max(0, source.size - _TAIL)
        tail = source.read_at(tail_start, source.size - tail_start)
        count, start, length = self._directory_place(tail)
        offset = start - tail_start
        directory = tail[offset : offset + length] if offset >= 0 else source.read_at(start, length)
        self.entries: Mapping[str, ZipEntry] = self._read_directory(directory, count, start)
        self.prefix = next(iter(self.entries), "").partition("/")[0]

    def find(self, name: str) -> ZipEntry | None:
        """The entry `NAME/name`, or `None`."""
        return self.entries.get(f"{self.prefix}/{name}")

    def data_start(self, entry: ZipEntry) -> int:
        """The position of the entry's first byte in the file, from its local header, which is checked."""
        raw_name = entry.name.encode()
        length = min(_LOCAL.size + len(raw_name) + _USUAL_EXTRA, self._source.size - entry.header)
        window = self._source.read_at(entry.header, length)
        if len(window) < _LOCAL.size:
            raise self._wrong(f"{shown(entry.name)} has {len(window)} bytes of header, expected {_LOCAL.size}")
        magic, _, flags, method, _, _, _, packed, unpacked, name_length, extra_length = _LOCAL.unpack_from(window)
        name = window[_LOCAL.size : _LOCAL.size + name_length]
        if magic != b"PK\x03\x04" or name != raw_name or method != 0 or flags & _ENCRYPTED:
            raise self._wrong(f"the header of {shown(entry.name)} does not match the archive's directory")
        sizes = {packed, unpacked} - {_SEE_ZIP64}
        if not entry.sizes_follow and sizes - {entry.size}:
            raise self._wrong(
                f"{shown(entry.name)} has {max(sizes)} bytes by its header, but {entry.size} by the directory"
            )
        start = entry.header + _LOCAL.size + name_length + extra_length
        if start + entry.size > entry.limit:
            raise self._wrong(
                f"{shown(entry.name)} ends at byte {start + entry.size}, expected at most {entry.limit}, "
                "where the next part of the archive begins"
            )
        return int(start)

    def read(self, entry: ZipEntry, limit: int) -> bytes:
        """Read a whole entry. Raises `FormatError` before anything is read if it has more than `limit` bytes."""
        if entry.size > limit:
            raise self._wrong(f"{shown(entry.name)} has {entry.size} bytes, expected at most {limit}")
        return self._source.read_at(self.data_start(entry), entry.size)

    def checksum_holds(self, entry: ZipEntry, content: bytes) -> bool:
        """Whether the content has the CRC-32 that the directory gives; torch has an option not to compute it."""
        return zlib.crc32(content) == entry.crc

    def check_byte_order(self, way_out: str) -> None:
        """Check that the byte order, if the archive states one, is little-endian."""
        byteorder = self.find("byteorder")
        if byteorder is not None and (order := self.read(byteorder, 16)) != b"little":
            raise self._wrong(f"its byte order is {order!r}, expected b'little'", way_out)

    def _wrong(self, seen: str, way_out: str | None = None) -> FormatError:
        again = f"the file is damaged or was made by another tool; fetch it again, or save it again with {self.writer}"
        return FormatError(f"{self._source.name}: {seen}", help=way_out or again)

    def _refuse_other_formats(self, head: bytes) -> None:
        if head.startswith(b"PK\x03\x04"):
            return
        if head.startswith(_LEGACY) or head[257:262] == b"ustar":
            raise self._wrong(
                f"torch's format from before 1.6, expected the zip archive that {self.writer} writes now", CONVERT
            )
        if head.startswith(b"version https://git-lfs"):
            raise self._wrong("a Git LFS pointer, expected the file that it points to", "run git lfs pull")
        if head.startswith(b"\x80"):
            raise self._wrong(f"a bare pickle, expected the zip archive that {self.writer} writes")
        raise self._wrong(f"begins with {head[:8]!r}, expected the zip archive that {self.writer} writes")

    def _directory_place(self, tail: bytes) -> tuple[int, int, int]:
        """The number of entries of the central directory, its start and its length."""
        if len(tail) < _END.size or tail[-_END.size :][:4] != b"PK\x05\x06":
            raise self._wrong("does not end like a zip archive: bytes were cut off or added")
        _, disk, first_disk, here, count, length, start, comment = _END.unpack(tail[-_END.size :])
        end = self._source.size - _END.size  # where the directory must end
        locator = tail[-_END.size - _LOCATOR64.size : -_END.size]
        if locator[:4] == b"PK\x06\x07":
            _, _, record_start, disks = _LOCATOR64.unpack(locator)
            end -= _LOCATOR64.size + _END64.size
            record = tail[-_END.size - _LOCATOR64.size - _END64.size :][: _END64.size]
            if record_start != end or len(record) < _END64.size or record[:4] != b"PK\x06\x06" or disks > 1:
                raise self._wrong("its zip64 end record is not directly before the locator that names it")
            _, size, _, _, disk64, first_disk64, here64, count64, length64, start64 = _END64.unpack(record)
            narrow = (disk, first_disk, here, count, length, start)
            wide = (disk64, first_disk64, here64, count64, length64, start64)
            pairs = zip(narrow, wide, (0xFFFF,) * 4 + (_SEE_ZIP64,) * 2, strict=True)
            if size != _END64.size - 12 or any(short not in (full, most) for short, full, most in pairs):
                raise self._wrong("its zip64 end record and its plain end record disagree, expected one directory")
            disk, first_disk, here, count, length, start = wide
        if comment or disk or first_disk or here != count:
            raise self._wrong("a zip archive with a comment or in several parts, expected one plain archive")
        if start + length != end:
            raise self._wrong(f"its directory spans bytes {start} to {start + length}, expected it to end at {end}")
        if count > MOST_ENTRIES or length > LARGEST_DIRECTORY:
            raise self._wrong(
                f"{count} entries in a directory of {length} bytes, "
                f"expected at most {MOST_ENTRIES} in {LARGEST_DIRECTORY}"
            )
        return count, start, length

    def _read_directory(self, directory: bytes, count: int, start: int) -> dict[str, ZipEntry]:
        """Read all entries in order; checks that they do not overlap and end before `start`, the directory's place."""
        records: list[tuple[int, str, int, int, int]] = []  # header, name, size, crc, flags
        seen: set[str] = set()
        position = 0
        packed_entries: list[tuple[str, int]] = []
        for _ in range(count):
            if len(directory) - position < _CENTRAL.size:
                raise self._wrong(f"its directory has {len(records)} entries, expected {count}")
            fields = _CENTRAL.unpack_from(directory, position)
            magic, _, _, flags, method, _, _, crc, packed, size, name_length, extra_length, comment = fields[:13]
            disk, _, _, header = fields[13:]
            name_start = position + _CENTRAL.size
            extra_start = name_start + name_length
            position = extra_start + extra_length + comment
            if magic != b"PK\x01\x02" or position > len(directory) or disk:
                raise self._wrong(f"entry {len(records)} of its directory is malformed")
            name = self._name(directory[name_start:extra_start])
            if _SEE_ZIP64 in (packed, size, header):
                extra = directory[extra_start : extra_start + extra_length]
                size, packed, header = self._wide(name, extra, (size, packed, header))
            if flags & _ENCRYPTED:
                raise self._wrong(f"{shown(name)} is encrypted, expected plain bytes")
            if name.lower() in seen:  # some readers fold case
                raise self._wrong(f"two entries are called {shown(name)}, expected one")
            if method or packed != size:
                packed_entries.append((name, method))
            seen.add(name.lower())
            records.append((header, name, size, crc, flags))
        if position != len(directory):
            raise self._wrong(
                f"{len(directory) - position} bytes after the {count} entries of its directory, expected none"
            )
        self._refuse_torchscript(records)
        for name, method in packed_entries:
            how = f"compressed ({_METHODS.get(method, f'method {method}')})" if method else "stored with two sizes"
            raise self._wrong(f"{shown(name)} is {how}, expected stored bytes, as {self.writer} writes them")
        limits = [*sorted(record[0] for record in records)[1:], start]
        entries = {}
        for (header, name, size, crc, flags), limit in zip(sorted(records), limits, strict=True):
            if header + _LOCAL.size + len(name.encode()) + size > limit:
                raise self._wrong(f"{shown(name)} (byte {header}, {size} bytes) overlaps what begins at byte {limit}")
            entries[name] = ZipEntry(
                name=name, header=header, size=size, crc=crc, limit=limit, sizes_follow=bool(flags & _SIZES_FOLLOW)
            )
        return entries

    def _name(self, raw: bytes) -> str:
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            raise self._wrong(f"an entry is called {raw[:80]!r}, expected UTF-8") from None
        parts = name.removesuffix("/").split("/")
        if "\0" in name or "\\" in name or not {"", ".", ".."}.isdisjoint(parts):
            raise self._wrong(f"an entry is called {shown(name)}, expected a path that stays within the archive")
        return name

    def _wide(self, name: str, extra: bytes, narrow: tuple[int, int, int]) -> tuple[int, int, int]:
        """Size, packed size and header offset; taken from the extra field where the 32-bit fields are full."""
        needed = [value == _SEE_ZIP64 for value in narrow]
        position = 0
        while position + 4 <= len(extra):
            kind, length = struct.unpack_from("<2H", extra, position)
            position += 4
            if kind == 1 and length >= 8 * sum(needed) and position + length <= len(extra):
                wide = iter(struct.unpack_from(f"<{sum(needed)}Q", extra, position))
                size, packed, header = (
                    next(wide) if full else value for full, value in zip(needed, narrow, strict=True)
                )
                return size, packed, header
            position += length
        raise self._wrong(f"{shown(name)} lacks its 64-bit sizes, expected them in a zip64 field")

    def _refuse_torchscript(self, records: list[tuple[int, str, int, int, int]]) -> None:
        inner = {name.partition("/")[2] for _, name, *_ in records}
        if "constants.pkl" in inner or any(name.startswith("code/") for name in inner):
            raise self._wrong(
                f"a TorchScript archive, which holds code, expected the tensors that {self.writer} writes",
                "on an isolated machine, call torch.jit.load and save its state_dict() by safetensors.torch.save_file",
            )

    def check_one_directory(self) -> None:
        """Check that all entries are in the directory of the first."""
        strangers = [name for name in self.entries if not name.startswith(f"{self.prefix}/")]
        if strangers:
            raise self._wrong(
                f"it has entries {shown(f'{self.prefix}/')} and {shown(strangers[0])}, expected one directory for all"
            )


class TorchArchive(StoredZip):
    """A file of `torch.save` since 1.6: a zip archive of `NAME/data.pkl` and one entry for each storage.

    `pickle` is the entry `NAME/data.pkl`. Opening reads the directory, and the byte order if the archive states it.

    Raises:
        FormatError: the file is not such an archive, or readers could understand it differently. For the two other
            formats under this file name, torch's old format and TorchScript, the message says how to convert.

    Example:
        >>> import io, zipfile
        >>> from bowline.checkpoint.places.byte_source import MemoryBytes
        >>> file = io.BytesIO()
        >>> with zipfile.ZipFile(file, "w") as writer:
        ...     writer.writestr("model/data.pkl", b"}.")
        >>> archive = TorchArchive(MemoryBytes("pytorch_model.bin", file.getvalue()))
        >>> archive.prefix, archive.read(archive.pickle, 100)
        ('model', b'}.')
    """

    def __init__(self, source: ByteSource) -> None:
        super().__init__(source)
        self.check_one_directory()
        pickle = self.find("data.pkl")
        if pickle is None:
            raise self._wrong("a zip archive without data.pkl, expected what torch.save writes")
        self.check_byte_order(CONVERT)
        self.pickle = pickle
