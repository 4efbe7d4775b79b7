"""Finds the modules of a model's two ends that compute, under the layers that PEFT puts around them.

A layer of PEFT is known by its submodules, so that PEFT need not be installed: LoRA has `base_layer` with `lora_A` and
`lora_B`, trained rows have `token_adapter`, and a saved module has `original_module` and `modules_to_save`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["SETTING", "Ends", "head_of", "heads_in", "state_of_end", "trained_rows_in"]

SETTING = "_tied_loss"
"""The attribute of a model that uses the tied loss: its backend and record."""


@dataclass(frozen=True, slots=True)
class Ends:
    """The parts of a head: the modules that multiply by its matrix, what LoRA adds to them, and layers of trained rows.

    `unknown`: modules around the head that are none of these.
    """

    heads: tuple[nn.Module, ...]
    deltas: tuple[nn.Module, ...]
    trained_rows: tuple[nn.Module, ...]
    unknown: tuple[nn.Module, ...]


def head_of(model: nn.Module) -> nn.Module | None:
    """What `get_output_embeddings()` gives, or `None`."""
    ask = getattr(model, "get_output_embeddings", None)
    found: nn.Module | None = ask() if callable(ask) else None
    return found


def heads_in(head: nn.Module) -> Ends:
    """The parts of a head, whatever is around it.

    Example:
        >>> heads_in(nn.Linear(4, 9)).heads
        (Linear(in_features=4, out_features=9, bias=True),)
    """
    heads: list[nn.Module] = []
    deltas: list[nn.Module] = []
    trained_rows: list[nn.Module] = []
    unknown: list[nn.Module] = []
    for module in _below(head):
        inside: dict[str, Any] = module._modules
        if isinstance(module, nn.Linear):
            heads.append(module)
        elif isinstance(inside.get("lora_B"), nn.ModuleDict):  # AdaLoRA has parameters there, and another product
            variants = getattr(module, "lora_variant", {})
            deltas += [one for name, one in inside["lora_B"].items() if name not in variants]
        elif "base_layer" in inside and hasattr(module, "trainable_tokens_delta"):
            trained_rows.append(module)
        elif not inside.keys() & {"token_adapter", "modules_to_save"}:
            unknown.append(module)
    return Ends(tuple(heads), tuple(deltas), tuple(trained_rows), tuple(unknown))


def trained_rows_in(table: nn.Module) -> Iterator[nn.Module]:
    """The layers of trained rows around an embedding."""
    return (one for one in _below(table) if hasattr(one, "trainable_tokens_delta") and "base_layer" in one._modules)


def state_of_end(module: nn.Module | None) -> tuple[Any, ...]:
    """What identifies the modules of an end: it changes when an adapter is added, or a module or class replaced."""
    if module is None:
        return ()
    return tuple((id(one), id(type(one)), *getattr(one, "lora_A", ())) for one in _below(module))


def _below(module: nn.Module) -> Iterator[nn.Module]:
    """The module, and under PEFT's layers those that compute in its place."""
    yield module
    inside: dict[str, Any] = module._modules
    for name in ("base_layer", "token_adapter", "original_module"):
        if inside.get(name) is not None:
            yield from _below(inside[name])
    for copied in (inside.get("modules_to_save") or {}).values():
        yield from _below(copied)
