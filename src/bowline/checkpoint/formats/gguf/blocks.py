"""Dequantises rows of GGUF tensors, to the numbers that the package `gguf` gives (its `quants.dequantize`).

Each function takes blocks, `(n, bytes of a block)` of uint8, and returns their values, `(n, elements of a block)` of
float32. The layouts are those of ggml's `ggml-common.h`; operations are in `gguf`'s order, so results are equal bit for
bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bowline.checkpoint.formats.dtypes import decode
from bowline.checkpoint.formats.gguf.ggml_types import BLOCKS
from bowline.errors import FormatError

__all__ = ["dequantise"]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

BLOCKS_AT_ONCE = 4096
"""Blocks that are dequantised together: their temporary arrays stay in the processor's cache."""
NIBBLES = np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
PAIRS = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
BITS = np.arange(8, dtype=np.uint8).reshape(1, 1, 8, 1)
IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def dequantise(raw: bytes | bytearray | memoryview | Bytes, dtype: str, shape: Sequence[int]) -> npt.NDArray[Any]:
    """The tensor of this shape, rows first, that `raw` holds, in float32; F16 and integers keep their type.

    Arguments:
        raw: the bytes of whole rows.
        dtype: ggml's name of the type.
        shape: the elements along each axis, the rows' length last.

    Raises:
        FormatError: the type is one that is not dequantised here, or `raw` is not as long as `dtype` and `shape` say.

    Example:
        >>> block = np.concatenate([np.array([0.5], np.float16).view(np.uint8), np.arange(32, dtype=np.uint8)])
        >>> dequantise(block.tobytes(), "Q8_0", (1, 32))[0, :4]
        array([0. , 0.5, 1. , 1.5], dtype=float32)
    """
    layout = BLOCKS.get(dtype)
    if layout is None:
        return decode(raw, dtype, shape)
    expand = _EXPAND.get(dtype)
    if expand is None:
        raise FormatError(
            f"{dtype} is not dequantised, expected one of {', '.join(_EXPAND)}",
            help="audit it with --headers-only, or convert the model with its tables in another type",
        )
    octets = np.frombuffer(raw, np.uint8)
    count = prod(shape)
    if octets.size * layout.elements != count * layout.nbytes:
        raise FormatError(
            f"{octets.size} bytes for {dtype} of shape {list(shape)}, expected {count} elements in blocks of "
            f"{layout.elements} in {layout.nbytes} bytes",
            help="the bytes and the shape belong to different tensors, or the file is damaged; fetch it again",
        )
    blocks = octets.reshape(-1, layout.nbytes)
    values = np.empty((len(blocks), layout.elements), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):  # a damaged scale is infinite or NaN, and so are its values
        for start in range(0, len(blocks), BLOCKS_AT_ONCE):
            part = slice(start, start + BLOCKS_AT_ONCE)
            values[part] = expand(blocks[part])
    return values.reshape(tuple(shape))


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at this byte of each block, `(n, 1)`."""
    half: Floats = np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)
    return half


def _nibbles(packed: Bytes, together: int) -> Bytes:
    """The low and then the high four bits of each `together` bytes, `(n, 2 * bytes)`."""
    split = packed.reshape(len(packed), -1, 1, together) >> NIBBLES
    return (split & np.uint8(0x0F)).reshape(len(packed), -1)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """The 32 bits from this byte on, the lowest first, each as 16: the fifth bit of a number."""
    high = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    return high << np.uint8(4)


def _q4_0(blocks: Bytes) -> Floats:
    numbers = _nibbles(blocks[:, 2:], 16).astype(np.int8) - np.int8(8)
    return _half(blocks, 0) * numbers.astype(np.float32)


def _q4_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:], 16).astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    numbers = (_nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks, 2)).astype(np.int8) - np.int8(16)
    return _half(blocks, 0) * numbers.astype(np.float32)


def _q5_1(blocks: Bytes) -> Floats:
    numbers = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * numbers.astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    values: Floats = blocks[:, 2:].view(np.int8).astype(np.float32) * _half(blocks, 0)
    return values


def _q2_k(blocks: Bytes) -> Floats:
    """Sixteen groups of 16, each with a scale and a minimum of four bits."""
    n, scales = len(blocks), blocks[:, :16]
    scale = (_half(blocks, 80) * (scales & np.uint8(0x0F)).astype(np.float32)).reshape(n, 16, 1)
    least = (_half(blocks, 82) * (scales >> np.uint8(4)).astype(np.float32)).reshape(n, 16, 1)
    numbers = (blocks[:, 16:80].reshape(n, -1, 1, 32) >> PAIRS) & np.uint8(3)
    return (scale * numbers.reshape(n, 16, 16).astype(np.float32) - least).reshape(n, 256)


def _q3_k(blocks: Bytes) -> Floats:
    """Sixteen groups of 16, each with a scale of six bits."""
    n, packed = len(blocks), blocks[:, 96:108]
    low = (packed[:, :8].reshape(n, 1, 8) >> NIBBLES[0]).reshape(n, 16) & np.uint8(0x0F)
    high = (packed[:, 8:].reshape(n, 1, 4) >> PAIRS[0]).reshape(n, 16) & np.uint8(3)
    scales = ((low | (high << np.uint8(4))).astype(np.int8) - np.int8(32)).astype(np.float32)
    scale = (_half(blocks, 108) * scales).reshape(n, 16, 1)
    numbers = ((blocks[:, 32:96].reshape(n, -1, 1, 32) >> PAIRS) & np.uint8(3)).reshape(n, 16, 16).astype(np.int8)
    third = ((blocks[:, :32].reshape(n, -1, 1, 32) >> BITS) & np.uint8(1)).reshape(n, 16, 16) ^ np.uint8(1)
    values: Floats = scale * (numbers - (third << np.uint8(2)).astype(np.int8)).astype(np.float32)
    return values.reshape(n, 256)


def _scales_and_minima(blocks: Bytes) -> tuple[Floats, Floats]:
    """The scale and the minimum of the eight groups of 32 in a Q4_K or Q5_K block, `(n, 8, 1)` each."""
    n = len(blocks)
    scales, minima, rest = np.split(blocks[:, 4:16].reshape(n, 3, 4), 3, axis=1)
    scales = np.concatenate([scales & 0x3F, (rest & 0x0F) | ((scales >> 2) & 0x30)], axis=-1).reshape(n, 8)
    minima = np.concatenate([minima & 0x3F, (rest >> 4) | ((minima >> 2) & 0x30)], axis=-1).reshape(n, 8)
    scale = (_half(blocks, 0) * scales.astype(np.float32)).reshape(n, 8, 1)
    least = (_half(blocks, 2) * minima.astype(np.float32)).reshape(n, 8, 1)
    return scale, least


def _q4_k(blocks: Bytes) -> Floats:
    scale, least = _scales_and_minima(blocks)
    numbers = _nibbles(blocks[:, 16:], 32).reshape(len(blocks), 8, 32).astype(np.float32)
    return (scale * numbers - least).reshape(len(blocks), 256)


def _q5_k(blocks: Bytes) -> Floats:
    scale, least = _scales_and_minima(blocks)
    high = (blocks[:, 16:48].reshape(len(blocks), -1, 1, 32) >> BITS) & np.uint8(1)
    numbers = _nibbles(blocks[:, 48:], 32).reshape(len(blocks), 8, 32) | (high.reshape(-1, 8, 32) << np.uint8(4))
    return (scale * numbers.astype(np.float32) - least).reshape(len(blocks), 256)


def _q6_k(blocks: Bytes) -> Floats:
    """Sixteen groups of 16, each with a scale of eight bits."""
    n = len(blocks)
    scale = (_half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)).reshape(n, 16, 1)
    low = _nibbles(blocks[:, :128], 64).reshape(n, 8, 32)
    high = ((blocks[:, 128:192].reshape(n, -1, 1, 32) >> PAIRS) & np.uint8(3)).reshape(n, 8, 32)
    numbers = (low | (high << np.uint8(4))).astype(np.int8) - np.int8(32)
    return (scale * numbers.reshape(n, 16, 16).astype(np.float32)).reshape(n, 256)


def _iq4_nl(blocks: Bytes) -> Floats:
    values: Floats = _half(blocks, 0) * IQ4_VALUES[_nibbles(blocks[:, 2:], 16)]
    return values


def _iq4_xs(blocks: Bytes) -> Floats:
    """Eight groups of 32, each with a scale of six bits."""
    n = len(blocks)
    shifts = np.arange(0, 16, 2, dtype=np.uint16)
    high = (np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> shifts).astype(np.uint8) & np.uint8(3)
    low = (blocks[:, 4:8].reshape(n, 4, 1) >> NIBBLES.reshape(1, 1, 2)).reshape(n, 8) & np.uint8(0x0F)
    scales = (low | (high << np.uint8(4))).astype(np.int8) - np.int8(32)
    scale = (_half(blocks, 0) * scales.astype(np.float32)).reshape(n, 8, 1)
    return (scale * IQ4_VALUES[_nibbles(blocks[:, 8:], 16)].reshape(n, 8, 32)).reshape(n, 256)


_EXPAND: Final[Mapping[str, Callable[[Bytes], Floats]]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
