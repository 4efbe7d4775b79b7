"""Reads an ONNX model: its graphs with their nodes and initializers. No values are read, only where they are.

A message that nobody needs (`value_info`, documentation, functions) is passed over. What is kept of a node is its
operator, its names, and the few attributes that say how it uses a matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Final, NamedTuple

from bowline.checkpoint.formats.graphs.nodes import External, Graph, Initializer, Node
from bowline.checkpoint.formats.onnx.wire import (
    BYTES,
    CUT_SHORT,
    FETCH_AGAIN,
    FIXED32,
    FIXED64,
    VARINT,
    Field,
    Wire,
    as_signed,
)
from bowline.checkpoint.formats.strict_json import shown
from bowline.checkpoint.places.byte_source import ByteSource

__all__ = ["read_model"]

MOST_DEPTH: Final = 8
"""Graphs within graphs: those of an `If` or a `Loop`. Exported models nest them once or twice."""
MOST_TENSORS: Final = 1 << 16
MOST_NAMES: Final = 1 << 20
"""The names of inputs and outputs of all nodes that are kept."""
LONGEST_NAME: Final = 4096
TEXT_BUDGET: Final = 32 << 20
"""The bytes of all names."""
MOST_AXES: Final = 32
MOST_BYTES: Final = 1 << 62
LONGEST_NUMBER: Final = 20

# The field numbers of onnx.proto (1.23).
IR_VERSION, GRAPH = 1, 7
NODE, INITIALIZER, INPUT, OUTPUT, SPARSE_INITIALIZER = 1, 5, 11, 12, 15
NODE_INPUT, NODE_OUTPUT, NODE_NAME, OP_TYPE, ATTRIBUTE = 1, 2, 3, 4, 5
ATTRIBUTE_NAME, ATTRIBUTE_INT, ATTRIBUTE_TENSOR, ATTRIBUTE_GRAPH, ATTRIBUTE_INTS, ATTRIBUTE_GRAPHS = 1, 3, 5, 6, 8, 11
VALUE_NAME = 1
DIMS, DATA_TYPE, SEGMENT, FLOAT_DATA, INT32_DATA, STRING_DATA, INT64_DATA = 1, 2, 3, 4, 5, 6, 7
TENSOR_NAME, RAW_DATA, DOUBLE_DATA, UINT64_DATA, EXTERNAL_DATA, DATA_LOCATION = 8, 9, 10, 11, 13, 14
KEY, VALUE = 1, 2
EXTERNAL: Final = 1

STRING: Final = 8
DTYPES: Final[Mapping[int, tuple[str, int]]] = {
    1: ("F32", 32),
    2: ("U8", 8),
    3: ("I8", 8),
    4: ("U16", 16),
    5: ("I16", 16),
    6: ("I32", 32),
    7: ("I64", 64),
    9: ("BOOL", 8),
    10: ("F16", 16),
    11: ("F64", 64),
    12: ("U32", 32),
    13: ("U64", 64),
    14: ("C64", 64),
    15: ("C128", 128),
    16: ("BF16", 16),
    17: ("F8_E4M3", 8),
    18: ("F8_E4M3FNUZ", 8),
    19: ("F8_E5M2", 8),
    20: ("F8_E5M2FNUZ", 8),
    21: ("U4", 4),
    22: ("I4", 4),
    23: ("F4", 4),
    24: ("F8_E8M0", 8),
    25: ("U2", 2),
    26: ("I2", 2),
}
"""The types of ONNX 1.23 by number, with safetensors' name where it has one, and the bits of an element."""
AS_STORED: Final[Mapping[int, frozenset[str]]] = {
    FLOAT_DATA: frozenset({"F32", "C64"}),
    DOUBLE_DATA: frozenset({"F64", "C128"}),
}
"""The fields of numbers that are packed as raw_data has them, and their types."""
CODED: Final[Mapping[int, frozenset[str]]] = {
    INT32_DATA: frozenset(name for name, bits in DTYPES.values() if bits <= 32) - {"F32", "U32"},
    INT64_DATA: frozenset({"I64"}),
    UINT64_DATA: frozenset({"U32", "U64"}),
}
"""The fields of numbers that are packed as varints, and their types."""

KEPT_INTS: Final = frozenset({"axis", "transA", "transB", "block_size", "K", "N", "bits"})


