"""Tiny models of a class: built without storage, with every setting of the flags, tied as after a load."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch

from tools.inspection.configurations import with_switches
from tools.tiny import Json, config_from_dict, without_initialisation

Setting = tuple[bool | None, ...]
"""A value for each switch: True, False, or None where the key is absent."""


def on_meta(cls: type[Any], content: Json) -> Any:
    """A model on the meta device, without storage; on the CPU for the few classes that cannot be built on meta."""
    try:
        with without_initialisation(), torch.device("meta"):
            return cls(config_from_dict(cls.config_class, content))
    except (NotImplementedError, RuntimeError):
        with without_initialisation():
            return cls(config_from_dict(cls.config_class, content))


def most_tied(cls: type[Any], content: Json, paths: list[str]) -> Json:
    """`content` with every switch on, except those that the family refuses: they stay absent or off."""
    refused: Exception | None = None
    for setting in itertools.product((True, None, False), repeat=len(paths)):
        candidate = with_switches(content, dict(zip(paths, setting, strict=True)))
        try:
            on_meta(cls, candidate)
        except Exception as error:
            refused = refused or error
        else:
            return candidate
    raise refused or RuntimeError("no setting of the flags builds")


def in_every_setting(cls: type[Any], content: Json, paths: list[str]) -> dict[Setting, Any]:
    """A model for each setting of the switches (True, False or None for absent per path) that the family accepts."""
    models = {}
    for setting in itertools.product((True, False, None), repeat=len(paths)):
        try:
            models[setting] = as_loaded(on_meta(cls, with_switches(content, dict(zip(paths, setting, strict=True)))))
        except Exception:
            if not any(setting):
                raise
    return models


def as_loaded(model: Any) -> Any:
    """`model` with the ties that a load makes: each parameter is read separately, then `tie_weights` is called.

    4.57 shares some tables when it builds a model, and not when it loads one; only the latter matters to a checkpoint.
    """
    separate_parameters(model)
    model.tie_weights()
    return model


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers under all their names, shared ones under each."""
    found = dict(model.named_parameters(remove_duplicate=False))
    return found | dict(model.named_buffers(remove_duplicate=False))


def separate_parameters(model: torch.nn.Module) -> None:
    """Give every parameter name its own parameter; shared modules stay shared."""
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) in seen:
                module._parameters[name] = torch.nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            seen.add(id(module._parameters[name]))


def separate_everything(model: torch.nn.Module) -> None:
    """Break all sharing: every module path gets its own module, every parameter name its own parameter."""
    seen: set[int] = set()
    for path, _ in list(model.named_modules(remove_duplicate=False)):
        parent = model.get_submodule(path.rpartition(".")[0])
        child = model.get_submodule(path)
        if path and id(child) in seen:
            child = copy.deepcopy(child)
            setattr(parent, path.rpartition(".")[2], child)
        seen.add(id(child))
    separate_parameters(model)
