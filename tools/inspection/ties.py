"""The ties of a model: the pairs that its class declares, and the pairs that it makes."""

from __future__ import annotations

import re
import types
from collections.abc import Iterable
from typing import Any

import torch
import transformers

from tools.inspection.configurations import FLAG
from tools.inspection.models import separate_parameters, tensors
from tools.tiny import Json, config_from_dict, without_initialisation

Pair = tuple[str, str]
"""A tie as (target, source)."""


def module_weight(model: Any, getter: str) -> str | None:
    """Name of the weight of `model.get_input_embeddings()` or `.get_output_embeddings()`: the first path to it."""
    try:
        module = getattr(model, getter)()
    except (NotImplementedError, AttributeError, TypeError):
        return None
    if not isinstance(getattr(module, "weight", None), torch.Tensor):
        return None
    paths = [path for path, found in model.named_modules(remove_duplicate=False) if found is module]
    return f"{paths[0]}.weight".lstrip(".") if paths else None


def declared_pairs(model: Any) -> dict[str, str]:
    """{target: source} that the classes of `model` and of its parts declare, whatever their flags (5.x)."""
    pairs: dict[str, str] = {}
    if not hasattr(model, "get_expanded_tied_weights_keys"):
        return pairs
    forced = types.SimpleNamespace(**{FLAG: True})
    for path, part in model.named_modules(remove_duplicate=False):
        if isinstance(part, transformers.PreTrainedModel):
            config, part.config = part.config, forced  # type: ignore[assignment]
            try:
                expanded = part.get_expanded_tied_weights_keys(all_submodels=False)
            finally:
                part.config = config
            prefix = f"{path}." if path else ""
            pairs |= {prefix + target: prefix + source for target, source in expanded.items()}
    return pairs


def declared_targets(model: Any) -> list[str]:
    """Patterns of the names that the classes of `model` declare as targets."""
    found = []
    for path, part in model.named_modules():
        keys = getattr(part, "_tied_weights_keys", None) or []
        found += [f"{path}.{key}" if path else key for key in keys]
    return found


def made_pairs(model: Any) -> set[Pair]:
    """(target, source) for each further name of a parameter that the model holds under several names.

    The source is the name that a save keeps: the one that no class declares as a target.
    """
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    embedding = module_weight(model, "get_input_embeddings")
    patterns = declared_targets(model)
    found = set()
    for names in groups.values():
        kept = [name for name in names if not any(re.search(pattern, name) for pattern in patterns)] or [max(names)]
        source = embedding if embedding in kept else kept[0]
        found |= {(name, str(source)) for name in names if name != source}
    return found


def owned_by_target(cls: type[Any], content: Json, pairs: Iterable[Pair]) -> set[Pair]:
    """The pairs whose target keeps its own stored values in a load, which gives them to the source as well.

    4.57 does this with some output biases: `self.bias = self.decoder.bias`. In 5.x neither end is overwritten.
    """
    if hasattr(transformers.PreTrainedModel, "get_expanded_tied_weights_keys"):
        return set()
    with without_initialisation():
        model = cls(config_from_dict(cls.config_class, content))
    separate_parameters(model)
    before = tensors(model)
    model.tie_weights()
    after = tensors(model)
    return {
        (target, source)
        for target, source in pairs
        if {target, source} <= before.keys()
        and before[target] is not before[source]  # for one module under two names there is nothing to decide
        and after[target] is before[target]
        and after[source] is before[target]
    }


def is_tied(model: Any, target: str, source: str) -> bool:
    """Whether the two names are one parameter, or, for buffers, listed as a tie in force (5.x)."""
    names = tensors(model)
    listed = getattr(model, "all_tied_weights_keys", None) or {}
    same = names.get(target) is not None and names.get(target) is names.get(source)
    return same or (listed.get(target) == source and target in names)
