"""ONNX: the protobuf's fields by ranges, the graph's initializers, and which of them serve as table and head."""

from collections.abc import Mapping
from typing import Final

ONNX_SUFFIX: Final = ".onnx"

SCALED: Final[Mapping[str, str]] = {"I8*scale": "I8", "U8*scale": "U8"}
"""The types of matrices of codes that the graph dequantises, and the types of the codes."""
