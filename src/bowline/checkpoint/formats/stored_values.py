"""Reads one tensor of an open file whole, with or without strides."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bowline.checkpoint.formats.dtypes import BITS, decode
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.checkpoint.places.byte_source import ByteSource

__all__ = ["read_values"]


def read_values(source: ByteSource, stored: StoredTensor) -> npt.NDArray[Any]:
    """The numbers of a tensor, in its shape.

    Raises:
        FormatError: its dtype is unknown.
        CheckpointError: the bytes cannot be read.
    """
    raw = source.read_at(stored.offset, stored.nbytes)
    if stored.strides is None:
        return decode(raw, stored.dtype, stored.shape)
    flat = decode(raw, stored.dtype, (stored.nbytes * 8 // BITS[stored.dtype],))
    steps = tuple(step * flat.itemsize for step in stored.strides)
    return np.lib.stride_tricks.as_strided(flat, stored.shape, steps, writeable=False)
