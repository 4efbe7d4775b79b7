"""The description of one stored tensor: name, dtype, shape, and the place of its bytes."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["StoredTensor"]


class StoredTensor(NamedTuple):
    """A tensor in a file of any format.

    `dtype` is safetensors' name for it (`"F32"`, `"BF16"`, `"F8_E4M3"`); `offset` is the absolute position of its
    first byte in `file`, and `nbytes` the length of the extent from there. `strides` (in elements) is `None` for the
    row-major layout without gaps, the only one in safetensors; pickles may have others.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int
    strides: tuple[int, ...] | None = None

    def same_storage(self, other: StoredTensor) -> bool:
        """Whether both describe the same bytes: one tensor, stored once."""
        return self.nbytes > 0 and (self.file, self.offset, self.nbytes, self.dtype, self.shape, self.strides) == (
            other.file,
            other.offset,
            other.nbytes,
            other.dtype,
            other.shape,
            other.strides,
        )
