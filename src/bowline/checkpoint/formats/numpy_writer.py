"""Writes numpy arrays as safetensors without torch, byte for byte as the safetensors library does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bowline.checkpoint.formats.dtypes import BITS
from bowline.checkpoint.formats.safetensors_writer import Payload, write_payloads
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
    """Bit patterns of a dtype that numpy lacks: `Bits("BF16", patterns)`, with unsigned integers of the same width."""

    def __init__(self, dtype: str, patterns: npt.NDArray[Any]) -> None:
        if dtype not in BITS or BITS[dtype] != patterns.dtype.itemsize * 8:
            raise UsageError(
                f"the bit patterns for {dtype} are {patterns.dtype}, expected unsigned integers as wide as {dtype}"
            )
        self.dtype = dtype
        self.patterns = patterns


def save_safetensors(
    path: Path, tensors: Mapping[str, npt.NDArray[Any] | Bits], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file of arrays, which may be strided or big-endian; see `write_payloads`."""
    payloads = [_payload(name, tensor) for name, tensor in tensors.items()]
    with path.open("wb") as file:
        write_payloads(file, payloads, metadata)


def _payload(name: str, tensor: npt.NDArray[Any] | Bits) -> Payload:
    array = tensor.patterns if isinstance(tensor, Bits) else tensor
    if not isinstance(tensor, Bits) and array.dtype.name not in NUMPY_DTYPES:
        raise UsageError(
            f"{name}: an array of {array.dtype} cannot be written, expected one of {', '.join(NUMPY_DTYPES)}",
            help="convert it, or give its bit patterns as Bits",
        )
    dtype = tensor.dtype if isinstance(tensor, Bits) else NUMPY_DTYPES[array.dtype.name]
    little = array.dtype.newbyteorder("<")
    return Payload(name=name, dtype=dtype, shape=array.shape, data=lambda: np.ascontiguousarray(array, little))
