"""MLX: rows of packed codes, with a scale and a bias for each group of columns.

The layout is that of `mlx.core.quantize` in its mode `affine`: `weight` `(rows, columns * bits / 32)` uint32, a stream
of codes with the first in the lowest bits, `scales` and `biases` `(rows, columns / group_size)`.
`weight = code * scale + bias`. Group size and bits stand in the config's `quantization`, also for single modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from bowline.checkpoint.formats.quantised.quantised_weight import (
    DequantisedRows,
    Facts,
    Parts,
    QuantisedWeight,
    unsupported,
)
from bowline.checkpoint.formats.quantised.shape_checks import (
    FLOATS,
    ROUNDING,
    check_dtype,
    check_extent,
    check_shape,
    groups_in_words,
    number_in,
    two_axes,
    unpack_words,
)
from bowline.checkpoint.formats.strict_json import shown
from bowline.errors import FormatError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["mlx"]

WIDTHS = (2, 3, 4, 5, 6, 8)


def mlx(facts: Facts) -> QuantisedWeight | None:
    """The weight in MLX's layout, or `None` if it is stored otherwise."""
    parts = facts.beside(codes="weight", scales="scales", biases="biases")
    if not {"codes", "scales"} <= parts.keys() or parts["codes"].dtype != "U32":
        return None
    settings = _settings(facts)
    mode = settings.get("mode", "affine")
    if mode != "affine" or "biases" not in parts:
        raise unsupported(f"MLX's mode {shown(mode)} without biases is not dequantised, expected affine")
    rows, packed = two_axes(parts["codes"])
    bits, size = number_in(settings, "bits"), number_in(settings, "group_size")
    if bits is None or size is None:
        raise FormatError("config.json has no quantization with bits and group_size for it")
    if bits not in WIDTHS or size < 1:
        raise FormatError(f"config.json says {bits} bits and groups of {size}, expected bits of {list(WIDTHS)}")
    columns = packed * 32 // bits
    check_extent(facts.name, rows, columns)
    if columns * bits != packed * 32 or columns % size:
        raise FormatError(f"a row of {packed} words does not hold groups of {size} codes of {bits} bits")
    for role in ("scales", "biases"):
        check_dtype(parts[role], *FLOATS)
        check_shape(parts[role], (rows, columns // size))
    return QuantisedWeight(
        name=facts.name,
        layout=f"MLX {bits} bits, {groups_in_words(size, columns)}",
        parts=parts,
        shape=(rows, columns),
        expand=partial(_rows, bits=bits, size=size, rounding=ROUNDING[parts["scales"].dtype]),
    )


def _settings(facts: Facts) -> Mapping[str, Any]:
    """Group size, bits and mode: those of the module over those of all."""
    for key in ("quantization", "quantization_config"):
        whole = facts.config.get(key)
        if isinstance(whole, Mapping):
            own = whole.get(facts.module)
            return {**whole, **own} if isinstance(own, Mapping) else whole
    return {}


def _rows(parts: Parts, start: int, stop: int, *, bits: int, size: int, rounding: float) -> DequantisedRows:
    import numpy as np

    own = slice(start, stop)
    scales, biases = parts.floats("scales", own)[..., None], parts.floats("biases", own)[..., None]
    codes = _codes(parts.take("codes", own), bits).reshape(stop - start, -1, size).astype(np.float32)
    scaled = codes * scales
    values = scaled + biases
    steps = np.abs(scales) + np.float32(2 * rounding) * (np.abs(scaled) + np.abs(biases))
    return DequantisedRows(values.reshape(stop - start, -1), steps.reshape(stop - start, -1))


def _codes(words: npt.NDArray[np.uint32], bits: int) -> npt.NDArray[np.uint8]:
    """The codes of each row; those of 3, 5 and 6 bits cross the borders of bytes and words."""
    import numpy as np

    if 32 % bits == 0:
        return unpack_words(words, bits).reshape(len(words), -1)
    octets = np.ascontiguousarray(words).astype("<u4", copy=False).view(np.uint8)
    single = np.unpackbits(octets, axis=1, bitorder="little").reshape(len(words), -1, bits)
    return np.packbits(single, axis=2, bitorder="little")[..., 0]
