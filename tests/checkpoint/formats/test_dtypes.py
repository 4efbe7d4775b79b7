"""Every dtype's bytes become exactly the values that its definition gives them."""

from __future__ import annotations

import struct
import subprocess
import sys
from fractions import Fraction
from math import inf, isinf, isnan, nan

import numpy as np
import pytest
import safetensors.numpy

from bowline.checkpoint.formats.dtypes import BITS, decode
from bowline.checkpoint.formats.safetensors_header import read_header
from bowline.checkpoint.places.byte_source import MemoryBytes
from bowline.errors import FormatError


def by_definition(code: int, exponent_bits: int, mantissa_bits: int, bias: int, specials: dict[int, float]) -> float:
    """One code of a small float, from the formula alone and in exact arithmetic."""
    if code in specials:
        return specials[code]
    bits = f"{code:0{1 + exponent_bits + mantissa_bits}b}"
    sign, exponent, mantissa = bits[0], int(bits[1 : 1 + exponent_bits], 2), int(bits[1 + exponent_bits :], 2)
    fraction = Fraction(mantissa, 2**mantissa_bits)
    leading, power = (1, exponent - bias) if exponent else (0, 1 - bias)
    value = (leading + fraction) * Fraction(2) ** power
    return -float(value) if sign == "1" else float(value)


E5M2_SPECIALS = {0x7C: inf, 0xFC: -inf} | dict.fromkeys((0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF), nan)
DEFINITIONS: dict[str, tuple[int, int, int, dict[int, float]]] = {
    "F8_E4M3": (4, 3, 7, {0x7F: nan, 0xFF: nan}),
    "F8_E5M2": (5, 2, 15, E5M2_SPECIALS),
    "F8_E4M3FNUZ": (4, 3, 8, {0x80: nan}),
    "F8_E5M2FNUZ": (5, 2, 16, {0x80: nan}),
}


@pytest.mark.parametrize("dtype", DEFINITIONS)
def test_every_code_of_an_8_bit_float_is_the_value_of_its_definition(dtype: str) -> None:
    expected = np.array([by_definition(code, *DEFINITIONS[dtype]) for code in range(256)])
    got = decode(bytes(range(256)), dtype, (256,))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got.astype(np.float64), expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(got[numbers]), np.signbit(expected[numbers]))


@pytest.mark.parametrize(
    ("dtype", "code", "value"),
    [
        # the limits that the papers and the OCP specification print
        ("F8_E4M3", 0x7E, 448.0),
        ("F8_E4M3", 0x08, 2.0**-6),
        ("F8_E4M3", 0x01, 2.0**-9),
        ("F8_E5M2", 0x7B, 57344.0),
        ("F8_E5M2", 0x04, 2.0**-14),
        ("F8_E5M2", 0x01, 2.0**-16),
        ("F8_E4M3FNUZ", 0x7F, 240.0),
        ("F8_E4M3FNUZ", 0x01, 2.0**-10),
        ("F8_E5M2FNUZ", 0x7F, 57344.0),
        ("F8_E5M2FNUZ", 0x01, 2.0**-17),
        ("F8_E8M0", 0x00, 2.0**-127),
        ("F8_E8M0", 0x7F, 1.0),
        ("F8_E8M0", 0xFE, 2.0**127),
    ],
)
def test_the_limits_of_the_8_bit_floats_are_the_published_ones(dtype: str, code: int, value: float) -> None:
    assert decode(bytes([code]), dtype, ()).item() == value


def test_e8m0_is_a_bare_power_of_two_and_one_nan() -> None:
    got = decode(bytes(range(256)), "F8_E8M0", (256,))
    assert [float(value) for value in got[:255]] == [2.0 ** (code - 127) for code in range(255)]
    assert isnan(got[255])


def test_f4_is_the_sixteen_values_of_e2m1() -> None:
    codes = bytes(low | (low + 1) << 4 for low in range(0, 16, 2))
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    got = decode(codes, "F4", (16,))
    assert got.tolist() == positive + [-value for value in positive]
    assert np.signbit(got[8])


def test_the_earlier_f4_is_in_the_low_bits() -> None:
    assert decode(bytes([0x42]), "F4", (2,)).tolist() == [1.0, 2.0]


def test_every_bf16_is_the_upper_half_of_its_float32_bit_for_bit() -> None:
    words = np.arange(65536, dtype="<u2")
    got = decode(words.tobytes(), "BF16", (256, 256))
    assert got.dtype == np.float32
    expected = b"".join(b"\0\0" + struct.pack("<H", word) for word in range(65536))
    assert got.tobytes() == expected
    assert isinf(decode(b"\x80\x7f", "BF16", ()).item())


