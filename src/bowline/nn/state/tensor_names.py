"""Translates tensor names between a live transformers model and its files, by the tables of its class.

A model of any other kind is stored under its own names. transformers 5 keeps these tables in `conversion_mapping` and
applies them in `core_model_loading`, 4 in `_checkpoint_conversion_mapping`; both are asked, not copied.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from bowline.nn.tree.slots import expect_module

__all__ = ["restored_conversions", "is_transformers_model", "to_disk", "to_live", "unwrapped"]

State = dict[str, torch.Tensor]


def is_transformers_model(model: nn.Module) -> bool:
    """Whether the model is a `PreTrainedModel`, without importing transformers to find out."""
    module = sys.modules.get("transformers.modeling_utils")
    return module is not None and isinstance(model, module.PreTrainedModel)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch's wrappers: `torch.compile`, `DataParallel` and `DistributedDataParallel`."""
    expect_module(model)
    while True:
        inner = model._modules["_orig_mod"] if "_orig_mod" in model._modules else None  # noqa: SIM401 - TorchScript's
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = model.module
        if inner is None:
            return model
        model = inner


@contextmanager
def restored_conversions(model: nn.Module) -> Iterator[None]:
    """Restores the translations that `to_live` records for later saves, if a load fails."""
    before = model.__dict__.get("_weight_conversions")
    try:
        yield
    except BaseException:
        model.__dict__.pop("_weight_conversions", None)
        if before is not None:
            model.__dict__["_weight_conversions"] = before
        raise


def to_live(model: nn.Module, held: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor]) -> State:
    """Tensors by the names on disk -> tensors by the names in `model`; unknown names stay as they are.

    `held`: the model's state dict.
    """
    if not any("_orig_mod." in name for name in held):
        return _to_live(model, stored, dict(held))
    live = {_uncompiled(name): name for name in held}
    known = {_uncompiled(name): tensor for name, tensor in held.items()}
    return {live.get(name, name): tensor for name, tensor in _to_live(model, stored, known).items()}


def _uncompiled(name: str) -> str:
    """The name without the prefixes that `torch.compile` adds around parts of a model."""
    return name.replace("_orig_mod.", "")


def _to_live(model: nn.Module, stored: Mapping[str, torch.Tensor], known: State) -> State:
    if not is_transformers_model(model):
        return dict(stored)
    if _as_they_are(stored, known):
        model.__dict__["_weight_conversions"] = []  # so that a later save translates nothing either
        return dict(stored)
    if _version() < 5:
        return {_live_name_4(model, name, known): tensor for name, tensor in stored.items()}
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    transforms: list[Any] = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    renamings = [one for one in transforms if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, loading.WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    prefix = getattr(model, "base_model_prefix", "")
    state: State = {}
    waiting: dict[str, Any] = {}
    for name in sorted(stored, key=loading.dot_natural_key):
        live, pattern = loading.rename_source_key(name, renamings, converters, prefix, known)
        if live not in known and name in known:
            live, pattern = loading.rename_source_key(name, [], [], prefix, known)
        if pattern is None or live not in known:
            state[live] = stored[name]
        else:
            waiting.setdefault(live, copy.deepcopy(by_pattern[pattern])).add_tensor(live, name, pattern, stored[name])
    for live, converter in waiting.items():
        for name, tensor in converter.convert(live, model=model, config=model.config).items():
            state[name] = tensor[0] if isinstance(tensor, list) else tensor
    model.__dict__["_weight_conversions"] = [one for one in transforms if one.was_used()]  # a later save reverts these
    return state


def _as_they_are(stored: Mapping[str, torch.Tensor], known: Mapping[str, torch.Tensor]) -> bool:
    """Whether every tensor fits the place of its name, so that transformers' slow tables need not be built.

    A table may transpose stacked matrices (three axes) under one name; with such tensors, the tables are used.
    """
    return all(
        name in known and tensor.shape == known[name].shape and tensor.ndim < 3 for name, tensor in stored.items()
    )


def to_disk(model: nn.Module, state: Mapping[str, torch.Tensor]) -> State:
    """Tensors by the names in `model` -> tensors by the names on disk."""
    state = {_uncompiled(name): tensor for name, tensor in state.items()}
    if not is_transformers_model(model):
        return state
    if _version() < 5:
        return {_disk_name_4(model, name): tensor for name, tensor in state.items()}
    from transformers.core_model_loading import revert_weight_conversion

    reverted: State = revert_weight_conversion(model, state)  # type: ignore[arg-type]
    return reverted


def _version() -> int:
    return int(sys.modules["transformers"].__version__.partition(".")[0])


def _patterns_4(model: nn.Module) -> dict[str, str]:
    """The class's renaming, which transformers 4 applies only to vision models."""
    kinds = getattr(sys.modules["transformers.modeling_utils"], "VLMS", ())
    classes = [kind.__name__.lower() for kind in type(model).__mro__]
    sees = any(kind in name for name in classes for kind in kinds)
    return (getattr(model, "_checkpoint_conversion_mapping", None) or {}) if sees else {}


def _live_name_4(model: nn.Module, name: str, known: Mapping[str, Any]) -> str:
    name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
    for pattern, replacement in _patterns_4(model).items():
        name, count = re.subn(pattern, replacement, name)
        if count:
            break
    prefix = getattr(model, "base_model_prefix", "")
    if name in known or not prefix:
        return name
    shorter, longer = name.removeprefix(prefix + "."), f"{prefix}.{name}"
    return shorter if shorter in known else longer if longer in known else name


def _disk_name_4(model: nn.Module, name: str) -> str:
    for pattern, replacement in _patterns_4(model).items():
        name, count = re.subn(replacement, re.sub(r"\(.*\)", "", pattern.lstrip("^")), name)
        if count:
            break
    return name
