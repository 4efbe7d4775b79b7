"""`Slot`: a tensor's place in a model, its module and its name there. A tie is two slots with one `Parameter`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import torch
from torch import nn
from torch.nn.utils import parametrize

from bowline.errors import TieError, UsageError

__all__ = ["Slot", "expect_module", "named_modules", "occupied", "slot", "slots"]


@dataclass(slots=True, eq=False)  # not frozen: thousands are made for every call
class Slot:
    """The place of a parameter or buffer: `module.attribute`, with its `name` from the model's root.

    One module with two names (a shared layer) gives two slots with the same `module`.
    """

    name: str
    module: nn.Module
    attribute: str

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor in this place now."""
        attribute, home = self.attribute, self.module._parameters
        if attribute not in home:
            home = self.module._buffers  # type: ignore[assignment]
        tensor = home[attribute] if attribute in home else None  # noqa: SIM401 - TorchScript's has no `get`
        if tensor is None:
            raise TieError(
                f"{self.name}: holds no tensor now, expected one",
                help="the module was changed: look the tensor up again",
            )
        return tensor

    @property
    def is_parameter(self) -> bool:
        """Whether the tensor is a parameter; otherwise it is a buffer."""
        return self.attribute in self.module._parameters

    def beside(self, attribute: str) -> torch.Tensor | None:
        """The parameter called `attribute` in the same module, if there is one."""
        home = self.module._parameters
        return home[attribute] if attribute in home else None  # noqa: SIM401 - TorchScript's has no `get`

    def put(self, parameter: nn.Parameter) -> None:
        """Put `parameter` in this place, uncopied, and not by `register_parameter`, which meta contexts replace."""
        self.module._parameters[self.attribute] = parameter

    def same_place(self, other: Slot) -> bool:
        """Whether both names lead to the same place, because a module is shared."""
        return self.module is other.module and self.attribute == other.attribute


def expect_module(model: object) -> None:
    """Raise a `UsageError` if this is not a model but a path, `None` or a state dict."""
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model is a {type(model).__name__}, expected a torch.nn.Module",
            help="build or load the model first",
            argument="model",
        )


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """`model.named_modules(remove_duplicate=False)`, without nested generators, in a fifth of the time."""
    found: list[tuple[str, nn.Module]] = [("", model)]

    def walk(inside: str, module: nn.Module) -> None:
        for part, child in module._modules.items():
            if child is not None:
                name = inside + part
                found.append((name, child))
                if child._modules:  # most have none
                    walk(name + ".", child)

    expect_module(model)
    walk("", model)
    return found


def slots(model: nn.Module) -> dict[str, Slot]:
    """Every parameter, then every buffer, of every module: shared modules and shared parameters under each name."""
    return {slot.name: slot for slot, _ in occupied(named_modules(model))}


def occupied(modules: Sequence[tuple[str, nn.Module]]) -> Iterator[tuple[Slot, torch.Tensor]]:
    """Each slot with its present tensor: parameters first."""
    for buffers in (False, True):
        for prefix, module in modules:
            home: Mapping[str, torch.Tensor | None] = module._buffers if buffers else module._parameters
            if home:
                inside = prefix + "." if prefix else ""
                for attribute, tensor in home.items():
                    if tensor is not None:
                        yield Slot(inside + attribute, module, attribute), tensor


def slot(model: nn.Module, name: str, known: dict[str, Slot] | None = None) -> Slot:
    """The slot called `name`.

    Raises:
        TieError: no such slot; the message says why (parametrized, a plain attribute, a misspelling).
    """
    known = slots(model) if known is None else known
    if name in known:
        return known[name]
    raise _nothing_there(model, name, known)


def _nothing_there(model: nn.Module, name: str, known: dict[str, Slot]) -> TieError:
    path, _, attribute = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        module = None
    if module is not None:
        if parametrize.is_parametrized(module, attribute):
            kinds = ", ".join(type(part).__name__ for part in module.parametrizations[attribute])  # type: ignore[index]
            return TieError(
                f"{name}: is computed by a parametrization ({kinds}), expected a parameter of its own",
                help="call torch.nn.utils.parametrize.remove_parametrizations first, then tie",
            )
        if f"{attribute}_g" in module._parameters and f"{attribute}_v" in module._parameters:
            return TieError(
                f"{name}: is computed by weight_norm from {attribute}_g and {attribute}_v, expected a parameter",
                help="call torch.nn.utils.remove_weight_norm first, then tie",
            )
        if attribute == "weight" and hasattr(type(module), "looks_up"):
            return TieError(
                f"{name}: is computed from a table that quantize_tied made, expected a parameter of its own",
                help="untie_weights(model) converts the table back to float matrices",
            )
        if attribute in module._parameters and module._parameters[attribute] is None:
            return TieError(
                f"{name}: is None, expected a parameter", help="give the module that parameter, or leave out the tie"
            )
        held = module.__dict__.get(attribute)
        if isinstance(held, torch.Tensor):
            leaf = "" if held.is_leaf else ", and not a leaf"
            return TieError(
                f"{name}: is a plain tensor attribute{leaf}, expected a parameter",
                help=f"assign torch.nn.Parameter(...) to {name}",
            )
    close = get_close_matches(name, known, n=3, cutoff=0.5)
    near = f"; the nearest are {', '.join(close)}" if close else ""
    return TieError(
        f"{name}: {type(model).__name__} has no such tensor{near}", help="use the names of model.named_parameters()"
    )