NATIVE = {
    "BOOL": np.array([True, False, True]),
    "U8": np.array([0, 1, 255], np.uint8),
    "I8": np.array([-128, 0, 127], np.int8),
    "I16": np.array([-(2**15), 1, 2**15 - 1], np.int16),
    "U16": np.array([0, 1, 2**16 - 1], np.uint16),
    "F16": np.array([-0.0, 6e-8, np.inf], np.float16),
    "I32": np.array([-(2**31), 1, 2**31 - 1], np.int32),
    "U32": np.array([0, 1, 2**32 - 1], np.uint32),
    "F32": np.array([-0.0, 1e-45, 3e38], np.float32),
    "C64": np.array([1 + 2j, -0.5j, 0], np.complex64),
    "F64": np.array([-0.0, 5e-324, 1e308], np.float64),
    "I64": np.array([-(2**63), 1, 2**63 - 1], np.int64),
    "U64": np.array([0, 1, 2**64 - 1], np.uint64),
}


@pytest.mark.parametrize("dtype", NATIVE)
def test_what_numpy_has_is_read_as_safetensors_wrote_it(dtype: str) -> None:
    values = NATIVE[dtype].reshape(3, 1)
    file = safetensors.numpy.save({"a": values})
    stored = read_header(MemoryBytes("model.safetensors", file)).tensors["a"]
    assert stored.dtype == dtype
    got = decode(file[stored.offset : stored.offset + stored.nbytes], stored.dtype, stored.shape)
    assert got.dtype == values.dtype
    assert got.shape == values.shape
    assert got.tobytes() == values.tobytes()


def test_every_dtype_is_decoded_or_refused_by_name() -> None:
    assert set(BITS) == {*NATIVE, *DEFINITIONS, "BF16", "F8_E8M0", "F4", "F6_E2M3", "F6_E3M2"}


def test_a_bool_is_true_for_any_byte_but_zero() -> None:
    got = decode(b"\0\1\2\xff", "BOOL", (4,))
    assert got.dtype == np.bool_
    assert got.view(np.uint8).tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("dtype", ["F6_E2M3", "F6_E3M2"])
def test_f6_is_refused_because_no_packing_is_specified(dtype: str) -> None:
    with pytest.raises(FormatError, match="packing") as raised:
        decode(bytes(3), dtype, (4,))
    assert raised.value.help


@pytest.mark.parametrize(
    "raw",
    [
        b"\x80\x3f\x00\xc0",
        bytearray(b"\x80\x3f\x00\xc0"),
        memoryview(b"?\x80\x3f\x00\xc0")[1:],
        np.array([0x80, 0x3F, 0x00, 0xC0], np.uint8),
        np.array([0x80, 9, 0x3F, 9, 0x00, 9, 0xC0, 9], np.uint8)[::2],
        np.array([[0x80, 0x3F], [0x00, 0xC0]], np.uint8),
    ],
    ids=["bytes", "bytearray", "memoryview", "array", "strided array", "two-dimensional array"],
)
def test_bytes_may_come_as_any_buffer(raw: bytes) -> None:
    assert decode(raw, "BF16", (2,)).tolist() == [1.0, -2.0]


def test_a_buffer_at_an_odd_address_is_read_alike() -> None:
    expected = np.arange(5, dtype=np.float64)
    assert decode(memoryview(b"?" + expected.tobytes())[1:], "F64", (5,)).tolist() == expected.tolist()


def test_a_native_dtype_is_a_view_and_not_a_copy() -> None:
    raw = bytearray(8)
    got = decode(raw, "F32", (2,))
    raw[:] = struct.pack("<2f", 1, 2)
    assert got.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("dtype", [dtype for dtype in BITS if not dtype.startswith("F6")])
def test_no_elements_keep_their_shape(dtype: str) -> None:
    assert decode(b"", dtype, (0, 3)).shape == (0, 3)


@pytest.mark.parametrize(
    ("raw", "dtype", "shape"), [(b"1234", "F32", (2,)), (b"12", "F32", ()), (b"1", "F4", (1,)), (b"1", "U8", (0,))]
)
def test_a_length_that_the_shape_does_not_give_is_refused(raw: bytes, dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(FormatError, match=rf"^{len(raw)} bytes for {dtype} of shape"):
        decode(raw, dtype, shape)


def test_an_unknown_dtype_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(FormatError, match=r"'F128' .* BF16"):
        decode(b"", "F128", (0,))


def test_more_axes_than_numpy_has_are_refused() -> None:
    with pytest.raises(FormatError, match="of 200 axes"):
        decode(b"1", "U8", (1,) * 200)


def test_reading_headers_does_not_import_numpy() -> None:
    modules = "bowline.checkpoint.formats.safetensors_header, bowline.checkpoint.formats.dtypes"
    program = f"import {modules}, sys; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
