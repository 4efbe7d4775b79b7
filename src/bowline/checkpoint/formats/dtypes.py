"""Decodes the bytes of every safetensors dtype exactly."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, Final, Literal

from bowline.errors import FormatError

if TYPE_CHECKING:  # an audit that reads headers alone must not pay for numpy's import
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["BITS", "decode", "encode"]

BITS: Final[Mapping[str, int]] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Every dtype of safetensors 0.8 and the bits of one element, from narrow to wide as safetensors orders them."""

_NUMPY: Final[Mapping[str, str]] = {
    "U8": "u1",
    "I8": "i1",
    "I16": "<i2",
    "U16": "<u2",
    "F16": "<f2",
    "I32": "<i4",
    "U32": "<u4",
    "F32": "<f4",
    "C64": "<c8",
    "F64": "<f8",
    "I64": "<i8",
    "U64": "<u8",
}

_Specials = Literal["ieee", "fn", "fnuz", "none"]
"""The codes that are not finite numbers: `ieee` has infinities and NaNs in the top exponent; `fn` has one NaN for each
sign, all ones; `fnuz` has a single NaN, in place of the negative zero; `none` has neither."""

_SMALL_FLOATS: Final[Mapping[str, tuple[int, int, int, _Specials]]] = {
    # name: exponent bits, mantissa bits, bias, specials
    "F4": (2, 1, 1, "none"),  # OCP Microscaling Formats 1.0 (2023), E2M1
    "F8_E4M3": (4, 3, 7, "fn"),  # Micikevicius et al., "FP8 Formats for Deep Learning" (2022)
    "F8_E5M2": (5, 2, 15, "ieee"),  # the same
    "F8_E4M3FNUZ": (4, 3, 8, "fnuz"),  # Noune et al., "8-bit Numerical Formats for Deep Neural Networks" (2022)
    "F8_E5M2FNUZ": (5, 2, 16, "fnuz"),  # the same
}


def decode(raw: bytes | bytearray | memoryview | NDArray[np.uint8], dtype: str, shape: Sequence[int]) -> NDArray[Any]:
    """The tensor that `raw` holds in row-major order; every element is exactly the value of its bits.

    A dtype that numpy has keeps its type, as a view of `raw` if the machine's byte order allows. `BF16`, `F4` and the
    kinds of `F8` become float32, which holds each of their values; `BOOL` is true for any byte but zero. A byte holds
    two `F4` elements, the earlier one in the low four bits.

    Arguments:
        raw: the tensor's bytes, or a uint8 array of them.
        dtype: safetensors' name, a key of `BITS`.
        shape: the elements along each axis.

    Raises:
        FormatError: the dtype is unknown, or `raw` is not as long as `dtype` and `shape` say, or numpy cannot hold
            that many axes, or the dtype is an `F6`: no specification says how four of them share three bytes.

    Example:
        >>> decode(bytes([0x80, 0x3F, 0x00, 0xC0]), "BF16", (2,))
        array([ 1., -2.], dtype=float32)
        >>> decode(bytes([0x21, 0xF0]), "F4", (2, 2))
        array([[ 0.5,  1. ],
               [ 0. , -6. ]], dtype=float32)
    """
    import numpy as np

    if dtype not in BITS:
        raise FormatError(
            f"dtype {dtype[:80]!r} cannot be decoded, expected one of {', '.join(BITS)}",
            help="a newer writer made this file; look for a newer Bowline",
        )
    if dtype.startswith("F6_"):
        raise FormatError(
            f"dtype {dtype} cannot be decoded: its packing is not specified; neither safetensors nor the OCP "
            "microscaling formats say how its elements share bytes",
            help="convert the tensor to F8_E4M3 or wider with the tool that wrote it",
        )
    octets = np.frombuffer(np.ascontiguousarray(raw) if isinstance(raw, np.ndarray) else raw, np.uint8)
    if octets.size * 8 != prod(shape) * BITS[dtype]:
        raise FormatError(
            f"{octets.size} bytes for {dtype} of shape {_clipped(shape)}, expected {prod(shape)} elements "
            f"of {BITS[dtype]} bits",
            help="the bytes and the shape belong to different tensors, or the file is damaged; fetch it again",
        )
    flat: NDArray[Any]
    if dtype in _NUMPY:
        stored = np.dtype(_NUMPY[dtype])
        flat = octets.view(stored).astype(stored.newbyteorder("="), copy=False)
    elif dtype == "BOOL":
        flat = octets != 0
    elif dtype == "BF16":  # the upper half of a float32
        words = octets.view("<u2").astype(np.uint32)
        words <<= np.uint32(16)
        flat = words.view(np.float32)
    elif dtype == "F4":
        codes = np.stack([octets & np.uint8(0x0F), octets >> np.uint8(4)], axis=-1)
        flat = _values(dtype)[codes.reshape(-1)]
    else:
        flat = _values(dtype)[octets]
    try:
        return flat.reshape(tuple(shape))
    except ValueError as error:
        raise FormatError(
            f"numpy cannot hold the shape {_clipped(shape)} of {len(shape)} axes ({error})",
            help="no model has such a tensor; fetch the file again",
        ) from error


