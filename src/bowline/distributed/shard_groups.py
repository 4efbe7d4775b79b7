"""Groups the modules of a model for `fully_shard`, so that every tie is sharded as one parameter."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from bowline.nn.tree.slots import expect_module

__all__ = ["shard_groups"]


def shard_groups(model: nn.Module) -> list[list[nn.Module]]:
    """The modules for each call of torch's `fully_shard`, in the order of the calls; the last is the model itself.

    Each repeated layer (a module in an `nn.ModuleList` that has modules of its own) is a group. All the rest goes to
    the model's group: the embedding, the final norm and the head, so that the ends of a tie are sharded as one
    parameter, which is gathered once a step. A layer that shares a parameter with the rest of the model is no group
    either, and goes to the model's. An embedding inside a layer is a group of its own, because T5's first block
    holds the position biases that every block uses.

    Tie before (`tie_weights`), and build the optimizer afterwards; `check_before_sharding` says whether that holds.

    Example:
        >>> from bowline.models import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=4, n_layer=2, n_head=1, n_positions=8))
        >>> [[type(module).__name__ for module in group] for group in shard_groups(model)]
        [['GPT2Block'], ['GPT2Block'], ['GPT2LMHeadModel']]

        On the processes of a mesh: `for group in shard_groups(model): fully_shard(group, mesh=mesh)`.
    """
    expect_module(model)
    layers: list[nn.Module] = []
    covered: set[nn.Module] = set()
    for layer in _layers(model):
        inside = set(layer.modules())
        if not inside & covered and not _shares(model, inside):
            layers.append(layer)
            covered |= inside
    tables = [module for layer in layers for module in layer.modules() if isinstance(module, nn.Embedding)]
    return [*([module] for module in (*tables, *layers)), [model]]


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """The modules in the model's lists that have parameters and modules of their own, outermost first."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for layer in module:
                if any(True for _ in layer.children()) and any(True for _ in layer.parameters()):
                    yield layer


def _shares(model: nn.Module, inside: set[nn.Module]) -> bool:
    """Whether these modules share a parameter with a module outside them."""
    held: set[torch.Tensor] = {parameter for module in inside for parameter in module.parameters(recurse=False)}
    return any(
        parameter in held
        for module in model.modules()
        if module not in inside
        for parameter in module.parameters(recurse=False)
    )
