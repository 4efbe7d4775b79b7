"""Writes GGUF files for tests, well formed unless a test asks for a fault."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bowline.checkpoint.formats.gguf.ggml_types import GGML_TYPES

__all__ = ["EMBEDDING", "HEAD", "KINDS", "LLAMA", "Stored", "Typed", "gguf_file", "q4_0", "q8_0", "text", "vocabulary"]

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
LLAMA: Mapping[str, Any] = {"general.architecture": "llama", "llama.block_count": 1}
NUMBERS = {kind.name: number for number, kind in GGML_TYPES.items()}
KINDS = {kind.name: kind for kind in GGML_TYPES.values()}


class Typed(NamedTuple):
    """A value of a GGUF key with the number of its type, and the bytes behind it."""

    kind: int
    raw: bytes


@dataclass(frozen=True)
class Stored:
    """A tensor as it is stored: ggml's name of its type, its shape with the rows first, and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    raw: bytes


def text(value: str | bytes) -> bytes:
    """A text as GGUF writes it: its length in 8 bytes, and its bytes."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def gguf_file(
    tensors: Mapping[str, Stored | npt.NDArray[np.float32]],
    values: Mapping[str, Any] = LLAMA,
    *,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """A GGUF file; float32 arrays are stored as F32, whole numbers as UINT32, lists of numbers as INT32."""
    entries, data = b"", b""
    for name, tensor in tensors.items():
        stored = tensor if isinstance(tensor, Stored) else Stored("F32", tensor.shape, tensor.tobytes())
        entries += text(name) + struct.pack(f"<I{len(stored.shape)}Q", len(stored.shape), *stored.shape[::-1])
        entries += struct.pack("<IQ", NUMBERS[stored.dtype], len(data))
        data += stored.raw + bytes(-len(stored.raw) % alignment)
    keys = b"".join(text(key) + _value(value) for key, value in values.items())
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(values)) + keys + entries
    return head + bytes(-len(head) % alignment if tensors else 0) + data


def _value(value: Any) -> bytes:
    if isinstance(value, Typed):
        return struct.pack("<I", value.kind) + value.raw
    if isinstance(value, str | bytes):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


def vocabulary(tokens: Sequence[str] | int, **more: Any) -> dict[str, Any]:
    """The keys of a llama with these tokens, or so many; `more` has further keys, `_` for `.`."""
    texts = [f"t{number}" for number in range(tokens)] if isinstance(tokens, int) else list(tokens)
    further = {f"tokenizer.ggml.{key}": value for key, value in more.items()}
    return {**LLAMA, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": texts, **further}


def q8_0(table: npt.NDArray[np.float32]) -> Stored:
    """A table in ggml's Q8_0: blocks of 32 in 8 bits, each with a float16 scale."""
    blocks = table.reshape(-1, 32)
    scale = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype(np.float16)
    codes = np.rint(blocks / np.maximum(scale.astype(np.float32), 1e-30)).astype(np.int8)
    return Stored("Q8_0", table.shape, np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], axis=1).tobytes())


def q4_0(table: npt.NDArray[np.float32]) -> Stored:
    """A table in ggml's Q4_0: blocks of 32 in 4 bits, each with a float16 scale."""
    blocks = table.reshape(-1, 32)
    extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
    scale = (extreme / -8).astype(np.float16)
    safe = np.where(scale == 0, np.float16(1), scale).astype(np.float32)
    codes = np.clip(np.floor(blocks / safe + 8.5), 0, 15).astype(np.uint8)
    packed = codes[:, :16] | (codes[:, 16:] << 4)
    return Stored("Q4_0", table.shape, np.concatenate([scale.view(np.uint8), packed], axis=1).tobytes())
