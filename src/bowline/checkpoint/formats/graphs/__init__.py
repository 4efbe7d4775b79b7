"""Models that are graphs: which of their stored tensors serve as table and head, for ONNX and for torch.export."""

from collections.abc import Mapping
from typing import Final, NamedTuple


class GraphFormat(NamedTuple):
    """A format of models that are graphs: its name in reports, what a file of it holds, and the end of its name."""

    name: str
    noun: str
    suffix: str


ONNX: Final = GraphFormat("ONNX", "an ONNX graph", ".onnx")
PT2: Final = GraphFormat("pt2", "a program of torch.export", ".pt2")
GRAPH_SUFFIXES: Final = (ONNX.suffix, PT2.suffix)

SCALED: Final[Mapping[str, str]] = {"I8*scale": "I8", "U8*scale": "U8"}
"""The types of matrices of codes that the graph dequantises, and the types of the codes."""
