"""`bowline generate DIR "text"`"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from bowline.cli.option_errors import LOADING, in_options
from bowline.cli.torch_requirement import needs_torch
from bowline.errors import UsageError
from bowline.wording import printable

__all__ = ["generate"]


@in_options({"do_sample=False": "--greedy", "do_sample=True": "draws", **LOADING})
def generate(
    path: Annotated[str, typer.Argument(metavar="DIR", help="A checkpoint: a directory, or org/name[@revision].")],
    text: Annotated[str, typer.Argument(help="What to go on from; of a T5, what to answer.")],
    max_new_tokens: Annotated[
        int | None, typer.Option(help="At most so many new tokens; 40 unless given, or as many as there is room for.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Draw tokens; below 1, likely ones more often.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from so many of the likeliest.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the likeliest with this much probability.")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="The likeliest token each time.")] = False,
    seed: Annotated[int | None, typer.Option(help="Draw the same again.")] = None,
    num_beams: Annotated[int, typer.Option(help="Follow so many hypotheses at once.")] = 1,
    length_penalty: Annotated[float, typer.Option(help="Of beams: above 0 longer texts, below it shorter ones.")] = 1.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1, what was said is said again less often.")] = 1.0,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda.")] = "cpu",
) -> None:
    """Go on with a text: the likeliest tokens, or drawn ones where the checkpoint or an option says so."""
    with needs_torch("generate"):
        from bowline.models.text_generation import text_pieces
    options: dict[str, Any] = {
        "num_beams": num_beams,
        "length_penalty": length_penalty,
        "repetition_penalty": repetition_penalty,
    }
    drawn = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    drawn = {name: value for name, value in drawn.items() if value is not None}
    if drawn and greedy:
        option = next(iter(drawn)).replace("_", "-")
        raise UsageError(f"--greedy takes the likeliest token, --{option} draws one", help="leave one of them out")
    if drawn or greedy:
        options["do_sample"] = not greedy
    pieces = text_pieces(path, text, device=device, seed=seed, max_new_tokens=max_new_tokens, **drawn, **options)
    if sys.stdout.isatty():
        for piece in pieces:
            typer.echo(shown(piece), nl=False)
        typer.echo()
    else:
        typer.echo("".join(pieces))


def shown(text: str) -> str:
    """What a terminal may be given: a model can spell out what moves the cursor, or worse."""
    return "\n".join("\t".join(printable(part) for part in line.split("\t")) for line in text.split("\n"))
