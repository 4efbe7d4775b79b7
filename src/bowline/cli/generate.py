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


@in_options({"do_sample=False": "--greedy", "do_sample=True": "sampling", **LOADING})
def generate(
    path: Annotated[str, typer.Argument(metavar="DIR", help="A checkpoint: a directory, or org/name[@revision].")],
    text: Annotated[str, typer.Argument(help="The prompt to continue; for T5, the encoder's input.")],
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="Maximum number of new tokens. By default 40, or fewer if the context is shorter."),
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Sample tokens; below 1, likely ones more often.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from this many of the most likely tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the most likely tokens with this total probability.")
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the most likely token at each step.")] = False,
    seed: Annotated[int | None, typer.Option(help="Seed for sampling: the same seed gives the same text.")] = None,
    num_beams: Annotated[int, typer.Option(help="Number of beams in beam search; 1 for none.")] = 1,
    length_penalty: Annotated[
        float, typer.Option(help="For beam search: above 0 favours longer texts, below 0 shorter ones.")
    ] = 1.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1, tokens that have occurred become less likely.")
    ] = 1.0,
    device: Annotated[str, typer.Option(help="Device to compute on, such as cpu or cuda.")] = "cpu",
) -> None:
    """Continue a text with a language model.

    Takes the most likely tokens, or samples if the checkpoint's generation config or an option asks for it.
    """
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
        raise UsageError(
            f"--greedy takes the most likely token, but --{option} samples one", help="leave out one of the two"
        )
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
    """The text with control characters escaped, except tab and newline, since a model can generate any character."""
    return "\n".join("\t".join(printable(part) for part in line.split("\t")) for line in text.split("\n"))
