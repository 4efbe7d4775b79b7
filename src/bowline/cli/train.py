"""`bowline train --family gpt2 --data stdlib --out DIR`"""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bowline.auditing.report.terminal_text import printable
from bowline.cli.option_errors import in_options
from bowline.cli.torch_requirement import needs_torch

if TYPE_CHECKING:
    from bowline.train.training_run import Plan, TrainedRun

__all__ = ["train"]


class TrainableFamily(StrEnum):
    """The families that can be trained."""

    GPT2 = "gpt2"
    BERT = "bert"
    T5 = "t5"
    LSTM = "lstm"


class SizePreset(StrEnum):
    """How large: nano is for minutes on a laptop, the others are as published."""

    NANO = "nano"
    SMALL = "small"
    BASE = "base"


class PadLogit(StrEnum):
    """What becomes of the padding token's logit."""

    KEEP = "keep"
    MASK = "mask"


class HeadBias(StrEnum):
    """What the head's bias begins at."""

    ZERO = "zero"
    UNIGRAM = "unigram"


class RandomTokens(StrEnum):
    """From where a masked language model's random tokens are drawn."""

    ALL = "all"
    ORDINARY = "ordinary"


STOPPED = "stopped; --resume goes on from the last checkpoint, if there is one"
TRY = {
    "gpt2": 'bowline generate {} "def "',
    "lstm": 'bowline generate {} "def "',
    "bert": 'bowline fill-mask {} "def [MASK](self):"',
    "t5": 'bowline generate {} "for <extra_id_0> in range(10):"',
}


