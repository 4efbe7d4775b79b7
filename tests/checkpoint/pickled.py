"""The bytes that `torch.save` writes, built by hand so that any field can be wrong, and a reader that is watched."""

from __future__ import annotations

import io
import struct
import sys
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from bowline.checkpoint.formats.dtypes import BITS, decode
from bowline.checkpoint.formats.pickle_file import PickledFile, read_pickle
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.checkpoint.places.byte_source import MemoryBytes
from bowline.errors import CheckpointError


def text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def number(value: int) -> bytes:
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def together(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def name(module: str, attribute: str) -> bytes:
    return b"c" + f"{module}\n{attribute}\n".encode()


def call(module: str, function: str, *arguments: bytes) -> bytes:
    return name(module, function) + together(*arguments) + b"R"


def dictionary(items: Mapping[str, bytes]) -> bytes:
    return b"}(" + b"".join(text(key) + value for key, value in items.items()) + b"u"


def storage(key: str = "0", kind: str = "FloatStorage", numel: int = 6, module: str = "torch") -> bytes:
    return together(text("storage"), name(module, kind), text(key), text("cpu"), number(numel)) + b"Q"


HOOKS = call("collections", "OrderedDict")
FALSE = b"\x89"
NONE = b"N"


def sizes(values: tuple[int, ...]) -> bytes:
    return together(*map(number, values))


def tensor(
    shape: tuple[int, ...] = (2, 3),
    strides: tuple[int, ...] = (3, 1),
    offset: int = 0,
    of: bytes | None = None,
    metadata: bytes = b"",
) -> bytes:
    of = storage() if of is None else of
    arguments = (of, number(offset), sizes(shape), sizes(strides), FALSE, HOOKS, metadata)
    return call("torch._utils", "_rebuild_tensor_v2", *arguments)


SIX = np.arange(6, dtype="<f4").tobytes()


def archive(entries: Mapping[str, bytes], *, prefix: str = "model/", method: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as writer:
        for entry, content in entries.items():
            writer.writestr(prefix + entry, content)
    return file.getvalue()


def saved(value: bytes, storages: Mapping[str, bytes] | None = None, **more: bytes) -> bytes:
    storages = {"0": SIX} if storages is None else storages
    data = {f"data/{key}": content for key, content in storages.items()}
    return archive({"data.pkl": b"\x80\x02" + value + b".", "byteorder": b"little", **data, **more})


def read(file: bytes) -> PickledFile:
    return read_pickle(MemoryBytes("pytorch_model.bin", file))


def values(file: bytes, stored: StoredTensor) -> np.ndarray[Any, Any]:
    """What the extent decodes to, strides and all: the reader's answer put to use."""
    raw = file[stored.offset : stored.offset + stored.nbytes]
    if stored.strides is None:
        return decode(raw, stored.dtype, stored.shape)
    flat = decode(raw, stored.dtype, (stored.nbytes * 8 // BITS[stored.dtype],))
    steps = tuple(stride * flat.itemsize for stride in stored.strides)
    return np.lib.stride_tricks.as_strided(flat, stored.shape, steps)


def archive_entry(file: bytes, entry: str) -> zipfile.ZipInfo:
    with zipfile.ZipFile(io.BytesIO(file)) as reader:
        return reader.getinfo(entry)


RICH = dictionary(
    {
        "wte.weight": tensor(),
        "lm_head.weight": call("torch._utils", "_rebuild_parameter", tensor(), b"\x88", HOOKS),
        "turned": tensor((3, 2), (1, 3)),
        "step": number(1 << 40),
        "args": dictionary({"lr": b"G" + struct.pack(">d", 0.1), "betas": together(NONE, FALSE)}),
        "state": HOOKS + b"q\x01" + dictionary({"_metadata": b"h\x01"}) + b"b",
    }
)
PROGRAM = b"\x80\x02" + RICH + b"."
WATCHED = (
    "exec",
    "compile",
    "open",
    "import",
    "os.",
    "subprocess.",
    "socket.",
    "shutil.",
    "pickle.",
    "ctypes.",
    "sys.",
)


class Watch:
    """Notes whatever Python's own auditing reports while it is on: imports, exec, open, processes, unpickling."""

    def __init__(self) -> None:
        self.on = False
        self.events: list[str] = []
        sys.addaudithook(self._hook)  # cannot be taken off again, hence the switch

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.on and event.startswith(WATCHED):
            self.events.append(f"{event} {arguments!r}"[:200])

    def read(self, file: bytes) -> PickledFile | CheckpointError:
        """What the reader gives or raises; any other exception, and any event, fails the test."""
        self.events.clear()
        self.on = True
        try:
            return read(file)
        except CheckpointError as error:
            return error
        finally:
            self.on = False
            assert self.events == []


for codec in ("ascii", "latin-1", "utf-8", "raw-unicode-escape"):
    b"x".decode(codec)  # Python's own codecs, which the disassembler uses, are imported when they are first used
WATCH = Watch()


def read_watched(file: bytes) -> PickledFile | CheckpointError:
    """What the reader gives or raises. Any other exception fails the test, and so does anything that was executed."""
    return WATCH.read(file)


def patched(data: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    for at, removed, added in changes:
        data = data[: at % (len(data) + 1)] + added + data[at % (len(data) + 1) + removed :]
    return data


def assert_sound(result: PickledFile | CheckpointError, size: int) -> None:
    """A refusal is one printable line; an answer lies within the file."""
    if isinstance(result, CheckpointError):
        assert str(result).isprintable()
        assert len(str(result)) < 2000
        return
    for key, stored in result.tensors.items():
        assert stored.name == key
        assert 0 <= stored.offset <= stored.offset + stored.nbytes <= size
        assert all(extent >= 0 for extent in stored.shape)
    assert all(note.isprintable() for note in result.notes)
