"""Reads a written result again and compares it with what it was made of, before it is put in place."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bowline.auditing.progress import Progress
from bowline.checkpoint.formats.safetensors_header import read_header
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.checkpoint.places.byte_source import LocalFile
from bowline.edit.content import BLOCK_BYTES, Content
from bowline.edit.plan import Action, FilePlan, Plan
from bowline.errors import CheckpointError

__all__ = ["verify"]


def verify(plan: Plan, stage: Path, progress: Progress) -> int:
    """Compare every written file with its plan, byte for byte; returns the number of bytes that were compared.

    Raises:
        CheckpointError: a file is not what was planned.
    """
    compared = 0
    for file in plan.files:
        if file.action is not Action.WRITE:
            continue
        with LocalFile(stage / file.name, file.name) as written:
            if written.size != file.nbytes:
                raise _differs(f"{file.name}: {written.size} bytes were written, {file.nbytes} were planned")
            if file.text is not None:
                if written.read_at(0, written.size) != file.text:
                    raise _differs(f"{file.name}: is not the text that was planned")
            else:
                _verify_tensors(file, written)
        compared += file.nbytes
        progress.advance(file.nbytes)
    return compared


def _verify_tensors(file: FilePlan, written: LocalFile) -> None:
    header = read_header(written)
    planned = file.tensors or {}
    if set(header.tensors) != set(planned) or dict(header.metadata) != dict(file.metadata or {}):
        raise _differs(f"{file.name}: its header is not what was planned")
    for name, content in planned.items():
        stored = header.tensors[name]
        if (stored.dtype, stored.shape) != (content.dtype, content.shape):
            raise _differs(f"{file.name}: {name} is {stored.dtype} {list(stored.shape)}")
        _verify_bytes(stored, content, written)


def _verify_bytes(stored: StoredTensor, content: Content, written: LocalFile) -> None:
    buffer = memoryview(bytearray(2 * BLOCK_BYTES))
    at = 0
    for part in content.parts():
        expected = np.frombuffer(memoryview(part).cast("B") if memoryview(part).nbytes else b"", np.uint8)
        if len(expected) > len(buffer):
            buffer = memoryview(bytearray(len(expected)))
        seen = buffer[: len(expected)]
        written.read_into(stored.offset + at, seen)
        if not np.array_equal(np.frombuffer(seen, np.uint8), expected):
            raise _differs(f"{written.name}: {stored.name} differs from its source within the bytes from {at} on")
        at += len(expected)


def _differs(message: str) -> CheckpointError:
    return CheckpointError(
        f"{message}; nothing was changed", help="check the disk and the memory of this machine, and run again"
    )