@in_options({"tie=false": "--untie"})
def train(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the model goes: a new directory.")],
    family: Annotated[TrainableFamily | None, typer.Option(help="Which family's model.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="A text file, a directory, or stdlib, which is the default. Repeatable."),
    ] = None,
    size: Annotated[SizePreset | None, typer.Option(help="How large; nano unless given.")] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON with any of these options; those given here come first."),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps; of the size unless given.")] = None,
    seed: Annotated[int | None, typer.Option(help="Draws the model, the order of the text, and dropout.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in DIR; where there is none, begin it.")
    ] = False,
    tie: Annotated[bool | None, typer.Option("--tie/--untie", help="The head is the embedding, or its own.")] = None,
    untie_at_step: Annotated[int | None, typer.Option(help="The head becomes its own after so many steps.")] = None,
    recipe: Annotated[str | None, typer.Option(help="How the model is drawn; see docs/recipes.md.")] = None,
    init_from: Annotated[str | None, typer.Option(metavar="DIR", help="Fine-tune this checkpoint.")] = None,
    pad_logit: Annotated[PadLogit | None, typer.Option(help="mask: the padding row stays as it is.")] = None,
    head_bias: Annotated[
        HeadBias | None, typer.Option(help="What the head's bias begins at; of the size unless given.")
    ] = None,
    mask_share: Annotated[
        float | None, typer.Option(help="Of bert and t5: the share of the tokens that is hidden.")
    ] = None,
    random_tokens: Annotated[
        RandomTokens | None,
        typer.Option(help="Of bert: which tokens may stand in for a hidden one; all, or ordinary: no special ones."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="DIR", help="Take the tokenizer from here, and train none.")
    ] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Tokens of a new tokenizer, exactly.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of an input.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Inputs of a batch.")] = None,
    accumulation: Annotated[int | None, typer.Option(help="Batches of a step.")] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="The highest, after the warm-up; of the size unless given.")
    ] = None,
    embedding_rate: Annotated[
        float | None,
        typer.Option(help="The embedding's rate, as a multiple of the learning rate; of the size unless given."),
    ] = None,
    warmup_steps: Annotated[
        int | None, typer.Option(help="Steps in which the rate rises; a tenth of all, at most 100, unless given.")
    ] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Decay of matrices, the tied one among them.")] = None,
    clip: Annotated[float | None, typer.Option(help="The norm to which a longer gradient is cut; 0 for none.")] = None,
    bf16: Annotated[bool | None, typer.Option("--bf16", help="Autocast to bfloat16.")] = None,
    compile_: Annotated[bool | None, typer.Option("--compile", help="torch.compile the model.")] = None,
    activation_checkpointing: Annotated[
        bool | None, typer.Option("--activation-checkpointing", help="Less memory, more time.")
    ] = None,
    strict: Annotated[bool | None, typer.Option("--strict", help="Refuse bytes and files that are no text.")] = None,
    held_out_share: Annotated[
        float | None, typer.Option(help="The share of the text that is never trained on.")
    ] = None,
    log_every: Annotated[int | None, typer.Option(help="Steps between records.")] = None,
    evaluate_every: Annotated[int | None, typer.Option(help="Steps between held-out evaluations.")] = None,
    save_every: Annotated[int | None, typer.Option(help="Steps between checkpoints.")] = None,
    keep: Annotated[int | None, typer.Option(help="Checkpoints that stay.")] = None,
    device: Annotated[str | None, typer.Option(help="Where to compute: cpu, cuda.")] = None,
) -> None:
    """Train a model on plain text: tokenizer, tokens, model, checkpoints, and a directory that loads everywhere."""
    given: dict[str, Any] = {
        name: value.value if isinstance(value, StrEnum) else value
        for name, value in (
            ("family", family), ("data", data), ("size", size), ("steps", steps), ("seed", seed), ("tie", tie),
            ("untie_at_step", untie_at_step), ("recipe", recipe), ("init_from", init_from), ("pad_logit", pad_logit),
            ("head_bias", head_bias), ("mask_share", mask_share), ("random_tokens", random_tokens),
            ("tokenizer", tokenizer), ("vocab_size", vocab_size), ("length", length), ("batch_size", batch_size),
            ("accumulation", accumulation), ("learning_rate", learning_rate), ("embedding_rate", embedding_rate),
            ("warmup_steps", warmup_steps), ("weight_decay", weight_decay), ("clip", clip), ("bf16", bf16),
            ("compile", compile_),
            ("activation_checkpointing", activation_checkpointing), ("strict", strict),
            ("held_out_share", held_out_share), ("log_every", log_every), ("evaluate_every", evaluate_every),
            ("save_every", save_every), ("keep", keep), ("device", device),
        )
        if value is not None and value != []
    }  # fmt: skip
    with needs_torch("train"):
        from bowline.train.loop.processes import is_first
        from bowline.train.loop.run_log import shown
        from bowline.train.train_config import TrainConfig
        from bowline.train.training_run import train as run
    stated = TrainConfig.read(config) if config is not None else {}
    wanted = TrainConfig.from_dict({**stated, **given}, str(config) if config is not None else "the options")

    def told(plan: Plan) -> None:
        typer.echo(printable_lines(plan.lines))

    try:
        with shown(wanted.value("steps")) as progress:
            outcome = run(
                wanted,
                out,
                resume=resume,
                say=lambda line: typer.echo(line, err=True),
                told=told,
                log=lambda record: progress.record({key: record[key] for key in record if key != "groups"}),
                on_step=progress.step,
            )
    except KeyboardInterrupt as stopped:
        if is_first():
            typer.echo(printable(str(stopped) or STOPPED), err=True)
        raise typer.Exit(130) from None
    if is_first():
        typer.echo("\n".join(_end(wanted.family, outcome)))


def printable_lines(lines: list[str]) -> str:
    """Names of files may hold what a terminal would obey."""
    return "\n".join(printable(line) for line in lines)


def _end(family: str, outcome: TrainedRun) -> list[str]:
    """Where the model is, how good, and what to try."""
    place = printable(json.dumps(str(outcome.directory)) if " " in str(outcome.directory) else str(outcome.directory))
    loss = outcome.result.held_out_loss
    of = {"bert": " of hidden tokens", "t5": " of hidden spans"}.get(family, "")
    seen = f"held-out perplexity{of} {outcome.perplexity:.4g} (loss {loss:.4f})" if loss is not None else "trained"
    return [
        f"{seen} after {outcome.result.step:,} step{'s' * (outcome.result.step != 1)}; the model is in {place}",
        f"try: {TRY[family].format(place)}",
        f"     bowline audit {place}",
    ]
