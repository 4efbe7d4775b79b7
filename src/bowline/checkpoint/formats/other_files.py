"""Says what a file is that holds no whole model: a PEFT adapter, a GGUF file of llama.cpp, an ONNX graph."""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from bowline.checkpoint.formats.strict_json import loads, shown
from bowline.checkpoint.places.byte_source import ByteSource
from bowline.checkpoint.places.file_set import FileSet
from bowline.errors import CheckpointError, FormatError

__all__ = [
    "ADAPTER_CONFIG",
    "OTHER_SUFFIXES",
    "FileKind",
    "GGUFSummary",
    "adapter_kind",
    "file_kind",
    "holds_adapter",
    "read_gguf",
]

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
OTHER_SUFFIXES = (".gguf", ".onnx")
GGUF_MAGIC = b"GGUF"
GGUF_BYTES = 1 << 20
"""The architecture is among the first keys of a GGUF file, and its header is read no further than this."""
SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""The size of each GGUF value type that has a fixed one."""
STRING, ARRAY = 8, 9


class FileKind(NamedTuple):
    """What a file is, as a noun phrase, and what to give instead."""

    name: str
    help: str


class GGUFSummary(NamedTuple):
    """The head of a GGUF file: its version, its number of tensors, and `general.architecture` (`None`: not found)."""

    version: int
    tensors: int
    architecture: str | None


def file_kind(files: FileSet, name: str) -> FileKind | None:
    """What the file `name` of a checkpoint is, if it is of a kind that holds no whole model; otherwise `None`."""
    if name.endswith(".gguf"):
        return _gguf_kind(files, name)
    if name.endswith(".onnx"):
        return FileKind("an ONNX graph", "ONNX is not read: give the checkpoint that it was exported from")
    if name.rpartition("/")[2] in ADAPTER_FILES:
        return adapter_kind(files)
    return None


def adapter_kind(files: FileSet) -> FileKind:
    """A PEFT adapter, with its type and its base as `adapter_config.json` names them."""
    config: Any = None
    if files.has(ADAPTER_CONFIG):
        try:
            config = loads(files.read(ADAPTER_CONFIG), ADAPTER_CONFIG, allow_nonfinite=True)
        except CheckpointError:
            config = None
    stated: Mapping[str, Any] = config if isinstance(config, dict) else {}
    kind, base = stated.get("peft_type"), stated.get("base_model_name_or_path")
    what = "a PEFT adapter" + (f" ({shown(kind)[1:-1]})" if isinstance(kind, str) else "")
    whole = f"for {shown(base)}" if isinstance(base, str) and base else "whose base is not stated"
    return FileKind(
        f"{what} {whole}", "give the base model; or merge the adapter into it, and give the result with --base BASE"
    )


def holds_adapter(names: Collection[str]) -> bool:
    """Whether these are the tensors of a LoRA adapter alone, without the model that it adapts.

    Example:
        >>> holds_adapter(["base_model.model.lm_head.lora_A.weight", "base_model.model.lm_head.lora_B.weight"])
        True
    """
    if not any("lora_" in name for name in names):
        return False
    parts = [name.split(".") for name in names]
    lora = [any(part.startswith("lora_") for part in segments) for segments in parts]
    kept = ["modules_to_save" in segments or segments[:2] == ["base_model", "model"] for segments in parts]
    whole = any("base_layer" in segments for segments in parts)
    return any(lora) and not whole and all(one or other for one, other in zip(lora, kept, strict=True))


def _gguf_kind(files: FileSet, name: str) -> FileKind:
    help = "GGUF is not read: give the checkpoint that it was converted from"
    try:
        with files.open(name) as source:
            summary = read_gguf(source)
    except CheckpointError as error:
        return FileKind(f"named like a GGUF file, but cannot be read as one ({error.message})", help)
    architecture = shown(summary.architecture) if summary.architecture is not None else "not stated"
    tensors = f"{summary.tensors} tensor{'s' * (summary.tensors != 1)}"
    return FileKind(f"a GGUF file of llama.cpp (architecture {architecture}, {tensors})", help)


def read_gguf(source: ByteSource) -> GGUFSummary:
    """Read the head of a GGUF file (version 2 or 3, little-endian).

    Raises `FormatError` if the file has no such head.
    """
    data = source.read_at(0, min(source.size, GGUF_BYTES))
    if data[:4] != GGUF_MAGIC:
        raise FormatError(f"{source.name}: begins with {data[:4]!r}, expected {GGUF_MAGIC!r}")
    if len(data) < 24:
        raise FormatError(f"{source.name}: {len(data)} bytes, expected at least the 24 of a GGUF header")
    version, tensors, keys = struct.unpack_from("<IQQ", data, 4)
    try:
        architecture = _architecture(data, keys)
    except (struct.error, KeyError):  # the header goes on beyond what was read, or has a value of an unknown type
        architecture = None
    return GGUFSummary(version, tensors, architecture)


def _architecture(data: bytes, keys: int) -> str | None:
    at = 24
    for _ in range(keys):
        key, at = _string(data, at)
        (kind,) = struct.unpack_from("<I", data, at)
        if key == b"general.architecture" and kind == STRING:
            return _string(data, at + 4)[0].decode("utf-8", "replace")
        at = _after(data, at + 4, kind)
    return None


def _string(data: bytes, at: int) -> tuple[bytes, int]:
    (length,) = struct.unpack_from("<Q", data, at)
    end = at + 8 + length
    if end > len(data):
        raise struct.error("the string ends beyond the data")
    return data[at + 8 : end], end


def _after(data: bytes, at: int, kind: int) -> int:
    """The position after a value of this kind."""
    if kind == STRING:
        return _string(data, at)[1]
    if kind != ARRAY:
        return at + SCALARS[kind]
    inner, count = map(int, struct.unpack_from("<IQ", data, at))
    at += 12
    if inner != STRING:  # an array of arrays, which no converter writes, is a KeyError
        return at + count * SCALARS[inner]
    for _ in range(count):
        at = _string(data, at)[1]
    return at
