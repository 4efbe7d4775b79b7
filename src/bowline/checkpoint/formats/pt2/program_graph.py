"""Translates the graph of a program (`models/NAME.json`) to nodes under ONNX's names, so that `find_uses` reads both.

Only operators of look-ups, products, and what stands between them, the stored matrices and the outputs are
translated; of every other node the names are kept. The graphs within a node (`cond`, `wrap_with_set_grad_enabled`) get
their inputs by nodes in front.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from bowline.checkpoint.formats.graphs.nodes import Graph, Initializer, Node
from bowline.checkpoint.formats.pt2.json_fields import JsonDocument
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.checkpoint.formats.strict_json import shown

__all__ = ["read_graph"]

INPUTS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "embedding": ("Gather", ("weight", "indices")),
    "index_select": ("Gather", ("self", "index")),
    "linear": ("Gemm", ("input", "weight", "bias")),
    "addmm": ("Gemm", ("mat1", "mat2", "self")),
    "matmul": ("MatMul", ("self", "other")),
    "mm": ("MatMul", ("self", "mat2")),
}
"""Look-ups and products of torch, and their arguments in the order of ONNX's operators."""
SAME: Final[Mapping[str, str]] = {
    **dict.fromkeys(("alias", "clone", "contiguous", "detach", "lift_fresh", "lift_fresh_copy"), "Identity"),
    **dict.fromkeys(("to", "_to_copy", "type_as"), "Cast"),
    **dict.fromkeys(("t", "numpy_T", "mT", "transpose", "permute"), "Transpose"),
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "expand", "flatten", "unflatten"), "Reshape"),
    **dict.fromkeys(("slice", "select", "narrow"), "Slice"),
    **dict.fromkeys(("softmax", "_softmax"), "Softmax"),
    **dict.fromkeys(("log_softmax", "_log_softmax"), "LogSoftmax"),
    **dict.fromkeys(("where", "masked_fill"), "Where"),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), "Clip"),
    "add": "Add",
    "sub": "Sub",
    "mul": "Mul",
    "div": "Div",
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
    "squeeze": "Squeeze",
    "unsqueeze": "Unsqueeze",
    "index": "Gather",
}
"""Operators of torch whose first argument is that of the operator of ONNX."""
MODULE_STACK: Final = "nn_module_stack"
UNKNOWN_AXIS: Final = 2


def read_graph(content: object, document: JsonDocument, stored: Mapping[str, StoredTensor]) -> Graph:
    """The graph of a program, with every tensor of `stored` as an initializer.

    torch.export uses one name of a tied matrix for all its uses. If the module of a node has another name for the same
    stored bytes, the node gets that one, so that the head's matrix is `lm_head.weight`.

    Raises:
        FormatError: the document does not have the fields that torch writes, or names a tensor that is not stored.
    """
    return _Reader(document, stored).program(content)


