"""`bowline export DIR DST --to FORMAT`"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bowline.cli.option_errors import in_options
from bowline.cli.progress_bar import shown_progress
from bowline.cli.torch_requirement import needs_torch
from bowline.errors import TieError
from bowline.wording import printable

__all__ = ["export"]

LIVE = ("torchscript", "pt2", "onnx")


class ExportFormat(StrEnum):
    """The formats that `bowline export` writes."""

    TORCHSCRIPT = "torchscript"
    PT2 = "pt2"
    ONNX = "onnx"
    GGUF = "gguf"
    MLX = "mlx"
    HF = "hf"


class HeadKind(StrEnum):
    """Whether the head shares the embedding's matrix."""

    SHARED = "shared"
    CLONED = "cloned"


PHRASES = {
    "--no-verify (verify=False)": "--no-verify",
    "to='torchscript'": "--to torchscript",
    "aot_inductor=True": "--aot-inductor",
    "'torchscript' or 'pt2'": "torchscript or pt2",
    "load the model yourself and pass it to bowline.export with example=": (
        "load it in Python and pass it to bowline.export with example="
    ),
}


@in_options(PHRASES, renamed={"verify": "no_verify"})
def export(
    path: Annotated[str, typer.Argument(metavar="DIR", help="The checkpoint's directory.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="A new file; for mlx and hf a new directory.")],
    to: Annotated[ExportFormat, typer.Option(help="The format.")],
    head: Annotated[
        HeadKind,
        typer.Option(help="TorchScript: the head shares the embedding's matrix, or is a clone, which is a snapshot."),
    ] = HeadKind.SHARED,
    opset: Annotated[int | None, typer.Option(help="ONNX: the version of the operators; by default torch's.")] = None,
    external_data: Annotated[
        bool | None,
        typer.Option(
            "--external-data/--no-external-data",
            help="ONNX: keep the weights in a file DST.data; by default if they have more than 1 GB.",
        ),
    ] = None,
    aot_inductor: Annotated[
        bool, typer.Option("--aot-inductor", help="pt2: compile it for this processor; needs a C++ compiler.")
    ] = False,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not run the export beside the model; the report says so.")
    ] = False,
) -> None:
    """Export a model for another runtime; says what became of the tie, and the size beside one copy.

    TorchScript, pt2 (torch.export) and ONNX are run beside the model before they get their name. GGUF, MLX and HF are
    rewritten from the checkpoint's files, without torch.
    """
    try:
        if to in LIVE:
            with needs_torch("export"):
                import torch  # noqa: F401 - the first import that fails says what to install

                from bowline.export.live_export import export_live
            report = export_live(
                path,
                destination,
                to=to.value,
                head=head.value,
                opset=opset,
                external_data=external_data,
                aot_inductor=aot_inductor,
                example=None,
                verify=not no_verify,
            )
            lines = report.lines()
        else:
            from bowline.export import export as written

            with shown_progress(str(destination)) as progress:
                lines = written(  # type: ignore[call-overload]
                    path,
                    destination,
                    to=to.value,
                    head=head.value,
                    opset=opset,
                    external_data=external_data,
                    aot_inductor=aot_inductor,
                    verify=not no_verify,
                    progress=progress,
                ).lines()
    except TieError as error:
        typer.echo(printable(f"error: {path}: {error}"), err=True)
        raise typer.Exit(1) from None
    for line in lines:
        typer.echo(printable(line))
