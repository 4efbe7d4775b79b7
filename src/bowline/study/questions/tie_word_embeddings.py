"""The question what `tie_word_embeddings` does: parameters, file, gradients and memory with and without it."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bowline.models import PreTrainedModel
from bowline.nn import unique_parameters, untie_weights
from bowline.plots.panels import Bar, Bars, Group, Sheet
from bowline.study.experiments import Experiments
from bowline.study.initial_loss import FAMILIES
from bowline.study.question import Numbers, Question
from bowline.study.statistics import percent, written
from bowline.wording import joined

MEASURED = ("bert", "gpt2", "t5")
TITLES = {"bert": "BERT", "gpt2": "GPT-2", "t5": "T5"}
LENGTH = 32


def _run(experiments: Experiments) -> Numbers:
    sizes = experiments.setting
    rows = []
    for family in MEASURED:
        vocab = sizes.sizes_vocab or FAMILIES[family].vocab_size
        width = sizes.sizes_hidden or FAMILIES[family].hidden_size
        small = {"family": family, "vocab_size": vocab, "hidden_size": width, "layers": sizes.layers}
        rows.append(
            {
                "family": family,
                "vocab_size": vocab,
                "hidden_size": width,
                "whole": experiments.unit(count, family=family),
                "tied": experiments.unit(measure, tied=True, **small),
                "untied": experiments.unit(measure, tied=False, **small),
                "gradient": experiments.unit(gradient, **small),
            }
        )
    return {"rows": rows}


def count(family: str) -> dict[str, Any]:
    """Count the parameters of the family's base size, tied and untied, without allocating models."""
    cls = FAMILIES[family].model
    found: dict[str, Any] = {}
    for name, tied in (("tied", True), ("untied", False)):
        with torch.device("meta"):
            found[name] = cls(cls.config_class(tie_word_embeddings=tied)).num_parameters()
    config = cls.config_class()
    found["table"] = config.vocab_size * config.hidden_size
    return found


def _built(family: str, tied: bool, vocab_size: int, hidden_size: int, layers: int) -> PreTrainedModel:
    this = FAMILIES[family]
    config = this.config(vocab_size, hidden_size, layers).updated(tie_word_embeddings=tied)
    if family == "t5":
        config = config.updated(scale_decoder_outputs=None)  # the flag decides
    model: PreTrainedModel = this.model(config)
    return model.eval()  # dropout would make two models differ


def _backward(model: nn.Module, vocab_size: int) -> torch.Tensor:
    ids = torch.randint(2, vocab_size, (4, LENGTH), generator=torch.Generator().manual_seed(0))
    output = model(ids, labels=ids)
    output.loss.backward()
    logits: torch.Tensor = output.logits.detach()
    return logits


def measure(family: str, tied: bool, vocab_size: int, hidden_size: int, layers: int) -> dict[str, Any]:
    """Measure the bytes of a model's file, and of its tensors in memory after one step of AdamW."""
    model = _built(family, tied, vocab_size, hidden_size, layers)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        on_disk = sum(path.stat().st_size for path in Path(directory).glob("*.safetensors"))
    optimizer = torch.optim.AdamW(model.parameters())
    logits = _backward(model, vocab_size)
    optimizer.step()
    own = list(unique_parameters(model))
    return {
        "parameters": model.num_parameters(),
        "listed": len(list(model.named_parameters())),
        "bytes_on_disk": on_disk,
        "weight_bytes": sum(each.untyped_storage().nbytes() for each in own),
        "gradient_bytes": sum(each.grad.nbytes for each in own if each.grad is not None),
        "optimizer_bytes": sum(
            value.nbytes for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)
        ),
        "logit_std": float(logits.std()),
    }


def gradient(family: str, vocab_size: int, hidden_size: int, layers: int) -> dict[str, Any]:
    """Compare the tied matrix's gradient with the sum of both ends' gradients in an untied model of equal weights."""
    tied = _built(family, True, vocab_size, hidden_size, layers)
    untied = copy.deepcopy(tied)
    untie_weights(untied)
    table, head = _ends(untied)
    factor = float((head.norm() / table.norm()).detach())  # if the flag scales, the head's copy includes the factor
    _backward(tied, vocab_size)
    _backward(untied, vocab_size)
    shared = _gradient(_ends(tied)[0])
    from_input, from_output = _gradient(table), factor * _gradient(head)
    return {
        "relative_error": float((shared - from_input - from_output).norm() / shared.norm()),
        "input": float(from_input.norm()),
        "output": float(from_output.norm()),
        "rows_of_input": int((from_input != 0).any(1).sum()),
        "rows_of_output": int((from_output != 0).any(1).sum()),
        "head_factor": factor,
    }


