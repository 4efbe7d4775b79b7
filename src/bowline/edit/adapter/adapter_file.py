"""The weights of an adapter, read when they are needed."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from bowline.checkpoint.formats.dtypes import BITS
from bowline.checkpoint.formats.peft_adapter import AdapterTensor
from bowline.checkpoint.formats.stored_values import read_values
from bowline.checkpoint.places.file_set import FileSet
from bowline.errors import FormatError

__all__ = ["AdapterFile"]

MOST_KEPT = 8
"""Tensors whose values are kept: the factors of the modules that are merged at the moment."""


class AdapterFile:
    """One file of an adapter. Small tensors are read whole, and the last of them kept; large ones by their rows."""

    def __init__(self, files: FileSet, name: str) -> None:
        self._files, self.name = files, name
        self._kept: OrderedDict[str, npt.NDArray[Any]] = OrderedDict()
        self._lock = Lock()

    def values(self, tensor: AdapterTensor) -> npt.NDArray[Any]:
        """The numbers of a tensor, at least as wide as float32.

        Raises:
            FormatError: one of them is not finite.
        """
        with self._lock:
            if tensor.name in self._kept:
                self._kept.move_to_end(tensor.name)
                return self._kept[tensor.name]
        with self._files.open(self.name) as source:
            values = read_values(source, tensor.stored)
        values = np.ascontiguousarray(values, np.promote_types(values.dtype, np.float32))
        if not np.isfinite(values).all():
            raise FormatError(
                f"{self.name}: {tensor.name} has values that are not finite",
                help="take an earlier checkpoint of the training",
            )
        with self._lock:
            self._kept[tensor.name] = values
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return values

    def bits(self, tensor: AdapterTensor, start: int, stop: int) -> npt.NDArray[Any]:
        """Rows `[start, stop)` of a tensor as bit patterns."""
        stored = tensor.stored
        with self._files.open(self.name) as source:
            if stored.strides is not None or not stored.shape:
                whole = read_values(source, stored._replace(dtype=f"U{BITS[stored.dtype]}"))
                return whole[start:stop] if stored.shape else whole
            width = stored.nbytes // max(1, stored.shape[0])
            raw = source.read_at(stored.offset + start * width, (stop - start) * width)
        return np.frombuffer(raw, f"<u{BITS[stored.dtype] // 8}").reshape(stop - start, *stored.shape[1:])