def encode(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The bit patterns of numbers in a dtype that numpy has, or `BF16`: unsigned integers as wide as its elements.

    Floats are rounded to nearest, ties to even; what is too large for a float dtype becomes infinite.

    Raises:
        FormatError: another dtype.

    Example:
        >>> import numpy as np
        >>> [hex(bits) for bits in encode(np.array([1.0, -2.0]), "BF16")]
        ['0x3f80', '0xc000']
    """
    import numpy as np

    if dtype in _NUMPY:
        with np.errstate(over="ignore"):
            stored = np.ascontiguousarray(values, np.dtype(_NUMPY[dtype]))
        return stored.view(f"<u{stored.itemsize}").reshape(values.shape)
    if dtype != "BF16":
        raise FormatError(f"numbers cannot be written as {dtype}, expected one of {', '.join(_NUMPY)}, BF16")
    if values.dtype == np.float64:  # through float32 it would be rounded twice: keep the lost digits as a sticky bit
        with np.errstate(over="ignore"):
            single = values.astype(np.float32)
        words = single.view(np.uint32)
        inexact = single.astype(np.float64) != values
        above = np.abs(single.astype(np.float64)) > np.abs(values)
        words = words - (inexact & above & np.isfinite(values)).astype(np.uint32)  # towards zero
        words = words | (inexact & np.isfinite(values)).astype(np.uint32)
    else:
        words = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = words >> np.uint32(16)  # in place from here on: this is where casts and merges spend their time
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += words
    rounded >>= np.uint32(16)
    nan = np.isnan(values)
    if nan.any():
        nan = nan.reshape(words.shape)
        rounded[nan] = (words[nan] >> np.uint32(16)) | np.uint32(0x40)
    return rounded.astype("<u2").reshape(values.shape)


@cache
def _values(dtype: str) -> NDArray[np.float32]:
    """The float32 value of every code of a float dtype of at most 8 bits, by its definition."""
    import numpy as np

    if dtype == "F8_E8M0":  # a bare exponent: no sign, no zero
        values = np.append(np.ldexp(np.float32(1), np.arange(0xFF) - 127), np.float32(np.nan))
        values.flags.writeable = False
        return values
    exponent_bits, mantissa_bits, bias, specials = _SMALL_FLOATS[dtype]
    magnitudes = 1 << (exponent_bits + mantissa_bits)
    codes = np.arange(magnitudes)
    exponent, fraction = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    significand = fraction + np.where(exponent > 0, 1 << mantissa_bits, 0)  # a zero exponent has no leading one
    positive = np.ldexp(significand.astype(np.float32), np.maximum(exponent, 1) - bias - mantissa_bits)
    if specials == "ieee":
        top = exponent == (1 << exponent_bits) - 1
        positive[top] = np.where(fraction[top] == 0, np.inf, np.nan)
    elif specials == "fn":
        positive[-1] = np.nan
    negative = -positive
    if specials == "fnuz":
        negative[0] = np.nan
    values = np.concatenate([positive, negative]).astype(np.float32)
    values.flags.writeable = False
    return values


def _clipped(shape: Sequence[int]) -> str:
    return str(list(shape)) if len(shape) <= 8 else f"[{', '.join(map(str, shape[:8]))}, ...]"