def _ends(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    head = model.get_output_embeddings()
    assert head is not None, "these classes have a head"
    return model.get_input_embeddings().weight, head.weight  # type: ignore[return-value]


def _gradient(weight: torch.Tensor) -> torch.Tensor:
    assert weight.grad is not None, "backward has been run"
    return weight.grad


def _held(row: dict[str, Any]) -> int:
    return int(row["weight_bytes"] + row["gradient_bytes"] + row["optimizer_bytes"])


def _plot(numbers: Numbers) -> Sheet:
    whole, held = [], []
    for row in numbers["rows"]:
        title = TITLES[row["family"]]
        for name, other in (("tied", 0), ("untied", 1)):
            parameters = row["whole"][name]
            tables = 1 + (row["whole"]["untied"] > row["whole"]["tied"] and other)
            table = row["whole"]["table"] / 1e6
            rest = parameters / 1e6 - tables * table
            bars = [
                Bar(label="everything else", value=rest, colour=7),
                Bar(label="the table", value=table, colour=0, note="" if tables > 1 else f"{parameters / 1e6:.1f} M"),
            ]
            if tables > 1:
                bars.append(Bar(label="a head of its own", value=table, colour=1, note=f"{parameters / 1e6:.1f} M"))
            whole.append(Group(name=f"{title}, {name}", bars=bars))
        for what, size in (("file", lambda one: one["bytes_on_disk"]), ("training", _held)):
            bars = [
                Bar(label=name, value=size(row[name]) / 1e6, colour=colour, note=f"{size(row[name]) / 1e6:.0f} MB")
                for colour, name in enumerate(("tied", "untied"))
            ]
            held.append(Group(name=f"{title}, {what}", bars=bars))
    first = numbers["rows"][0]
    return Sheet(
        title="What does tie_word_embeddings do?",
        subtitle="one matrix less, everywhere that matrices are counted, saved, differentiated or kept by an optimizer",
        panels=[
            Bars(
                title="Parameters of the base size",
                subtitle="counted",
                x_label="millions of parameters",
                groups=whole,
                stacked=True,
            ),
            Bars(
                title="Bytes of a small model",
                subtitle=f"width {first['hidden_size']}, float32; "
                "training holds weights, gradients and AdamW's moments",
                x_label="megabytes",
                groups=held,
            ),
        ],
    )


def _conclusion(numbers: Numbers) -> str:
    rows = numbers["rows"]
    saved = joined(
        [
            f"{TITLES[row['family']]} {percent(1 - row['whole']['tied'] / row['whole']['untied'])} "
            f"({row['whole']['untied'] / 1e6:.1f} M to {row['whole']['tied'] / 1e6:.1f} M)"
            for row in rows
        ]
    )
    exact = max(abs(_held(row["untied"]) - _held(row["tied"]) - 16 * _table(row)) / (16 * _table(row)) for row in rows)
    bytes_told = (
        "the file is smaller by one table and training holds four tables less (weight, gradient, two moments)"
        if exact < 0.05 and all(_file_difference(row) for row in rows)
        else "the bytes of file and training do not differ by exactly that table"
    )
    first = f"The tie takes one table away: {saved} of the untied parameters, and measured, {bytes_told}."
    worst = max(row["gradient"]["relative_error"] for row in rows)
    sums = (
        f"its gradient is the sum of both ends', to a relative {written(worst, 2)}"
        if worst < 1e-4
        else f"its gradient differs from the sum of both ends' by a relative {written(worst, 2)}, which it should not"
    )
    scaled = [row for row in rows if abs(row["gradient"]["head_factor"] - 1) > 1e-3]
    also = (
        f"; in {joined([TITLES[row['family']] for row in scaled])} the flag also multiplies what the head is given, by "
        f"{joined([written(row['gradient']['head_factor']) for row in scaled])}"
        if scaled
        else ""
    )
    return f"{first} One matrix then learns from both ends: {sums}{also}."


def _table(row: dict[str, Any]) -> int:
    return int(row["vocab_size"] * row["hidden_size"])


def _file_difference(row: dict[str, Any]) -> bool:
    table = 4 * _table(row)
    return bool(abs(row["untied"]["bytes_on_disk"] - row["tied"]["bytes_on_disk"] - table) < 0.05 * table)


QUESTION = Question(
    name="flag",
    asks="What exactly does the parameter tie_word_embeddings do?",
    thread="What is the tie_word_embeddings option exactly doing?",
    run=_run,
    plot=_plot,
    conclusion=_conclusion,
)
