"""The graph of a model, as its reader hands it on: nodes under ONNX's names of operators, and stored tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["External", "Graph", "Initializer", "Node"]


class External(NamedTuple):
    """The place of a tensor's bytes in another file; `length` is `None` if the model does not state it."""

    location: str
    offset: int
    length: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Initializer:
    """A tensor of a graph, and where its bytes are: in this file, or `external`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    """The bytes of the elements, as raw_data has them."""
    offset: int
    coded_bytes: int | None = None
    """The bytes from `offset` if the elements are stored as varints (in int32_data and its relatives)."""
    external: External | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """An operator, the names of its inputs and outputs, and the attributes that matter to a matrix."""

    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    ints: Mapping[str, int] = field(default_factory=dict)
    perm: tuple[int, ...] | None = None
    graphs: tuple[Graph, ...] = ()
    constant: Initializer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A graph: its nodes in their order, its initializers by name, and the names of its inputs and outputs."""

    nodes: tuple[Node, ...]
    initializers: Mapping[str, Initializer]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
