"""Stages of Bowline's families for a pipeline: each process keeps some layers of the model, under their own names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bowline.errors import UsageError
from bowline.nn.ties.shared_parameters import find_ties

__all__ = ["Stage", "keep_stage", "tied_across"]


class Absent(nn.Module):
    """In place of a module that other stages have: it passes on what it gets, or adds nothing to it."""

    def __init__(self, *, adds: bool = False) -> None:
        super().__init__()
        self.adds = adds
        self.word_embeddings = None
        """BERT asks its embeddings for this table, and does not use it when it gets vectors."""

    def forward(self, x: Any, *others: Any) -> Any:
        return 0.0 if self.adds else x


class Stage(nn.Module):
    """What one process runs of a model from which `keep_stage` has taken the other stages.

    The first stage maps a batch to hidden states (B, T, D), those between map hidden states to hidden states, and the
    last maps them to the loss (1,). Every stage gets the whole batch as keywords, for its masks and labels.
    """

    def __init__(self, model: nn.Module, at: int, of: int, before: Callable[[int], Any]) -> None:
        super().__init__()
        self.model = model
        self.at, self.of = at, of
        self.before = before
        """Called with a batch's number before it is computed; returns the context to compute in."""

    def forward(self, x: torch.Tensor | None = None, *, micro: torch.Tensor, **batch: Any) -> torch.Tensor:
        with self.before(int(micro)):
            result: torch.Tensor = self._computed(x, batch)
        return result

    def _computed(self, x: torch.Tensor | None, batch: dict[str, Any]) -> Any:
        model: Any = self.model
        last = self.at == self.of - 1
        ids, labels = batch.pop("input_ids"), batch.pop("labels")
        if model.config.model_type == "t5":
            if last:
                return model(encoder_outputs=(x,), labels=labels, **batch).loss.reshape(1)
            return model.encode(ids, batch.get("attention_mask")).last_hidden_state
        tokens = {"input_ids": ids} if self.at == 0 else {"inputs_embeds": x}
        if last:
            return model(**tokens, labels=labels, **batch).loss.reshape(1)
        return getattr(model, model.base_model_prefix)(**tokens, **batch).last_hidden_state


def keep_stage(model: nn.Module, at: int, of: int) -> None:
    """Takes all modules out of `model`, in place, that only other stages have; the names of the others stay.

    Raises:
        UsageError: a family without stages, or a number of stages that it cannot have.
    """
    for path, stages in _layout(model, of).items():
        if at not in stages:
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, Absent(adds=leaf == "wpe"))


def tied_across(model: nn.Module, of: int) -> dict[str, str]:
    """For a whole model, the other names of each parameter that several stages will have, each with its first name."""
    layout = _layout(model, of)

    def stages(name: str) -> frozenset[int]:
        return next(at for path, at in layout.items() if name.startswith(f"{path}."))

    shared: dict[str, list[str]] = {}
    for tie in find_ties(model).ties:
        shared.setdefault(tie.source, []).append(tie.target)
    return {
        target: source
        for source, targets in shared.items()
        if len(frozenset[int]().union(*map(stages, (source, *targets)))) > 1
        for target in targets
    }


def _layout(model: nn.Module, of: int) -> dict[str, frozenset[int]]:
    """The stages that have each part of the model, by the part's name."""
    family = getattr(getattr(model, "config", None), "model_type", None)
    first, last = frozenset({0}), frozenset({of - 1})
    end: tuple[str, ...]
    if family == "t5":
        if of != 2:
            raise UsageError(f"pp={of}: a t5 has two stages, its encoder and its decoder", help="pp=2", argument="mesh")
        return {"shared": first | last, "encoder": first, "decoder": last, "lm_head": last}
    if family == "gpt2":
        begin, layers, end = ("wte", "wpe", "drop"), "transformer.h", ("transformer.ln_f", "lm_head")
        found = {f"transformer.{name}": first for name in begin}
    elif family == "bert":
        layers, end = "bert.encoder.layer", ("cls",)
        found = {"bert.embeddings": first}
    else:
        raise UsageError(
            f"parallel='pp': {type(model).__name__} has no stages here, expected a GPT-2, a BERT or a T5 of Bowline",
            help="use fsdp",
            argument="parallel",
        )
    count = len(model.get_submodule(layers))  # type: ignore[arg-type]
    if count < of:
        raise UsageError(
            f"pp={of}: the model has {count} layers, expected one at least for each stage",
            help=f"pp={count} or fewer stages",
            argument="mesh",
        )
    found |= {f"{layers}.{layer}": frozenset({layer * of // count}) for layer in range(count)}
    return found | dict.fromkeys(end, last)