def read_model(source: ByteSource) -> Graph:
    """The main graph of the ONNX model in `source`.

    Refused are: fields that end beyond their message, groups, two graphs, a tensor whose data has another length than
    its type and shape say, names that are not UTF-8, subgraphs nested more than 8 deep, and counts far above any
    model's. Sizes are checked before anything is read.

    Raises:
        FormatError: the file is not an ONNX model, is damaged, or has what Bowline does not read.
        CheckpointError: it cannot be read.
    """
    return _Reader(source).model()


class _Reader:
    def __init__(self, source: ByteSource) -> None:
        self.wire = Wire(source)
        self.size = source.size
        self._tensors = 0
        self._names = MOST_NAMES
        self._text = TEXT_BUDGET
        self._known: dict[bytes, str] = {}

    def model(self) -> Graph:
        graph: Field | None = None
        version: int | None = None
        for one in self.wire.fields(0, self.size, "the model"):
            if one.number == IR_VERSION:
                version = self._int(one, "ir_version")
            elif one.number == GRAPH:
                if graph is not None:
                    self.wire.refuse("has two graphs, expected one", FETCH_AGAIN)
                graph = self._bytes(one, "the graph")
        if version is None or graph is None:
            what = "no graph" if graph is None else "no ir_version"
            self.wire.refuse(f"has {what}, expected an ONNX model", FETCH_AGAIN if self.size else CUT_SHORT)
        return self._graph(graph, 0)

    def _graph(self, message: Field, depth: int) -> Graph:
        nodes: list[Node] = []
        initializers: dict[str, Initializer] = {}
        inputs: list[str] = []
        outputs: list[str] = []
        for one in self._fields(message, "the graph"):
            if one.number == NODE:
                nodes.append(self._node(self._bytes(one, "a node"), depth))
            elif one.number == INITIALIZER:
                tensor = self._tensor(self._bytes(one, "an initializer"))
                if tensor.name in initializers:
                    self.wire.refuse(f"two initializers have the name {shown(tensor.name)}, expected one", FETCH_AGAIN)
                initializers[tensor.name] = tensor
            elif one.number in (INPUT, OUTPUT):
                (inputs if one.number == INPUT else outputs).append(self._value_name(one))
        return Graph(nodes=tuple(nodes), initializers=initializers, inputs=tuple(inputs), outputs=tuple(outputs))

    def _node(self, message: Field, depth: int) -> Node:
        inputs: list[str] = []
        outputs: list[str] = []
        op, name = "", ""
        attributes: list[Field] = []
        for one in self._fields(message, "a node"):
            if one.number == NODE_INPUT:
                inputs.append(self._name(one, "the input of a node"))
            elif one.number == NODE_OUTPUT:
                outputs.append(self._name(one, "the output of a node"))
            elif one.number == NODE_NAME:
                name = self._name(one, "the name of a node")
            elif one.number == OP_TYPE:
                op = self._name(one, "the operator of a node")
            elif one.number == ATTRIBUTE:
                attributes.append(self._bytes(one, "an attribute"))
        ints: dict[str, int] = {}
        perm: tuple[int, ...] | None = None
        graphs: list[Graph] = []
        constant: Initializer | None = None
        for attribute in attributes:
            found = self._attribute(attribute, depth, constant_of=outputs[0] if op == "Constant" and outputs else None)
            graphs += found.graphs
            constant = found.tensor or constant
            if found.name in KEPT_INTS and found.number is not None:
                ints[found.name] = found.number
            elif found.name == "perm" and op == "Transpose":
                perm = found.numbers
        return Node(
            op=op,
            name=name,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            ints=ints,
            perm=perm,
            graphs=tuple(graphs),
            constant=constant,
        )

    def _attribute(self, message: Field, depth: int, *, constant_of: str | None) -> _Attribute:
        name = ""
        number: int | None = None
        numbers: list[int] = []
        graphs: list[Graph] = []
        tensor: Initializer | None = None
        for one in self._fields(message, "an attribute"):
            if one.number == ATTRIBUTE_NAME:
                name = self._name(one, "the name of an attribute")
            elif one.number == ATTRIBUTE_INT:
                number = as_signed(self._int(one, "an attribute"))
            elif one.number == ATTRIBUTE_INTS and name == "perm":
                numbers += self._ints(one, MOST_AXES, "perm")
            elif one.number in (ATTRIBUTE_GRAPH, ATTRIBUTE_GRAPHS):
                if depth == MOST_DEPTH:
                    self.wire.refuse(f"has graphs nested more than {MOST_DEPTH} deep", FETCH_AGAIN)
                graphs.append(self._graph(self._bytes(one, "a graph"), depth + 1))
            elif one.number == ATTRIBUTE_TENSOR and constant_of is not None:
                tensor = self._tensor(self._bytes(one, "a constant"), name=constant_of)
        return _Attribute(name, number, tuple(numbers), tuple(graphs), tensor)

    def _tensor(self, message: Field, name: str | None = None) -> Initializer:
        self._tensors += 1
        if self._tensors > MOST_TENSORS:
            self.wire.refuse(f"has more than {MOST_TENSORS} tensors", FETCH_AGAIN)
        dims: list[int] = []
        kind: int | None = None
        data: Field | None = None
        texts = False
        location = 0
        external: dict[str, str] = {}
        own = ""
        for one in self._fields(message, "a tensor"):
            if one.number == DIMS:
                dims += [as_signed(value) for value in self._ints(one, MOST_AXES, "the shape of a tensor")]
                if len(dims) > MOST_AXES:
                    self.wire.refuse(f"has a tensor of more than {MOST_AXES} axes", FETCH_AGAIN)
            elif one.number == DATA_TYPE:
                kind = self._int(one, "the type of a tensor")
            elif one.number == TENSOR_NAME:
                own = self._name(one, "the name of a tensor")
            elif one.number == DATA_LOCATION:
                location = self._int(one, "data_location")
            elif one.number == EXTERNAL_DATA:
                key, value = self._entry(self._bytes(one, "external_data"))
                external[key] = value
            elif one.number == SEGMENT:
                self.wire.refuse("has a tensor in segments, which ONNX's readers do not read either", FETCH_AGAIN)
            elif one.number == STRING_DATA:
                texts = True
            elif one.number == RAW_DATA or one.number in AS_STORED or one.number in CODED:
                if data is not None and (data.number != one.number or one.number == RAW_DATA or one.kind == BYTES):
                    self.wire.refuse("has a tensor whose data is stated twice, expected once", FETCH_AGAIN)
                data = self._joined(data, one)
        return self._checked(name if name is not None else own, dims, kind, data, texts, location, external)

    def _joined(self, data: Field | None, more: Field) -> Field:
        """Numbers of fixed size that are not packed have a tag before each: only a single one is read."""
        alone = more.number in AS_STORED and data is None and more.kind in (FIXED32, FIXED64)
        if more.kind != BYTES and not alone:
            self.wire.refuse(
                "has a tensor whose numbers are not packed, expected raw_data or packed numbers",
                "save the model again with onnx.save, which packs them",
            )
        return more

    def _checked(
        self,
        name: str,
        dims: list[int],
        kind: int | None,
        data: Field | None,
        texts: bool,
        location: int,
        external: dict[str, str],
    ) -> Initializer:
        what = f"tensor {shown(name)}"
        if any(size < 0 for size in dims):
            self.wire.refuse(f"{what} has the shape {_clipped(dims)}, expected no negative size", FETCH_AGAIN)
        if kind == STRING or texts:
            return Initializer(name=name, dtype="STRING", shape=tuple(dims), nbytes=0, offset=0)
        if kind is None or kind not in DTYPES:
            self.wire.refuse(
                f"{what} has the type {kind}, expected one that ONNX 1.23 has",
                "if a newer onnx wrote this file, look for a newer Bowline; otherwise fetch it again",
            )
        dtype, bits = DTYPES[kind]
        nbytes = -(-prod(dims) * bits // 8)
        if nbytes > MOST_BYTES:
            self.wire.refuse(f"{what} has the shape {_clipped(dims)}, expected fewer than 2^62 bytes", FETCH_AGAIN)
        if location == EXTERNAL:
            if data is not None:
                self.wire.refuse(f"{what} has its data in two places, expected one", FETCH_AGAIN)
            where = self._external(what, external, nbytes)
            return Initializer(
                name=name, dtype=dtype, shape=tuple(dims), nbytes=nbytes, offset=where.offset, external=where
            )
        if location:
            self.wire.refuse(f"{what} has its data at the location {location}, expected 0 or 1", FETCH_AGAIN)
        if data is None:
            if nbytes:
                self.wire.refuse(f"{what} has no data, expected {nbytes} bytes", FETCH_AGAIN)
            return Initializer(name=name, dtype=dtype, shape=tuple(dims), nbytes=0, offset=0)
        kinds = AS_STORED.get(data.number) or CODED.get(data.number)
        if kinds is not None and dtype not in kinds:
            self.wire.refuse(f"{what} is {dtype}, but its data is in the field {data.number}", FETCH_AGAIN)
        coded = data.number in CODED
        if not (data.length <= 10 * prod(dims) and prod(dims) <= 4 * data.length if coded else data.length == nbytes):
            self.wire.refuse(
                f"{what} has {data.length} bytes of data, but {dtype} of shape {_clipped(dims)} has {nbytes}",
                FETCH_AGAIN,
            )
        return Initializer(
            name=name,
            dtype=dtype,
            shape=tuple(dims),
            nbytes=nbytes,
            offset=data.value,
            coded_bytes=data.length if coded else None,
        )

    def _external(self, what: str, stated: dict[str, str], nbytes: int) -> External:
        numbers: dict[str, int | None] = {}
        for key in ("offset", "length"):
            text = stated.get(key)
            if text is not None and not (text.isascii() and text.isdigit() and len(text) <= LONGEST_NUMBER):
                self.wire.refuse(f"{what} has external data with {key} {shown(text)}, expected a number", FETCH_AGAIN)
            numbers[key] = None if text is None else int(text)
        if not stated.get("location"):
            self.wire.refuse(f"{what} has external data without a location", FETCH_AGAIN)
        if numbers["length"] not in (None, nbytes):
            self.wire.refuse(
                f"{what} has external data of {numbers['length']} bytes, expected {nbytes} by its type and shape",
                FETCH_AGAIN,
            )
        return External(stated["location"], numbers["offset"] or 0, numbers["length"])

    def _entry(self, message: Field) -> tuple[str, str]:
        key = value = ""
        for one in self._fields(message, "external_data"):
            if one.number == KEY:
                key = self._name(one, "a key of external_data")
            elif one.number == VALUE:
                value = self._name(one, "a value of external_data")
        return key, value

    def _value_name(self, message: Field) -> str:
        name = ""
        for one in self._fields(self._bytes(message, "an input or output"), "an input or output"):
            if one.number == VALUE_NAME:
                name = self._name(one, "the name of an input or output")
        return name

    def _fields(self, message: Field, what: str) -> Iterator[Field]:
        return self.wire.fields(message.value, message.value + message.length, what)

    def _bytes(self, one: Field, what: str) -> Field:
        if one.kind != BYTES:
            self.wire.refuse(f"{what} has the wire type {one.kind}, expected {BYTES}", FETCH_AGAIN)
        return one

    def _int(self, one: Field, what: str) -> int:
        if one.kind != VARINT:
            self.wire.refuse(f"{what} has the wire type {one.kind}, expected {VARINT}", FETCH_AGAIN)
        return one.value

    def _ints(self, one: Field, most: int, what: str) -> list[int]:
        """The numbers of a repeated field: one of them, or several packed."""
        if one.kind != BYTES:
            return [self._int(one, what)]
        return self.wire.varints(one.value, one.value + one.length, most, what)

    def _name(self, one: Field, what: str) -> str:
        self._bytes(one, what)
        if one.length > LONGEST_NAME:
            self.wire.refuse(f"{what} has {one.length} bytes, expected at most {LONGEST_NAME}", FETCH_AGAIN)
        self._names -= 1
        if self._names < 0:
            self.wire.refuse(f"has more than {MOST_NAMES} names", FETCH_AGAIN)
        raw = self.wire.take(one.value, one.length)
        name = self._known.get(raw)
        if name is None:
            self._text -= one.length
            if self._text < 0:
                self.wire.refuse(f"has more than {TEXT_BUDGET} bytes of names", FETCH_AGAIN)
            try:
                name = raw.decode("utf-8")
            except UnicodeDecodeError:
                self.wire.refuse(f"{what} is {raw[:40]!r}, expected UTF-8", FETCH_AGAIN)
            self._known[raw] = name
        return name


class _Attribute(NamedTuple):
    name: str
    number: int | None
    numbers: tuple[int, ...]
    graphs: tuple[Graph, ...]
    tensor: Initializer | None


def _clipped(dims: list[int]) -> str:
    return str(dims) if len(dims) <= 6 else f"[{', '.join(map(str, dims[:6]))}, ...]"
