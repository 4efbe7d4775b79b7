"""ONNX: one initializer for both ends, of which onnxruntime's optimiser and its kernels make no second one."""

from __future__ import annotations

import tempfile
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bowline.errors import CheckpointError, UsageError, how_to_install
from bowline.export.plain_call import Inputs, values_of
from bowline.export.program import first_line, make_program, quietly
from bowline.tie import Tie
from bowline.wording import joined

__all__ = ["OnnxRun", "check_packages", "write_onnx"]


def check_packages(*, verify: bool) -> None:
    """Check that the packages of the exporter are installed, and onnxruntime if the export is to be run.

    Raises:
        UsageError: one is missing.
    """
    for package in ("onnx", "onnxscript", *(("onnxruntime",) if verify else ())):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import_module(package)
        except ModuleNotFoundError:
            raise UsageError(
                f"to='onnx' needs {package}, which is not installed", help=how_to_install("onnx"), argument="to"
            ) from None


def write_onnx(model: nn.Module, inputs: Inputs, file: Path, *, opset: int | None, external_data: bool) -> None:
    """Export the model to the file; with `external_data` the weights go to `NAME.data` beside it.

    Raises:
        UsageError: torch cannot export the model, or knows no such opset.
    """
    program = make_program(model, inputs)
    options = {} if opset is None else {"opset_version": opset}
    try:
        with quietly():
            made: Any = torch.onnx.export(program, dynamo=True, verbose=False, **options)  # type: ignore[arg-type]
            _as_gemm(made.model)
            _unpacked(made.model)
            for node in made.model.graph:
                node.metadata_props.clear()  # stack traces, with the paths of this machine
            made.save(str(file), external_data=external_data)
            found = made.model.opset_imports[""]
    except OSError:
        raise
    except Exception as error:
        raise UsageError(
            f"{type(model).__name__}: torch.onnx cannot export it{'' if opset is None else f' with opset {opset}'}: "
            f"{first_line(error)}",
            help="export it with to='torchscript' or 'pt2'",
        ) from error
    if opset is not None and found != opset:
        raise UsageError(
            f"opset={opset}: the operators of the model cannot be converted, expected {found}",
            help=f"leave it out, or give {found}",
            argument="opset",
        )


def _as_gemm(model: Any) -> None:
    """Let a head read the embedding's initializer as it is: rows times Eᵀ, one Gemm with transB.

    torch writes a product with three axes as Transpose and MatMul. onnxruntime computes the transposed matrix once, and
    keeps it beside the embedding's. Only matrices that something else reads too are changed.
    """
    import onnx_ir as ir

    for node in list(model.graph):
        if node.op_type != "MatMul":
            continue
        turned = node.inputs[1].producer()
        if turned is None or turned.op_type != "Transpose" or list(turned.attributes["perm"].as_ints()) != [1, 0]:
            continue
        matrix = turned.inputs[0]
        if not matrix.is_initializer() or len(matrix.uses()) < 2:
            continue
        rows, columns = (int(size) for size in matrix.shape)
        hidden, logits = node.inputs[0], node.outputs[0]
        name = matrix.name

        def constant(values: list[int], label: str, name: str = name) -> Any:
            made = ir.node("Constant", [], attributes={"value_ints": values})
            made.outputs[0].name = f"{name}.{label}"
            return made

        flat_shape, vocabulary = constant([-1, columns], "flat_shape"), constant([rows], "rows")
        flat = ir.node("Reshape", [hidden, flat_shape.outputs[0]])
        product = ir.node("Gemm", [flat.outputs[0], matrix], attributes={"transB": 1})
        first, last = constant([0], "first"), constant([-1], "last")
        sizes = ir.node("Shape", [hidden])
        leading = ir.node("Slice", [sizes.outputs[0], first.outputs[0], last.outputs[0]])
        shape = ir.node("Concat", [leading.outputs[0], vocabulary.outputs[0]], attributes={"axis": 0})
        back = ir.node("Reshape", [product.outputs[0], shape.outputs[0]])
        made = [flat, product, sizes, leading, shape, back]
        for one, label in zip(made, ("flat", "product", "sizes", "leading", "shape", "logits"), strict=True):
            one.outputs[0].name = f"{name}.{label}"
        back.outputs[0].type, back.outputs[0].shape, back.outputs[0].name = logits.type, logits.shape, logits.name
        model.graph.insert_before(node, [flat_shape, vocabulary, first, last, *made])
        for user, at in list(logits.uses()):
            user.replace_input_with(at, back.outputs[0])
        for at, output in enumerate(model.graph.outputs):
            if output is logits:
                model.graph.outputs[at] = back.outputs[0]
        model.graph.remove(node, safe=True)
        if not turned.outputs[0].uses():
            model.graph.remove(turned, safe=True)


