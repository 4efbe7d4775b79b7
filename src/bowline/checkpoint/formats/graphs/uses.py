"""Finds the table and the head of a graph by what its nodes do: a look-up is a `Gather`, a head a product.

The head is the product whose result reaches an output of the model through operators that keep a row a row (a bias, a
scale, a softcap), and whose matrix has the table's shape. A matrix is followed through `Transpose`, `Cast`, `Identity`
and `DequantizeLinear`, and from a graph into the graphs of its `If` and `Loop` nodes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from bowline.checkpoint.formats.graphs.nodes import Graph, Initializer, Node

__all__ = ["Scaling", "Use", "Uses", "find_uses"]

PRODUCTS: Final[Mapping[str, int]] = {
    "MatMul": 1,
    "Gemm": 1,
    "FusedMatMul": 1,
    "FusedGemm": 1,
    "MatMulInteger": 1,
    "DynamicQuantizeMatMul": 1,
    "MatMulIntegerToFloat": 1,
    "MatMulNBits": 1,
    "QLinearMatMul": 3,
}
"""The products with a matrix, of ONNX and of onnxruntime, and which input the matrix is."""
LOOKUPS: Final[Mapping[str, int]] = {"Gather": 0, "GatherBlockQuantized": 0, "EmbedLayerNormalization": 2}
ROWS_FIRST: Final = frozenset({"MatMulNBits"})
"""The products whose matrix is stored with the rows of the output first."""
SCALES: Final[Mapping[str, tuple[int, int]]] = {
    "DynamicQuantizeMatMul": (2, 3),
    "MatMulIntegerToFloat": (3, 5),
    "QLinearMatMul": (4, 5),
}
"""The inputs that are the scale and the zero point of the matrix."""
QUANTISED: Final = "_quantized"
FOLLOWED: Final = frozenset({"Identity", "Cast", "Transpose", "DequantizeLinear"})
KEEPS_ROWS: Final = frozenset(
    {
        "Add", "Sub", "Mul", "Div", "Tanh", "Cast", "Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Slice",
        "Gather", "Softmax", "LogSoftmax", "Sigmoid", "Clip", "Where", "Transpose", "QuantizeLinear",
        "DequantizeLinear", "If", "Loop", "Scan",
    }
)  # fmt: skip
"""Operators between a head's product and the output of a model."""


class Scaling(NamedTuple):
    """How codes become numbers, `(code - zero point) * scale`: the names of both, and the axis of a vector scale."""

    scale: str
    zero_point: str | None
    axis: int


class Use(NamedTuple):
    """One use of a stored matrix by a node."""

    tensor: str
    """The key of the matrix in `Uses.tensors`."""
    node: str
    shape: tuple[int, int]
    """The shape of the numbers that it stands for, with the vocabulary's rows first."""
    transposed: bool
    """Whether the rows of the vocabulary are the columns of the stored matrix."""
    scaling: Scaling | None
    readable: bool
    """Whether the stored numbers, after `scaling`, are those that the node uses."""


@dataclass(slots=True, kw_only=True)
class Uses:
    """Every tensor of a model by a name of its own, and the uses that matter."""

    tensors: dict[str, Initializer] = field(default_factory=dict)
    lookups: list[Use] = field(default_factory=list)
    products: list[Use] = field(default_factory=list)
    """Every product with a stored matrix of two axes."""
    at_output: list[Use] = field(default_factory=list)
    """Those of them whose result reaches an output of the model."""


class _View(NamedTuple):
    """A name in a graph that stands for a stored tensor, as it is or changed on the way."""

    tensor: str
    transposed: bool = False
    scaling: Scaling | None = None
    readable: bool = True


@dataclass(slots=True, kw_only=True)
class _Scope:
    graph: Graph
    views: dict[str, _View]
    outer: _Scope | None
    within: dict[int, list[_Scope]] = field(default_factory=dict)
    """The scopes of a node's graphs, by the node's place."""
    products: dict[int, Use] = field(default_factory=dict)

    def view(self, name: str) -> _View | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.views:
                return scope.views[name]
            scope = scope.outer
        return None


def find_uses(graph: Graph) -> Uses:
    """The tensors of a graph and of those within it, and which of them serve look-ups and products."""
    uses = Uses()
    scope = _scan(graph, None, uses, "")
    preferred = [name for name in graph.outputs if "logits" in name.lower()]
    uses.at_output += dict.fromkeys(_reaching(scope, preferred or graph.outputs))
    return uses


def _scan(graph: Graph, outer: _Scope | None, uses: Uses, path: str) -> _Scope:
    """Go through the nodes of a graph, which stand in the order of their computation."""
    scope = _Scope(graph=graph, views={}, outer=outer)
    for name, tensor in graph.initializers.items():
        scope.views[name] = _View(_add(uses, tensor, path))
    dequantised = {node.inputs[0]: node for node in graph.nodes if node.op == "DequantizeLinear" and node.inputs}
    for place, node in enumerate(graph.nodes):
        if node.constant is not None and len(node.constant.shape) == 2:
            scope.views[node.outputs[0]] = _View(_add(uses, node.constant, path))
        elif node.op in FOLLOWED and node.inputs and node.outputs:
            view = scope.view(node.inputs[0])
            if view is not None:
                scope.views[node.outputs[0]] = _followed(scope, uses, node, view)
        elif node.op in LOOKUPS:
            _lookup(scope, uses, node, dequantised.get(node.outputs[0] if node.outputs else ""))
        elif node.op in PRODUCTS:
            _product(scope, uses, node, place)
        for number, inner in enumerate(node.graphs):
            where = f"{path}{node.name or (node.outputs[0] if node.outputs else node.op)}[{number}]/"
            scope.within.setdefault(place, []).append(_scan(inner, scope, uses, where))
    return scope


