"""`bowline fill-mask DIR "text [MASK]"`"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from bowline.cli.option_errors import LOADING, in_options
from bowline.cli.torch_requirement import needs_torch
from bowline.wording import printable

if TYPE_CHECKING:
    from bowline.models.generation import FilledMask

__all__ = ["FillFormat", "fill_mask"]


class FillFormat(StrEnum):
    """How the candidates are written."""

    FULL = "full"
    JSON = "json"


@in_options(LOADING)
def fill_mask(
    path: Annotated[str, typer.Argument(metavar="DIR", help="A checkpoint: a directory, or org/name[@revision].")],
    text: Annotated[str, typer.Argument(help="A text with [MASK] for each token to predict.")],
    top_k: Annotated[int, typer.Option(help="Number of candidates for each mask.")] = 5,
    output_format: Annotated[FillFormat, typer.Option(help="Format of the output.")] = FillFormat.FULL,
    device: Annotated[str, typer.Option(help="Device to compute on, such as cpu or cuda.")] = "cpu",
) -> None:
    """Predict the tokens behind each [MASK] in a text."""
    with needs_torch("fill-mask"):
        from bowline.models.text_generation import filled_text
    masks = filled_text(path, text, top_k=top_k, device=device)
    typer.echo(_as_json(text, masks) if output_format is FillFormat.JSON else _as_table(masks))


def _as_json(text: str, masks: list[FilledMask]) -> str:
    content = [
        {
            "position": mask.position,
            "candidates": [
                {"token": one.token, "token_id": one.token_id, "probability": one.probability}
                for one in mask.candidates
            ],
        }
        for mask in masks
    ]
    return json.dumps({"version": 1, "text": text, "masks": content}, indent=2)


def _as_table(masks: list[FilledMask]) -> str:
    """One line for each candidate, whatever the width of the terminal: probability, token, number."""
    lines = []
    for number, mask in enumerate(masks, 1):
        if len(masks) > 1:
            lines.append(f"mask {number}, token {mask.position} of the text")
        width = max(len(printable(one.token)) for one in mask.candidates)
        lines += [f"{one.probability:8.2%}  {printable(one.token):<{width}}  {one.token_id}" for one in mask.candidates]
    return "\n".join(lines)
