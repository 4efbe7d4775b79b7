"""Models in the formats of other runtimes: the tie survives, or the report says what became of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from bowline.errors import UsageError
from bowline.export.export_report import ExportReport

if TYPE_CHECKING:
    from torch import nn

    from bowline.auditing.progress import Progress
    from bowline.edit import EditReport
    from bowline.export.plain_call import Example

__all__ = ["FORMATS", "ExportReport", "export"]

FORMATS = ("torchscript", "pt2", "onnx", "gguf", "mlx", "hf")


@overload
def export(
    model: nn.Module | str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    to: Literal["torchscript", "pt2", "onnx"],
    head: Literal["shared", "cloned"] = "shared",
    opset: int | None = None,
    external_data: bool | None = None,
    aot_inductor: bool = False,
    example: Example | None = None,
    verify: bool = True,
) -> ExportReport: ...


@overload
def export(
    model: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    to: Literal["gguf", "mlx", "hf"],
    progress: Progress | None = None,
) -> EditReport: ...


def export(
    model: Any,
    destination: str | os.PathLike[str],
    *,
    to: str,
    head: str = "shared",
    opset: int | None = None,
    external_data: bool | None = None,
    aot_inductor: bool = False,
    example: Any = None,
    verify: bool = True,
    progress: Progress | None = None,
) -> ExportReport | EditReport:
    """Export a model for another runtime, run the export beside the model, and say what became of the tie.

    `"torchscript"`, `"pt2"` (torch.export) and `"onnx"` export a live model, or a checkpoint's directory that
    `bowline.models.load` or transformers' `AutoModelForCausalLM` loads. Batch and length of the inputs stay free. The
    written file is loaded again and run on inputs of two sizes; outputs that differ by more than 1e-4 (of the largest
    output, if that is above 1) are an error. `"gguf"`, `"mlx"` and `"hf"` rewrite a checkpoint's directory without
    running it; they are verified by the bytes and by the loaders' rules.

    Arguments:
        model: a module, or a checkpoint's directory.
        destination: a new file; for `"mlx"` and `"hf"` a new directory.
        to: the format.
        head: TorchScript: whether the head shares the embedding's matrix, or is a clone. A clone is a snapshot: it and
            the embedding part when the loaded module is trained.
        opset: ONNX: the version of the operators. By default that of torch's exporter.
        external_data: ONNX: weights in a file `NAME.data` beside the model. By default above 1 GB; 2 GB is the limit
            of a file without it.
        aot_inductor: pt2: compile the program for this machine's processor, with the weights in the code; needs a C++
            compiler.
        example: inputs of the module, a tuple of tensors or a dict by name. Models with a config of a language model
            need none.
        verify: whether to run the export. The report says if it was not run.
        progress: GGUF, MLX, HF: receives the bytes written and compared.

    Raises:
        UsageError: an unknown format, a missing package, a model that the exporter cannot export, or example inputs
            that are missing.
        CheckpointError: the destination exists or cannot be written, or the export does not compute what the model
            does. Nothing is left of it then.
        TieError: GGUF, MLX, HF: it is not known whether the two ends are one matrix.

    Example:
        >>> import tempfile, torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Embedding(900, 16), nn.Linear(16, 900, bias=False))
        >>> model[1].weight = model[0].weight
        >>> with tempfile.TemporaryDirectory() as place:
        ...     report = export(model, place + "/m.ts", to="torchscript", example=(torch.ones(2, 3, dtype=torch.long),))
        >>> print(report.outcome)
        1.weight <- 0.weight: one matrix in the file, shared when loaded
    """
    place = _checked(destination)
    if to in ("torchscript", "pt2", "onnx"):
        from bowline.export.live_export import export_live

        return export_live(
            model,
            place,
            to=to,
            head=head,
            opset=opset,
            external_data=external_data,
            aot_inductor=aot_inductor,
            example=example,
            verify=verify,
        )
    if to not in FORMATS:
        raise UsageError(f"to={to!r:.60}: expected one of {', '.join(FORMATS)}", argument="to")
    if not isinstance(model, (str, os.PathLike)):
        raise UsageError(
            f"model is a {type(model).__name__}: to={to!r} exports a checkpoint's directory",
            help="save it with bowline.save_checkpoint first",
            argument="model",
        )
    beside = {"head": head != "shared", "opset": opset is not None, "external_data": external_data is not None}
    beside |= {"aot_inductor": aot_inductor}
    beside |= {"example": example is not None, "verify": not verify}
    for name, given in beside.items():
        if given:
            raise UsageError(f"{name}: has no meaning for to={to!r}", help="leave it out", argument=name)
    if to == "gguf":
        from bowline.export.gguf import export_gguf

        return export_gguf(model, place, progress=progress)
    from bowline.export.hub_layout import export_layout

    return export_layout(model, place, to="mlx" if to == "mlx" else "hf", progress=progress)


def _checked(destination: Any) -> Path:
    if not isinstance(destination, (str, os.PathLike)) or not os.fspath(destination):
        raise UsageError(
            f"destination={destination!r:.60}: expected a path", help="for instance model.onnx", argument="destination"
        )
    return Path(os.fsdecode(destination))