class _Reader:
    def __init__(self, document: JsonDocument, stored: Mapping[str, StoredTensor]) -> None:
        self.document = document
        self.stored = stored
        self.given: dict[str, str] = {}
        """The inputs of the graph that are stored tensors, and their names in the module."""
        self.keys: dict[str, str] = {}
        """The names of the stored tensors in the graph; those that it does not use get one too."""

    def program(self, content: object) -> Graph:
        member = self.document.member
        module = member(content, "graph_module", dict)
        signature = member(module, "signature", dict)
        for name, own in self._parameters(signature):
            if own not in self.stored:
                self.document.refuse(f"the graph uses {shown(own)}, which is not stored")
            self.given[name] = own
        self.keys = {name: f"\0{name}" for name in self.stored} | {own: name for name, own in self.given.items()}
        outputs: list[str] = []
        for spec in member(signature, "output_specs", list):
            if isinstance(spec, dict) and "user_output" in spec:
                outputs += self._names(member(spec["user_output"], "arg", dict))
        graph = member(module, "graph", dict)
        return Graph(
            nodes=tuple(self._nodes(graph, {})),
            initializers={
                self.keys[name]: Initializer(
                    name=name, dtype=one.dtype, shape=one.shape, nbytes=one.nbytes, offset=one.offset
                )
                for name, one in self.stored.items()
            },
            inputs=(),
            outputs=tuple(outputs),
        )

    def _parameters(self, signature: object) -> Iterator[tuple[str, str]]:
        """The inputs of the graph that are stored tensors: the name in the graph, and the module's name."""
        member = self.document.member
        for spec in member(signature, "input_specs", list):
            for kind in ("parameter", "buffer", "tensor_constant"):
                if isinstance(spec, dict) and kind in spec:
                    argument = member(spec[kind], "arg", dict)
                    yield member(argument, "name", str), member(spec[kind], f"{kind}_name", str)

    def _nodes(self, graph: object, bound: Mapping[str, str]) -> Iterator[Node]:
        """The nodes of a graph; those of a graph within a node begin with nodes that give it its inputs, `bound`."""
        for name, outer in bound.items():
            yield Node(op="Identity", name="", inputs=(outer,), outputs=(name,))
        for content in self.document.member(graph, "nodes", list):
            yield self._node(content, inner=bool(bound))

    def _node(self, content: object, *, inner: bool) -> Node:
        member = self.document.member
        target = member(content, "target", str)
        arguments = [(member(one, "name", str), member(one, "arg", dict)) for one in member(content, "inputs", list)]
        outputs = [
            name
            for one in member(content, "outputs", list)
            for name in self._names(self.document.typed(one, "an output", dict))
        ]
        module = _module(member(content, "metadata", dict).get(MODULE_STACK))
        assert isinstance(content, dict)
        label = self.document.typed(content.get("name") or "", "the name of a node", str)
        label = f"{module}/{label}" if module and label else label
        graphs = [
            member(member(argument, "as_graph", dict), "graph", dict)
            for _, argument in arguments
            if "as_graph" in argument
        ]
        if graphs:
            inputs = [name for _, argument in arguments for name in self._names(argument)]
            within = tuple(self._within(graph, inputs) for graph in graphs)
            return Node(op="If", name=label, inputs=tuple(inputs), outputs=tuple(outputs), graphs=within)
        node = self._operator(target, dict(arguments), label, tuple(outputs))
        return node if inner else replace(node, inputs=tuple(self._own(name, module) for name in node.inputs))

    def _own(self, name: str, module: str) -> str:
        """The name in the graph of the module's own weight, if it is the stored tensor that `name` stands for."""
        used = self.given.get(name)
        own = f"{module}.weight" if module else "weight"
        if used is None or own not in self.stored or not self.stored[own].same_storage(self.stored[used]):
            return name
        return self.keys[own]

    def _within(self, graph: object, inputs: list[str]) -> Graph:
        """A graph within a node, whose inputs are the last of the node's."""
        names = [
            name
            for one in self.document.member(graph, "inputs", list)
            for name in self._names(self.document.typed(one, "an input of a graph", dict))
        ]
        outputs = [
            name
            for one in self.document.member(graph, "outputs", list)
            for name in self._names(self.document.typed(one, "an output of a graph", dict))
        ]
        pairs = zip(names, inputs[-len(names) :], strict=True) if 0 < len(names) <= len(inputs) else ()
        bound = {name: outer for name, outer in pairs if name != outer}
        return Graph(nodes=tuple(self._nodes(graph, bound)), initializers={}, inputs=(), outputs=tuple(outputs))

    def _operator(self, target: str, arguments: Mapping[str, object], name: str, outputs: tuple[str, ...]) -> Node:
        """A node under ONNX's name of the operator; under torch's, if nothing asks for its kind."""
        operator = target.removeprefix("torch.ops.").rpartition(".")[0].removeprefix("aten.").removesuffix("_")
        ints: dict[str, int] = {}
        perm: tuple[int, ...] | None = None
        if operator in INPUTS:
            op, wanted = INPUTS[operator]
            inputs = [next(iter(self._names(arguments.get(one))), "") for one in wanted]
            if operator == "linear":
                ints["transB"] = 1
            elif operator == "index_select":
                ints["axis"] = _number(arguments.get("dim"), UNKNOWN_AXIS)
        else:
            op = SAME.get(operator, target)
            inputs = [one for argument in arguments.values() for one in self._names(argument)]
            if operator == "index":
                ints["axis"] = _indexed_axis(arguments.get("indices"))
            elif op == "Transpose":
                perm = _perm(operator, arguments)
        return Node(op=op, name=name, inputs=tuple(inputs), outputs=outputs, ints=ints, perm=perm)

    def _names(self, argument: object) -> list[str]:
        """The names of the tensors in an argument."""
        if not isinstance(argument, dict):
            return []
        tensors: list[object] = []
        for kind, value in argument.items():
            if kind == "as_tensor":
                tensors.append(value)
            elif kind in ("as_tensors", "as_optional_tensors"):
                tensors += self.document.typed(value, kind, list)
            elif kind == "as_optional_tensor":
                tensors.append(value)
        found = [one["as_tensor"] if isinstance(one, dict) and "as_tensor" in one else one for one in tensors]
        return [
            self.document.member(one, "name", str) for one in found if not (isinstance(one, dict) and "as_none" in one)
        ]


def _module(stack: object) -> str:
    """The module of a node, by the last of the `key,path,class` that torch writes for the modules around it."""
    parts = stack.rpartition(";")[2].split(",") if isinstance(stack, str) else []
    return parts[1] if len(parts) > 2 else ""


def _number(argument: object, default: int) -> int:
    value = argument.get("as_int") if isinstance(argument, dict) else None
    return value if type(value) is int else default


def _indexed_axis(argument: object) -> int:
    """The axis that `x[..., ids]` indexes, if it is one alone."""
    items = argument.get("as_optional_tensors", argument.get("as_tensors")) if isinstance(argument, dict) else None
    places = [at for at, one in enumerate(items or ()) if not (isinstance(one, dict) and "as_none" in one)]
    return places[0] if len(places) == 1 else UNKNOWN_AXIS


def _perm(operator: str, arguments: Mapping[str, object]) -> tuple[int, ...] | None:
    """The order of the axes of a matrix after this operator; `None` for the reverse."""
    if operator == "transpose":
        one, other = (_number(arguments.get(key), UNKNOWN_AXIS) for key in ("dim0", "dim1"))
        if not (-2 <= one < 2 and -2 <= other < 2):
            return ()
        return (1, 0) if one % 2 != other % 2 else (0, 1)
    if operator == "permute":
        argument = arguments.get("dims")
        dims = argument.get("as_ints") if isinstance(argument, dict) else None
        if not isinstance(dims, list) or not dims or not all(type(one) is int for one in dims):
            return ()
        return tuple(one % len(dims) for one in dims)
    return None
