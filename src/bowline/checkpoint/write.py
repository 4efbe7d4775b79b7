"""Writing safetensors: the layout that the format's own writer gives, byte for byte, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bowline.checkpoint.dtypes import BITS
from bowline.errors import UsageError

__all__ = ["Bits", "save_safetensors"]

NUMPY_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "complex64": "C64",
    "bool": "BOOL",
}


class Bits:
    """Stored bit patterns of a dtype that numpy lacks: `Bits("BF16", patterns)`, patterns unsigned and as wide."""

    def __init__(self, dtype: str, patterns: npt.NDArray[Any]) -> None:
        if dtype not in BITS or BITS[dtype] != patterns.dtype.itemsize * 8:
            raise UsageError(
                f"{dtype} from patterns of {patterns.dtype}, expected unsigned integers as wide as {dtype}"
            )
        self.dtype = dtype
        self.patterns = patterns


def save_safetensors(
    path: Path, tensors: Mapping[str, npt.NDArray[Any] | Bits], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a file of tensors: widest dtype first, then by name; the header padded with spaces to 8 bytes."""
    parts: list[tuple[str, str, npt.NDArray[Any]]] = []
    for name, tensor in tensors.items():
        if isinstance(tensor, Bits):
            parts.append((name, tensor.dtype, tensor.patterns))
        else:
            if tensor.dtype.name not in NUMPY_DTYPES:
                raise UsageError(
                    f"{name}: an array of {tensor.dtype} cannot be written, expected one of {', '.join(NUMPY_DTYPES)}",
                    help="convert it, or give its patterns as Bits",
                )
            parts.append((name, NUMPY_DTYPES[tensor.dtype.name], tensor))
    order = {dtype: at for at, dtype in enumerate(BITS)}
    parts.sort(key=lambda part: (-order[part[1]], part[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, dtype, array in parts:
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for _, _, array in parts:
            file.write(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
