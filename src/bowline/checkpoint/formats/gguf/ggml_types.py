"""The types of GGUF tensors: their numbers, their names, and the elements and bytes of one block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

__all__ = ["BLOCKS", "DEQUANTISED", "GGML_TYPES", "NEWER_THAN_GGUF", "REMOVED_TYPES", "GGMLType"]


class GGMLType(NamedTuple):
    """A type by ggml's name; a row is stored in blocks of `elements`, each of `nbytes`."""

    name: str
    elements: int
    nbytes: int


GGML_TYPES: Final[Mapping[int, GGMLType]] = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    9: GGMLType("Q8_1", 32, 40),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    15: GGMLType("Q8_K", 256, 292),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    24: GGMLType("I8", 1, 1),
    25: GGMLType("I16", 1, 2),
    26: GGMLType("I32", 1, 4),
    27: GGMLType("I64", 1, 8),
    28: GGMLType("F64", 1, 8),
    29: GGMLType("IQ1_M", 256, 56),
    30: GGMLType("BF16", 1, 2),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17),
    40: GGMLType("NVFP4", 64, 36),
    41: GGMLType("Q1_0", 128, 18),
    42: GGMLType("Q2_0", 64, 18),
}
"""Every type of ggml 0.25.3 by its number in the file."""

NEWER_THAN_GGUF: Final = frozenset({"MXFP4", "NVFP4", "Q1_0", "Q2_0"})
"""The types that ggml 0.25.3 has and the package gguf 0.17.1 does not."""

REMOVED_TYPES: Final[Mapping[int, str]] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
"""Types that ggml had once; it refuses a file with one of them."""

BLOCKS: Final[Mapping[str, GGMLType]] = {kind.name: kind for kind in GGML_TYPES.values() if kind.elements > 1}
"""The types whose elements are stored in blocks, by name. The others are dtypes of safetensors too."""

DEQUANTISED: Final = frozenset(
    {"Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"}
)
"""The types of blocks that `blocks.dequantise` knows: those that tables have, and their relatives."""
