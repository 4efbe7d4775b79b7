"""The weights that `tools/quantised_vectors.py` recorded, as tensors in memory."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bowline.checkpoint.formats.quantised import QuantisedWeight, recognise
from bowline.checkpoint.formats.stored_tensor import StoredTensor

__all__ = ["NAME", "InMemory", "read_vectors"]

NAME = "head.weight"
NUMPY = {"U8": "u1", "I8": "i1", "I32": "<i4", "I64": "<i8", "U32": "<u4", "F16": "<f2", "F32": "<f4"}


class InMemory:
    """Tensors in memory that are read like those of a checkpoint."""

    def __init__(self, **tensors: tuple[str, npt.NDArray[Any]] | npt.NDArray[Any]) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self.bytes: dict[str, bytes] = {}
        for name, value in tensors.items():
            dtype, array = value if isinstance(value, tuple) else (_name(value), value)
            self.add(name, dtype, array.shape, array.tobytes())

    def add(self, name: str, dtype: str, shape: tuple[int, ...], raw: bytes) -> None:
        """One tensor more."""
        self.tensors[name] = StoredTensor(name, dtype, shape, "model.safetensors", 0, len(raw))
        self.bytes[name] = raw

    def stored(self, tensor: StoredTensor) -> tuple[memoryview, int]:
        """The bytes of a tensor after three others, so that they are not aligned."""
        return memoryview(b"abc" + self.bytes[tensor.name]), 3

    def recognise(
        self, config: Mapping[str, Any] | None = None, metadata: Mapping[str, str] | None = None
    ) -> QuantisedWeight | None:
        """How `head.weight` is stored."""
        return recognise(NAME, self.tensors, config, metadata, self.stored)


def _name(array: npt.NDArray[Any]) -> str:
    return next(name for name, kind in NUMPY.items() if np.dtype(kind) == array.dtype)


@dataclass(frozen=True, slots=True)
class Vector:
    """One recorded weight."""

    memory: InMemory
    config: Mapping[str, Any]
    metadata: Mapping[str, str]
    values: npt.NDArray[np.float32]


def read_vectors() -> dict[str, Vector]:
    """Every recorded weight, by the name of its case."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.json")):
        for name, case in json.loads(path.read_text())["cases"].items():
            memory = InMemory()
            for tensor, record in case["tensors"].items():
                memory.add(tensor, record["dtype"], tuple(record["shape"]), b64decode(record["bytes"]))
            values = np.frombuffer(b64decode(case["values"]), "<f4").reshape(case["shape"])
            found[name] = Vector(memory, case["config"], case["metadata"], values)
    return found
