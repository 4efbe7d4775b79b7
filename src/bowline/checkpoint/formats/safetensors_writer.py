"""Writes safetensors files one tensor at a time, without copying a tensor."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

from bowline.checkpoint.formats.dtypes import BITS
from bowline.errors import UsageError

__all__ = ["Extent", "Payload", "header_bytes", "in_order", "write_payloads"]

COPY_BYTES = 8 << 20
NO_COPY = frozenset({errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.ETXTBSY})
"""Error numbers of systems and file systems that do not copy from file to file themselves."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of an open file, which the system copies without a buffer of ours, where it can."""

    descriptor: int
    offset: int
    length: int

    def copy_to(self, file: BinaryIO) -> int:
        """Append the range to a file; returns how many bytes that were, fewer if the source ends before."""
        file.flush()
        done = 0
        while done < self.length and hasattr(os, "copy_file_range"):
            try:
                count = os.copy_file_range(
                    self.descriptor, file.fileno(), min(COPY_BYTES, self.length - done), self.offset + done
                )
            except OSError as error:
                if error.errno not in NO_COPY:
                    raise
                break
            if not count:
                return done
            done += count
        buffer = memoryview(bytearray(min(COPY_BYTES // 32, self.length - done)))
        while done < self.length:
            count = os.preadv(self.descriptor, [buffer[: self.length - done]], self.offset + done)
            if not count:
                return done
            file.write(buffer[:count])
            done += count
        return done


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """A tensor to write: its entry in the header, and a function that gives its bytes.

    Arguments:
        name: the tensor's name in the file.
        dtype: safetensors' name, a key of `bowline.checkpoint.formats.dtypes.BITS`.
        shape: the elements along each axis.
        data: called once, when the bytes are needed; returns any C-contiguous buffer (`bytes`, `memoryview`, a numpy
            array) of them, row-major and little-endian, or an iterator of such buffers and of `Extent`s, one part after
            the other. A buffer is released before the next is asked for: `data` may copy from an accelerator, and
            memory holds one such copy at a time.

    Raises:
        UsageError: the dtype is unknown, a size is negative, or the elements do not fill whole bytes.

    Example:
        >>> Payload(name="t", dtype="BF16", shape=(2, 3), data=lambda: bytes(12)).nbytes
        12
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Callable[[], Any]

    def __post_init__(self) -> None:
        if self.dtype not in BITS:
            raise UsageError(
                f"{self.name}: dtype {self.dtype!r}, expected one of {', '.join(BITS)}",
                help="give safetensors' name of the dtype",
            )
        if any(size < 0 for size in self.shape) or prod(self.shape) * BITS[self.dtype] % 8:
            raise UsageError(
                f"{self.name}: {self.dtype} of shape {list(self.shape)}, expected elements that fill whole bytes",
                help="give the tensor's shape in elements, not in bytes",
            )

    @property
    def nbytes(self) -> int:
        """The size of the tensor in the file, in bytes."""
        return prod(self.shape) * BITS[self.dtype] // 8


def write_payloads(file: BinaryIO, payloads: Iterable[Payload], metadata: Mapping[str, str] | None = None) -> None:
    """Write a whole safetensors file: widest dtype first, then by name; the header padded with spaces to 8 bytes.

    Raises:
        UsageError: two tensors have one name, or one is called `__metadata__`; or the bytes from `data` are strided,
            or their number does not match dtype and shape (the file is then half written).

    Example:
        >>> import io
        >>> file = io.BytesIO()
        >>> write_payloads(file, [Payload(name="t", dtype="U8", shape=(2,), data=lambda: b"ab")])
        >>> file.getvalue()[8:]
        b'{"t":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}   ab'
    """
    parts = in_order(payloads)
    encoded = header_bytes(parts, metadata)
    file.write(len(encoded).to_bytes(8, "little"))
    file.write(encoded)
    for part in parts:
        written, contiguous = 0, True
        for view in _views(part.data()):
            if isinstance(view, Extent):
                written += view.copy_to(file)
                continue
            with view:
                written, contiguous = written + view.nbytes, view.c_contiguous
                if contiguous and written <= part.nbytes:
                    file.write(view)
        if written != part.nbytes or not contiguous:
            raise UsageError(
                f"{part.name}: {written} bytes for {part.dtype} of shape {list(part.shape)}, "
                f"expected {part.nbytes} contiguous ones",
                help="give the whole tensor, contiguous, in the declared dtype and shape",
            )


def in_order(payloads: Iterable[Payload]) -> list[Payload]:
    """The tensors as they stand in the file: widest dtype first, then by name."""
    order = {dtype: at for at, dtype in enumerate(BITS)}
    return sorted(payloads, key=lambda payload: (-order[payload.dtype], payload.name))


def header_bytes(payloads: Iterable[Payload], metadata: Mapping[str, str] | None = None) -> bytes:
    """The header of a file with these tensors, padded with spaces to 8 bytes; its length stands before it in the file.

    Raises:
        UsageError: two tensors have one name, or one is called `__metadata__`.
    """
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    taken = {"__metadata__"}
    end = 0
    for part in in_order(payloads):
        if part.name in taken:
            raise UsageError(
                f"{part.name}: this name is taken, expected a unique name other than __metadata__",
                help="rename one of the two, or leave it out",
            )
        taken.add(part.name)
        begin, end = end, end + part.nbytes
        header[part.name] = {"dtype": part.dtype, "shape": list(part.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return encoded + b" " * (-len(encoded) % 8)


def _views(data: Any) -> Iterator[memoryview | Extent]:
    """The parts of a tensor's bytes, each released before the next is asked for."""
    if isinstance(data, Iterator):
        for part in data:
            yield part if isinstance(part, Extent) else memoryview(part)
    else:
        yield memoryview(data)
