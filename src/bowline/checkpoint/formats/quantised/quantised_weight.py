"""A weight that is stored as codes: the tensors that hold it, its layout in words, and the reader of its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from bowline.checkpoint.formats.dtypes import BITS, decode
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.checkpoint.formats.strict_json import shown
from bowline.errors import FormatError

if TYPE_CHECKING:  # recognising a table by its headers needs no numpy
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]
    Expand = Callable[["Parts", int, int], "DequantisedRows"]

__all__ = ["SERVES_BOTH", "Facts", "Parts", "QuantisedWeight", "DequantisedRows", "StoredBytes", "unsupported"]

StoredBytes = Callable[[StoredTensor], tuple[memoryview, int]]
"""Returns a buffer and the position in it where the bytes of a tensor begin (`Checkpoint.stored_bytes`)."""
SERVES_BOTH = "table of quantize_tied"
"""What the layout in words contains, after the dtype, for the only table that is both ends of a tie by its name."""
MOST_BYTES_READ = 1 << 20
"""The largest tensor that is read to recognise a layout: a shape, or a quantisation state in JSON."""
MOST_ROWS = 1 << 24
MOST_COLUMNS = 1 << 22
"""Limits far above any vocabulary's table, because a sparse file of zeros can claim any size."""
TOO_LARGE = "expected a vocabulary table of at most {} rows of {}"


class DequantisedRows(NamedTuple):
    """DequantisedRows of a table, `(n, columns)` in float32, and the size of a quantisation step at each of its values.

    `steps` has a shape that broadcasts to that of `values`. A step is the distance between neighbouring values that the
    codes can express there, and includes what the rounding of the scale adds.
    """

    values: Floats
    steps: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedWeight:
    """A weight that is stored as codes.

    `layout` says how, in words (`"GPTQ 4 bits, groups of 128"`). `shape` is that of the weight, `None` if it stands in
    values that were not read. `problem` is the reason why its rows cannot be dequantised, and `None` if they can.
    """

    name: str
    layout: str
    parts: Mapping[str, StoredTensor]
    shape: tuple[int, int] | None = None
    problem: str | None = None
    expand: Expand | None = field(default=None, compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        """The stored size of the codes with all that belongs to them."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def serves_both(self) -> bool:
        """Whether the table is both ends of a tie by its name: the table of `bowline.nn.quantize_tied`."""
        return SERVES_BOTH in self.layout

    def rows(self, stored: StoredBytes, start: int, stop: int) -> DequantisedRows:
        """Dequantise rows `[start, stop)`.

        Raises:
            FormatError: the table has a `problem`, has no such rows, or holds values that do not fit its layout.
        """
        if self.expand is None or self.shape is None or self.problem is not None:
            raise FormatError(f"{self.name}: {self.problem or 'its shape was not read'}")
        if not 0 <= start <= stop <= self.shape[0]:
            raise FormatError(f"{self.name}: rows {start} to {stop} were requested, but it has {self.shape[0]}")
        import numpy as np

        if start == stop:
            empty = np.empty((0, self.shape[1]), np.float32)
            return DequantisedRows(empty, empty)
        with np.errstate(invalid="ignore", over="ignore"):  # a damaged scale is infinite or NaN, and so are its values
            return self.expand(Parts(self.parts, stored), start, stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that a layout is recognised from: a weight's name, the stored tensors, the config, the files' metadata.

    `stored` is `None` if only headers may be read.
    """

    name: str
    tensors: Mapping[str, StoredTensor]
    config: Mapping[str, Any]
    metadata: Mapping[str, str]
    stored: StoredBytes | None = None

    @property
    def stem(self) -> str:
        """The name up to `weight`: `"lm_head."`."""
        return self.name.removesuffix("weight")

    @property
    def module(self) -> str:
        """The name of the module that has the weight: `"lm_head"`."""
        return self.stem.removesuffix(".")

    @property
    def settings(self) -> Mapping[str, Any]:
        """The `quantization_config` of the config, its text config's if only that has one, or nothing."""
        for config in (self.config, self.config.get("text_config")):
            found = config.get("quantization_config") if isinstance(config, Mapping) else None
            if isinstance(found, Mapping):
                return found
        return {}

    @property
    def method(self) -> str:
        """The `quant_method` of the config, in small letters; empty without one."""
        method = self.settings.get("quant_method")
        return method.lower() if isinstance(method, str) else ""

    def beside(self, **suffixes: str) -> dict[str, StoredTensor]:
        """The stored tensors whose names are the stem with these suffixes, by role."""
        return {
            role: self.tensors[self.stem + suffix]
            for role, suffix in suffixes.items()
            if self.stem + suffix in self.tensors
        }

    def read(self, tensor: StoredTensor) -> npt.NDArray[Any] | None:
        """The values of a small tensor; `None` if only headers may be read."""
        if self.stored is None:
            return None
        if tensor.nbytes > MOST_BYTES_READ:
            raise FormatError(f"{shown(tensor.name)} has {tensor.nbytes} bytes, expected at most {MOST_BYTES_READ}")
        return Parts({"it": tensor}, self.stored).take("it")


class Parts:
    """The tensors of a quantised table, by role, as arrays that are decoded slice by slice."""

    def __init__(self, tensors: Mapping[str, StoredTensor], stored: StoredBytes) -> None:
        self.tensors = tensors
        self._stored = stored

    def __contains__(self, role: str) -> bool:
        return role in self.tensors

    def take(self, role: str, *index: slice) -> npt.NDArray[Any]:
        """The values of a slice, exact, in native numpy types; bf16 and the 8-bit floats come as float32."""
        import numpy as np

        tensor = self.tensors[role]
        chosen = np.ascontiguousarray(self._words(tensor)[index] if index else self._words(tensor))
        return decode(chosen.reshape(-1).view(np.uint8), tensor.dtype, chosen.shape if tensor.shape else ())

    def floats(self, role: str, *index: slice) -> Floats:
        """The values of a slice in float32."""
        import numpy as np

        return self.take(role, *index).astype(np.float32, copy=False)

    def octets(self, role: str, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Bytes `[start, stop)` of a tensor, whatever its shape."""
        import numpy as np

        return self._words(self.tensors[role]).reshape(-1).view(np.uint8)[start:stop]

    def _words(self, tensor: StoredTensor) -> npt.NDArray[np.unsignedinteger[Any]]:
        import numpy as np

        if tensor.strides is not None:
            raise FormatError(f"{shown(tensor.name)} is stored with strides, expected rows without gaps")
        buffer, at = self._stored(tensor)
        words = np.frombuffer(buffer, np.dtype(f"<u{BITS[tensor.dtype] // 8}"), prod(tensor.shape), at)
        return words.reshape(tensor.shape)


def unsupported(what: str) -> FormatError:
    """The error for a layout that is recognised but whose rows cannot be dequantised."""
    return FormatError(what, help="audit the checkpoint that it was quantised from")