def _unpacked(model: Any) -> None:
    """Let onnxruntime multiply by the embedding's initializer where it lies, instead of by a packed copy.

    For a constant matrix a product keeps a copy in the order of its kernel. onnxruntime frees the original, unless
    something else reads it too, as the look-up does. An initializer that is an input as well is no constant, so it is
    not packed; callers need not give it. Matrices in float16 stay constants: they would be cast at every call.
    """
    import onnx_ir as ir

    for matrix in model.graph.initializers.values():
        users = [(user.op_type, at) for user, at in matrix.uses()]
        wide = matrix.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE)
        if wide and ("Gemm", 1) in users and ("Gather", 0) in users and not matrix.is_graph_input():
            model.graph.inputs.append(matrix)


class OnnxRun:
    """The written model in onnxruntime, and how many matrices it holds, in the file and after the optimiser."""

    def __init__(self, file: Path, model: nn.Module, *, ties: tuple[Tie, ...], run: bool) -> None:
        self.ties = ties
        self.session: Any = None
        known = {one.data_ptr(): one for one in model.parameters() if one.ndim == 2}
        names = dict(model.named_parameters(remove_duplicate=False))
        self.shapes = {frozenset(names[tie.target].shape) for tie in ties if tie.target in names}
        self.expected = self._count(tuple(one.shape) for one in known.values())
        self.in_file = self._initializers(file)
        self.optimised: int | None = None
        if run:
            with tempfile.TemporaryDirectory(dir=file.parent) as place:
                self.session = self._session(file, Path(place) / "optimised.onnx")
                self.optimised = self._initializers(Path(place) / "optimised.onnx")

    def run(self, given: Inputs) -> tuple[torch.Tensor, ...]:
        """The outputs for these inputs."""
        names = [one.name for one in self.session.get_inputs()]
        named = {name: one.numpy() for name, one in zip(names, values_of(given), strict=True)}
        return tuple(torch.from_numpy(one) for one in self.session.run(None, named))

    @property
    def copies(self) -> int:
        """The matrices beyond the model's own, in the file or after the optimiser."""
        return max(self.in_file, self.optimised or 0) - self.expected

    @property
    def outcome(self) -> str:
        """What became of the tie, in one line."""
        if not self.ties:
            return "the model has no tied head"
        said = joined([str(tie) for tie in self.ties])
        counts = {"in the file": self.in_file, "after onnxruntime's optimiser": self.optimised}
        parts = [
            f"{'one initializer' if count == self.expected else f'{count - self.expected + 1} initializers'} {where}"
            for where, count in counts.items()
            if count is not None
        ]
        return f"{said}: {joined(parts)}"

    def _session(self, file: Path, optimised: Path) -> Any:
        onnxruntime = import_module("onnxruntime")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # it warns that an optimised model belongs to this machine
        options.optimized_model_filepath = str(optimised)
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights")
        try:
            return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's classes share no other base
            raise CheckpointError(
                f"{file.name}: onnxruntime does not load the export: {first_line(error)}",
                help="bfloat16 runs on few of its devices: cast the model first (`bowline cast --dtype f32`); "
                "--no-verify (verify=False) writes it all the same",
            ) from error

    def _initializers(self, file: Path) -> int:
        import onnx

        graph = onnx.load(str(file), load_external_data=False).graph
        return self._count(tuple(one.dims) for one in graph.initializer)

    def _count(self, shapes: Any) -> int:
        """How many of the shapes are that of a tied matrix, either way round."""
        return sum(len(shape) == 2 and frozenset(shape) in self.shapes for shape in shapes)
