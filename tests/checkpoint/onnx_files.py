"""Small ONNX models, built with onnx itself: a look-up, a head, and how each stores its matrix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

Array = npt.NDArray[Any]
TABLE, HEAD = "wte.weight", "onnx::MatMul_9"


def int8(values: Array) -> tuple[Array, np.float32]:
    """Codes of one scale for the whole matrix, as onnxruntime's quantiser makes them for int8."""
    scale = np.float32(np.abs(values).max() / 127)
    return np.clip(np.rint(values / scale), -127, 127).astype(np.int8), scale


def model(nodes: Iterable[Any], initializers: Mapping[str, Any], outputs: Iterable[str] = ("logits",)) -> Any:
    """A model of these nodes with the input `input_ids`; a value is an array or a `TensorProto`."""
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "time"])
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    tensors = [
        numpy_helper.from_array(np.asarray(value), name) if isinstance(value, (np.ndarray, np.generic)) else value
        for name, value in initializers.items()
    ]
    graph = helper.make_graph(list(nodes), "main", [ids], results, tensors, doc_string="x" * 300)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10, producer_name="tests")


def lookup(table: str = TABLE, out: str = "x") -> Any:
    return helper.make_node("Gather", [table, "input_ids"], [out], name="/wte/Gather")


def product(matrix: str = HEAD, operand: str = "y", out: str = "logits") -> Any:
    return helper.make_node("MatMul", [operand, matrix], [out], name="/lm_head/MatMul")


def norm(name: str = "norm") -> Any:
    return helper.make_node("LayerNormalization", ["x", name], ["y"], name="/norm")


def causal(table: Array, head: Array | None = None, **more: Any) -> Any:
    """A model of a table (V, D) and a head of its own, also (V, D), stored transposed; without one they are shared."""
    width = table.shape[1]
    tensors: dict[str, Any] = {TABLE: table, "norm": np.ones(width, np.float32), **more}
    if head is None:
        turn = helper.make_node("Transpose", [TABLE], ["turned"], perm=[1, 0])
        return model([lookup(), norm(), turn, product("turned")], tensors)
    return model([lookup(), norm(), product()], tensors | {HEAD: np.ascontiguousarray(head.T)})


def gemm(table: Array, head: Array | None = None) -> Any:
    """A head of rows (V, D): a `Gemm` that transposes its matrix, and a bias."""
    name = TABLE if head is None else "lm_head.weight"
    tensors = {TABLE: table, "norm": np.ones(table.shape[1], np.float32), "bias": np.zeros(len(table), np.float32)}
    node = helper.make_node("Gemm", ["y", name, "bias"], ["logits"], name="/lm_head/Gemm", transB=1)
    return model([lookup(), norm(), node], tensors if head is None else tensors | {name: head})


def dequantised(table: Array, head: Array | None) -> Any:
    """Both ends as int8 codes with a scale, dequantised before they are used; without a head one for both."""
    codes, scale = int8(table)
    tensors: dict[str, Any] = {"wte_quantized": codes, "wte_scale": scale, "norm": np.ones(table.shape[1], np.float32)}
    nodes = [
        helper.make_node("DequantizeLinear", ["wte_quantized", "wte_scale"], ["wte"], name="/wte/DequantizeLinear"),
        lookup("wte"),
        norm(),
    ]
    if head is None:
        nodes.append(helper.make_node("Transpose", ["wte"], ["turned"], perm=[1, 0]))
        return model([*nodes, product("turned")], tensors)
    codes, scale = int8(head)
    tensors |= {"head_quantized": np.ascontiguousarray(codes.T), "head_scale": scale, "zero": np.int8(0)}
    nodes.append(helper.make_node("DequantizeLinear", ["head_quantized", "head_scale", "zero"], ["head"]))
    return model([*nodes, product("head")], tensors)


def merged(table: Array, head: Array, *, inside: bool) -> Any:
    """A merged decoder: an `If` with the head in both branches, whose matrix is outside or inside of them."""
    turned = numpy_helper.from_array(np.ascontiguousarray(head.T), HEAD)

    def branch(name: str) -> Any:
        out = helper.make_tensor_value_info(f"logits_{name}", TensorProto.FLOAT, None)
        nodes = [helper.make_node("MatMul", ["y", HEAD], [f"logits_{name}"], name=f"/{name}/MatMul")]
        return helper.make_graph(nodes, name, [], [out], [turned] if inside else [])

    choice = helper.make_node(
        "If",
        ["use_cache"],
        ["logits"],
        name="optimum::if",
        then_branch=branch("with_past"),
        else_branch=branch("no_past"),
    )
    tensors: dict[str, Any] = {TABLE: table, "norm": np.ones(table.shape[1], np.float32), "use_cache": np.bool_(True)}
    return model([lookup(), norm(), choice], tensors if inside else {**tensors, HEAD: turned})


def save(path: Path, made: Any, *, external: bool = False) -> Path:
    """Write a model; with `external` its tensors go into a file beside it, as optimum names it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if external:
        copy = onnx.ModelProto.FromString(
            made.SerializeToString()
        )  # onnx moves the data out of the model that it saves
        onnx.save_model(copy, path, save_as_external_data=True, location=f"{path.name}_data", size_threshold=0)
    else:
        path.write_bytes(made.SerializeToString())
    return path
