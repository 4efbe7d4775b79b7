"""A checkpoint's tensors as torch tensors in the mapped file, copied only when written to."""

from __future__ import annotations

import torch

from bowline.checkpoint.checkpoint import Checkpoint
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.errors import FormatError
from bowline.nn.state.torch_dtypes import TORCH_DTYPES

__all__ = ["stored_tensor"]


def stored_tensor(checkpoint: Checkpoint, stored: StoredTensor, *, mapped: bool = True) -> torch.Tensor:
    """One of `checkpoint.tensors` as a torch tensor; with `mapped`, its memory is the file, copy on write.

    Raises:
        FormatError: a dtype that torch does not have, or that packs several numbers into a byte.
        CheckpointError: the file cannot be read or mapped.
    """
    dtype = TORCH_DTYPES.get(stored.dtype)
    if dtype is None:
        raise FormatError(
            f"{stored.name}: stored as {stored.dtype}, which cannot be read as a torch tensor",
            help="dequantise the checkpoint first",
        )
    if not stored.nbytes:
        return torch.empty(stored.shape, dtype=dtype)
    buffer, offset = checkpoint.stored_bytes(stored, mapped=mapped)
    size = dtype.itemsize
    if offset % size:  # legal, but slow or worse to compute on
        buffer, offset = memoryview(bytearray(buffer[offset : offset + stored.nbytes])), 0
    flat = torch.frombuffer(buffer, dtype=dtype, count=stored.nbytes // size, offset=offset)
    if stored.strides is None:
        return flat.view(*stored.shape) if len(stored.shape) > 1 else flat if stored.shape else flat.view(())
    view = flat.as_strided(stored.shape, stored.strides)
    repeats = any(stride == 0 and extent > 1 for extent, stride in zip(stored.shape, stored.strides, strict=True))
    return view.contiguous() if repeats else view  # an expanded tensor cannot be trained
