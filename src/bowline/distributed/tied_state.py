"""A model's and an optimizer's state for `torch.distributed.checkpoint`, with one entry for each tied matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from bowline.nn.ties.shared_parameters import find_ties
from bowline.nn.tree.slots import expect_module

__all__ = ["TiedState"]


class TiedState:
    """Give `{"state": TiedState(model, optimizer)}` to torch's `dcp.save` and `dcp.load`.

    torch writes a tied matrix under both names, and loads the last. Here it is under its source's name alone, in the
    model's part and in the optimizer's, so a checkpoint can be loaded on another number of processes, or sharded
    otherwise. Each tie has an entry of its own, such as `ties.lm_head.weight <- wte.weight`: a checkpoint of an untied
    model lacks it, and `dcp.load` says so before it reads anything into a tied model, whose head would be lost. To
    untie, export with `save_checkpoint`.

    Example:
        >>> model = nn.ModuleDict({"wte": nn.Embedding(9, 4), "lm_head": nn.Linear(4, 9, bias=False)})
        >>> model["lm_head"].weight = model["wte"].weight
        >>> sorted(TiedState(model).state_dict()["model"])
        ['wte.weight']
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        expect_module(model)
        self.model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """What `dcp.save` writes, and the tensors that `dcp.load` reads into."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

        others = self._targets()
        ties = {f"{target} <- {source}": torch.ones(()) for target, source in others.items()}
        state: dict[str, Any] = {"model": _without(get_model_state_dict(self.model), others), "ties": ties}
        if self.optimizer is not None:
            found = get_optimizer_state_dict(self.model, self.optimizer)
            state["optimizer"] = _renamed(found, others)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts what `dcp.load` read into the model and the optimizer."""
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            set_model_state_dict,
            set_optimizer_state_dict,
        )

        model = dict(state["model"])
        model |= {target: model[source] for target, source in self._targets().items()}
        set_model_state_dict(self.model, model, options=StateDictOptions(strict=True))
        if self.optimizer is not None:
            set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])

    def _targets(self) -> dict[str, str]:
        """The source of each other name of a shared parameter."""
        return {tie.target: tie.source for tie in find_ties(self.model).ties}


def _without(state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in names}


def _renamed(state: Mapping[str, Any], sources: Mapping[str, str]) -> dict[str, Any]:
    """An optimizer's state, and its groups' lists of names, under the sources' names."""
    moments = {sources.get(name, name): value for name, value in state["state"].items()}
    groups = [
        {**group, "params": [sources.get(name, name) for name in group["params"]]} for group in state["param_groups"]
    ]
    return {"state": moments, "param_groups": groups}
