"""Reads a written result again and compares it with what it was made of, before it is put in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from bowline.auditing.progress import Progress
from bowline.checkpoint.durable.file_creation import synchronise
from bowline.checkpoint.formats.safetensors_header import read_header
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.checkpoint.places.byte_source import LocalFile
from bowline.edit.content import BLOCK_BYTES, Content
from bowline.edit.plan import Action, EditPlan, FileParts, FilePlan
from bowline.errors import CheckpointError, FormatError

__all__ = ["verify"]


def verify(plan: EditPlan, stage: Path, progress: Progress) -> int:
    """Compare every written file with its plan, byte for byte; returns the number of bytes that were compared.

    Meanwhile the files are synchronised to disk; the comparison reads what the system would give any reader.

    Raises:
        CheckpointError: a file is not what was planned.
    """
    written = [file for file in plan.files if file.action is Action.WRITE]
    with ThreadPoolExecutor(2) as comparing, ThreadPoolExecutor(1) as syncing, ExitStack() as stack:
        synchronised = [syncing.submit(synchronise, stage / file.name) for file in written]
        opened = [stack.enter_context(LocalFile(stage / file.name, file.name)) for file in written]
        tasks = [task for file, source in zip(written, opened, strict=True) for task in _tasks(file, source)]
        for nbytes in comparing.map(lambda task: task(), tasks):
            progress.advance(nbytes)
        for one in synchronised:
            one.result()
    return sum(file.nbytes for file in written)


def _tasks(file: FilePlan, written: LocalFile) -> Iterator[Callable[[], int]]:
    """What is to be compared in a file, in pieces that can run side by side; each returns its bytes.

    Raises:
        CheckpointError: its size or its header is not what was planned.
    """
    if written.size != file.nbytes:
        raise _differs(f"{file.name}: {written.size} bytes were written, {file.nbytes} were planned")
    if file.text is not None:
        yield partial(_compare_text, file.text, written)
        return
    if file.parts is not None:
        yield partial(_compare_parts, file.parts, written)
        return
    header = read_header(written)
    planned = file.tensors or {}
    if set(header.tensors) != set(planned) or dict(header.metadata) != dict(file.metadata or {}):
        raise _differs(f"{file.name}: its header is not what was planned")
    for name, content in planned.items():
        stored = header.tensors[name]
        if (stored.dtype, stored.shape) != (content.dtype, content.shape):
            raise _differs(f"{file.name}: {name} is {stored.dtype} {list(stored.shape)}")
        yield partial(_compare_tensor, stored, content, written)


def _compare_text(text: bytes, written: LocalFile) -> int:
    if written.read_at(0, written.size) != text:
        raise _differs(f"{written.name}: is not the text that was planned")
    return len(text)


def _compare_parts(file: FileParts, written: LocalFile) -> int:
    try:
        file.check(written)
    except FormatError as error:
        raise _differs(error.message) from error
    at = 0
    for part in file.parts():
        expected = memoryview(part).cast("B") if memoryview(part).nbytes else memoryview(b"")
        if not _same(memoryview(written.read_at(at, len(expected))), expected):
            raise _differs(f"{written.name}: differs from what was planned within the bytes from {at} on")
        at += len(expected)
    return at


def _compare_tensor(stored: StoredTensor, content: Content, written: LocalFile) -> int:
    buffer = memoryview(bytearray(min(2 * BLOCK_BYTES, stored.nbytes)))
    at = 0
    for part in content.parts():
        expected = memoryview(part).cast("B") if memoryview(part).nbytes else memoryview(b"")
        if len(expected) > len(buffer):
            buffer = memoryview(bytearray(len(expected)))
        seen = buffer[: len(expected)]
        written.read_into(stored.offset + at, seen)
        if not _same(seen, expected):
            raise _differs(f"{written.name}: {stored.name} differs from its source within the bytes from {at} on")
        at += len(expected)
    return at


def _same(one: memoryview, other: memoryview) -> bool:
    """Whether two buffers of one length hold the same bytes; eight at a time."""
    whole = len(one) & ~7
    return np.array_equal(np.frombuffer(one[:whole], np.uint64), np.frombuffer(other[:whole], np.uint64)) and (
        one[whole:] == other[whole:]
    )


def _differs(message: str) -> CheckpointError:
    return CheckpointError(
        f"{message}; nothing was changed", help="check the disk and the memory of this machine, and run again"
    )