def _add(uses: Uses, tensor: Initializer, path: str) -> str:
    """Register a tensor under its name; one of an inner graph under its path too, if the name is taken."""
    key = tensor.name
    if key in uses.tensors:
        key = f"{path}{tensor.name}"
    if key in uses.tensors:
        key = f"{key} ({len(uses.tensors)})"
    while key in uses.tensors:  # only if the file has such a name on purpose
        key += "'"
    uses.tensors[key] = tensor if key == tensor.name else replace(tensor, name=key)
    return key


def _followed(scope: _Scope, uses: Uses, node: Node, view: _View) -> _View:
    axes = len(uses.tensors[view.tensor].shape)
    if node.op == "Transpose":
        if axes == 2 and node.perm in (None, (1, 0)):
            return view._replace(transposed=not view.transposed)
        return view if node.perm == tuple(range(axes)) else view._replace(readable=False)
    if node.op == "DequantizeLinear":
        scaling = _scaling(scope, node, 1, 2, axes)
        readable = view.readable and view.scaling is None and not view.transposed and not node.ints.get("block_size")
        return view._replace(scaling=scaling, readable=readable and scaling is not None)
    return view


def _scaling(scope: _Scope, node: Node, scale_at: int, zero_at: int, axes: int) -> Scaling | None:
    """The scaling of a stored matrix, if scale and zero point are stored too."""
    scale = scope.view(node.inputs[scale_at]) if len(node.inputs) > scale_at else None
    stated = node.inputs[zero_at] if len(node.inputs) > zero_at else ""
    zero = scope.view(stated) if stated else None
    if scale is None or (stated and zero is None):
        return None
    axis = node.ints.get("axis", 1)
    return Scaling(scale.tensor, zero.tensor if zero else None, axis + axes if axis < 0 else axis)


def _lookup(scope: _Scope, uses: Uses, node: Node, after: Node | None) -> None:
    """Register a look-up; `after` is the node that dequantises the rows that were looked up, if there is one."""
    at = LOOKUPS[node.op]
    view = scope.view(node.inputs[at]) if len(node.inputs) > at else None
    if view is None or not node.outputs or len(uses.tensors[view.tensor].shape) != 2:
        return
    if node.op == "Gather" and node.ints.get("axis", 0) not in (0, -2):
        return
    if view.scaling is None and uses.tensors[view.tensor].dtype in ("I8", "U8"):
        scaling = _scaling(scope, after, 1, 2, 2) if after else _named_scaling(scope, node.inputs[at], None)
        view = view._replace(scaling=scaling, readable=view.readable and scaling is not None)
    rows, columns = uses.tensors[view.tensor].shape[:: -1 if view.transposed else 1]
    in_blocks = node.op == "GatherBlockQuantized"
    if in_blocks and uses.tensors[view.tensor].dtype == "U8" and node.ints.get("bits", 4) == 4:
        columns *= 2  # two codes a byte
    readable = view.readable and not in_blocks
    name = node.name or node.outputs[0]
    uses.lookups.append(Use(view.tensor, name, (rows, columns), view.transposed, view.scaling, readable))


def _product(scope: _Scope, uses: Uses, node: Node, place: int) -> None:
    at = PRODUCTS[node.op]
    view = scope.view(node.inputs[at]) if len(node.inputs) > at else None
    if view is None or not node.outputs:
        return
    shape = uses.tensors[view.tensor].shape
    axes = len(shape)
    if node.op in ROWS_FIRST:
        shape = (node.ints.get("N", 0), node.ints.get("K", 0))
    elif axes != 2:
        return
    transposed = node.ints.get("transB", 0) == 0 and node.op not in ROWS_FIRST
    scaling, readable = view.scaling, view.readable and node.op not in ROWS_FIRST
    if node.op in SCALES:
        scaling = _scaling(scope, node, *SCALES[node.op], axes)
        readable = readable and scaling is not None
    elif node.op == "MatMulInteger":
        zero = node.inputs[3] if len(node.inputs) > 3 else ""
        scaling = _named_scaling(scope, node.inputs[at], zero)
        readable = readable and scaling is not None
    turned = transposed != view.transposed
    rows, columns = shape[::-1] if turned else shape
    use = Use(view.tensor, node.name or node.outputs[0], (rows, columns), turned, scaling, readable)
    scope.products[place] = use
    uses.products.append(use)


def _named_scaling(scope: _Scope, name: str, zero_point: str | None) -> Scaling | None:
    """The scaling of codes by the names of onnxruntime's quantiser: `X_scale` and `X_zero_point` for `X_quantized`.

    The scale of a product of integers is applied after it, together with that of the activations.
    """
    stem = name.removesuffix(QUANTISED)
    scale = scope.view(f"{stem}_scale") if stem != name else None
    stated = f"{stem}_zero_point" if zero_point is None else zero_point
    zero = scope.view(stated) if stated else None
    if scale is None or (zero_point and zero is None):
        return None
    return Scaling(scale.tensor, zero.tensor if zero else None, 1)


def _reaching(scope: _Scope, outputs: tuple[str, ...] | list[str]) -> Iterator[Use]:
    """The products whose results reach these outputs of a graph."""
    producers = {name: place for place, node in enumerate(scope.graph.nodes) for name in node.outputs}
    waiting, seen = deque(name for name in outputs if name), set(outputs)
    while waiting:
        place = producers.get(waiting.popleft())
        if place is None:
            continue
        node = scope.graph.nodes[place]
        if place in scope.products:
            yield scope.products[place]
        elif node.op in KEEPS_ROWS:
            for inner in scope.within.get(place, ()):
                yield from _reaching(inner, inner.graph.outputs)
            waiting.extend(name for name in node.inputs if name and name not in seen)
            seen.update(node.inputs)
