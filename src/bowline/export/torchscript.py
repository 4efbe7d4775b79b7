"""TorchScript: a traced module, whose head shares the embedding's matrix, or is a clone on request."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bowline.export.plain_call import Inputs, plain_view
from bowline.nn.ties.shared_parameters import find_ties
from bowline.nn.tree.slots import slots
from bowline.tie import Tie

__all__ = ["head_ties", "load_torchscript", "pointers", "with_cloned_heads", "write_torchscript"]


def write_torchscript(model: nn.Module, inputs: Inputs, file: Path) -> None:
    """Trace the model on the inputs and save it; the trace takes its inputs by position."""
    given = tuple(inputs.values()) if isinstance(inputs, dict) else inputs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the checks of inputs are not traced; newer torch warns of TorchScript's age
        traced: Any = torch.jit.trace(plain_view(model, inputs), given, check_trace=False)
        content = traced.save_to_buffer()  # torch's own writer of files ends the process where the disk is full
    file.write_bytes(content)


def load_torchscript(file: Path) -> Any:
    """Load a saved module on the CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.load(str(file), map_location="cpu")


def head_ties(model: nn.Module) -> tuple[Tie, ...]:
    """The ties of a matrix between an embedding and a module that is none."""
    known = slots(model)
    return tuple(
        tie
        for tie in find_ties(model).ties
        if tie.target in known
        and known[tie.target].tensor.ndim == 2
        and not isinstance(known[tie.target].module, nn.Embedding)
    )


def with_cloned_heads(model: nn.Module) -> nn.Module:
    """A copy of the model in which each head has a matrix of its own, with the embedding's values."""
    copied = copy.deepcopy(model)
    known = slots(copied)
    for tie in head_ties(copied):
        end = known[tie.target]
        own = nn.Parameter(end.tensor.detach().clone(), requires_grad=end.tensor.requires_grad)
        setattr(end.module, tie.target.rpartition(".")[2], own)
    return copied


def pointers(module: Any) -> dict[str, int]:
    """The address of the storage of each parameter and buffer, by name."""
    return {name: one.untyped_storage().data_ptr() for name, one in module.state_dict().items()}
