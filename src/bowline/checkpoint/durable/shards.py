"""Writes tensors as the files of a model: one `model.safetensors`, or numbered shards and their index."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from math import isfinite
from pathlib import Path

from bowline.checkpoint.durable.file_creation import cannot_write, create
from bowline.checkpoint.formats.safetensors_writer import Payload, write_payloads
from bowline.errors import UsageError

__all__ = ["Payload", "parse_size", "split", "write_shards"]

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_size(size: str | int) -> int:
    """A size in bytes, from a number or from a text such as `"5GB"`; KB, MB, GB and TB are powers of 1000.

    Raises:
        UsageError: an unknown unit, not a number, or less than one byte.

    Example:
        >>> parse_size("5GB"), parse_size("0.5 mb"), parse_size(1024)
        (5000000000, 500000, 1024)
    """
    try:
        if isinstance(size, str):
            unit = size.strip()[-2:].upper()
            number = float(size.strip()[:-2]) * _UNITS[unit]
            count = int(number) if isfinite(number) else 0
        else:
            count = size
    except (KeyError, ValueError):
        count = 0
    if not isinstance(count, int) or isinstance(count, bool):
        count = 0
    if count < 1:
        raise UsageError(
            f"max_shard_size={size!r}: expected a positive whole number of bytes, or a number with one of "
            f"{', '.join(_UNITS)}",
            help='for example "5GB", or 1024 without quotes for bytes',
            argument="max_shard_size",
        )
    return count


def split(sizes: Mapping[str, int], max_shard_size: int) -> list[list[str]]:
    """Distribute names over shards as huggingface_hub does: in the given order, without moving any to fill a gap.

    A tensor larger than the limit gets its own shard, and the current shard goes on filling after it.

    Example:
        >>> split({"a": 6, "b": 6, "c": 2, "d": 11, "e": 2}, 10)
        [['a'], ['d'], ['b', 'c', 'e']]
    """
    shards: list[list[str]] = []
    current: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if size > max_shard_size:
            shards.append([name])
            continue
        if filled + size > max_shard_size:
            shards.append(current)
            current, filled = [], 0
        current.append(name)
        filled += size
    return [*shards, current] if current else shards


def write_shards(
    directory: Path,
    payloads: Iterable[Payload],
    *,
    max_shard_size: str | int = "5GB",
    metadata: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """Write `model.safetensors`, or `model-00001-of-0000N.safetensors` ... and `model.safetensors.index.json`.

    The names, the split and the index are those of `save_pretrained` for the same tensors in the same order, and the
    bytes of each file are those of safetensors' own writer. Memory holds the header and one buffer from `Payload.data`;
    a buffer that shares memory is not copied. Each file is synchronised before this returns; the directory is not (the
    stage of `publishing` is, as a whole).

    Arguments:
        directory: a directory without any of these files: nothing is overwritten, or written through a link.
        payloads: the tensors, each with its own name; without any, one file without tensors is written.
        max_shard_size: bytes, or a text for `parse_size`. Only tensors' bytes count.
        metadata: texts for each file's header; by default `{"format": "pt"}`, which transformers requires.

    Returns:
        The names of the files, the index last.

    Raises:
        UsageError: two tensors have one name, a size is invalid, or a tensor's bytes do not match its dtype and shape.
        CheckpointError: a file exists already, or the system refuses (no space, no permission). The files that this
            call had written are removed.

    Example:
        >>> import tempfile
        >>> two = [Payload(name=name, dtype="U8", shape=(600,), data=lambda: bytes(600)) for name in ("a", "b")]
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     write_shards(Path(directory), two, max_shard_size="1KB")
        ('model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors', 'model.safetensors.index.json')
    """
    listed = list(payloads)
    by_name = {payload.name: payload for payload in listed}
    if len(by_name) < len(listed):
        names = [payload.name for payload in listed]
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(
            f"{twice}: two tensors have this name, expected unique names", help="rename one, or leave it out"
        )
    sizes = {name: payload.nbytes for name, payload in by_name.items()}
    parts = split(sizes, parse_size(max_shard_size)) or [[]]
    many = len(parts) > 1
    files = {
        f"model-{at:05d}-of-{len(parts):05d}.safetensors" if many else "model.safetensors": names
        for at, names in enumerate(parts, 1)
    }
    header = {"format": "pt"} if metadata is None else metadata
    with ExitStack() as written:  # unwound when a file fails
        for file, names in files.items():
            _write(directory / file, [by_name[name] for name in names], header, written)
        if many:
            index = {
                "metadata": {"total_size": sum(sizes.values())},
                "weight_map": {name: file for file, names in files.items() for name in names},
            }
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            _write(directory / "model.safetensors.index.json", text.encode(), header, written)
        written.pop_all()
    return (*files, "model.safetensors.index.json") if many else tuple(files)


def _write(path: Path, content: list[Payload] | bytes, metadata: Mapping[str, str], written: ExitStack) -> None:
    try:
        descriptor = create(path)
        written.callback(path.unlink, missing_ok=True)
        with os.fdopen(descriptor, "wb") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                write_payloads(file, content, metadata)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise cannot_write(path, error) from error
