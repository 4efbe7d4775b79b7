"""Swaps the classes of a model's ends for those of the tied loss, and follows changes of the ends."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bowline.errors import UsageError
from bowline.functional.deferred.graph_breaks import in_one_graph, uncompiled
from bowline.functional.deferred.loss_record import LossRecord
from bowline.nn.modules.adapted_ends import SETTING, head_of, heads_in, state_of_end, trained_rows_in
from bowline.nn.modules.deferring_head import DeferringHead
from bowline.nn.modules.heads import LMHead
from bowline.nn.modules.trained_rows import TrainedRows
from bowline.nn.modules.uncompiled_lookup import UncompiledLookup
from bowline.nn.tree.class_swap import is_swapped, swapped_class

__all__ = ["Setting", "follow_from_now", "swapped_in"]


@dataclass(eq=False, slots=True)
class Setting:
    """How a model uses the tied loss; copied with the model."""

    backend: str
    record: LossRecord = field(default_factory=LossRecord)
    seen: tuple[Any, ...] = ()
    """What identified the ends when their classes were swapped last."""


class LooksAtItsHead:
    """A mixin before a model's class: each forward pass swaps the classes of ends that have changed since the last."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own: Any = super()
        forward: Any = own.forward

        @functools.wraps(forward)
        def looking(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                _follow(self)
            elif not in_one_graph():
                _follow_outside_the_graph(self)
            return forward(self, *args, **kwargs)

        cls.forward = looking  # type: ignore[attr-defined]


def follow_from_now(model: nn.Module, backend: str) -> Setting:
    """Swap the classes of the model's ends, and its own for one whose forward pass swaps them again after a change.

    Raises:
        UsageError: the head cannot use the tied loss.
    """
    setting = Setting(backend)
    _swap(model, setting, fresh=True)
    model.__dict__[SETTING] = setting
    model.__class__ = swapped_class(type(model), LooksAtItsHead, type(model))
    setting.seen = _seen(model)
    return setting


def _follow(model: nn.Module) -> None:
    """Swap the classes of ends that have changed: an adapter was added, or the head replaced."""
    setting: Setting | None = model.__dict__.get(SETTING)
    if setting is None or setting.seen == (now := _seen(model)):
        return
    try:
        _swap(model, setting)
    except UsageError as error:
        if isinstance(getattr(head_of(model), "weight", None), nn.Parameter):  # a quantised one does not learn
            setting.record.fall_back(f"a head that has changed: {error.message}")
    else:
        now = _seen(model)
    setting.seen = now


@uncompiled
def _follow_outside_the_graph(model: nn.Module) -> None:
    _follow(model)


def _seen(model: nn.Module) -> tuple[Any, ...]:
    ask = getattr(model, "get_input_embeddings", None)
    try:
        table = ask() if callable(ask) else None
    except (NotImplementedError, AttributeError):
        table = None
    return state_of_end(head_of(model)), state_of_end(table)


def swapped_in(model: nn.Module) -> Iterator[nn.Module]:
    """The modules whose class is one of those that this module makes."""
    ours = (DeferringHead, TrainedRows, UncompiledLookup, LooksAtItsHead)
    return (one for one in model.modules() if is_swapped(one) and isinstance(one, ours))


def _swap(model: nn.Module, setting: Setting, *, fresh: bool = False) -> None:
    for module, kind in _classes(model, setting.backend, fresh=fresh).items():
        module.__class__ = kind
    head = head_of(model)
    for part in () if head is None else (*(ends := heads_in(head)).heads, *ends.deltas):
        if isinstance(part, DeferringHead):  # also a copy of one, whose record is a copy
            part.loss_record = setting.record


def _classes(model: nn.Module, backend: str, *, fresh: bool) -> dict[nn.Module, type[nn.Module]]:
    """The class that each module of the ends gets; those that have theirs are left out, and refused if `fresh`."""
    head = head_of(model)
    ends = None if head is None else heads_in(head)
    if ends is None or not ends.heads or ends.unknown:
        raise _no_linear(model, ends.unknown[0] if ends is not None and ends.unknown else head)
    classes: dict[nn.Module, type[nn.Module]] = {}
    for part in (*ends.heads, *ends.deltas):
        if not isinstance(part, DeferringHead):
            _check_linear(model, part)
            classes[part] = swapped_class(type(part), DeferringHead, type(part), loss_backend=backend)
        elif fresh:
            raise UsageError(
                f"the head of {type(model).__name__} has use_tied_loss's forward already",
                help="remove() that one before, of a copy by bowline.nn.TiedLoss.of(model).remove()",
            )
    weights = [weight for one in ends.heads if (weight := one._parameters.get("weight")) is not None]
    layers = list(ends.trained_rows)
    for module in model.modules():
        if isinstance(module._modules.get("base_layer"), nn.Embedding):
            layers += trained_rows_in(module)
        if isinstance(module, nn.Embedding) and any(module._parameters.get("weight") is one for one in weights):
            classes |= _lookup_class(module)
    for layer in layers:
        if not isinstance(layer, TrainedRows):
            classes[layer] = swapped_class(type(layer), TrainedRows, type(layer))
    return classes


def _lookup_class(table: nn.Embedding) -> dict[nn.Module, type[nn.Module]]:
    """The class that replaces the forward of nn.Embedding by TiedEmbedding's, and nothing else."""
    kind = type(table)
    if isinstance(table, UncompiledLookup):
        return {}
    after = () if issubclass(UncompiledLookup, kind) else (kind,)
    return {table: swapped_class(kind, *after, UncompiledLookup)}


def _no_linear(model: nn.Module, head: nn.Module | None) -> UsageError:
    kind = type(head)
    named = "no head" if head is None else f"a head of class {kind.__module__}.{kind.__qualname__}"
    seen = named if callable(getattr(model, "get_output_embeddings", None)) else "no get_output_embeddings()"
    return UsageError(
        f"{type(model).__name__} has {seen}, expected a torch.nn.Linear with a floating-point weight, alone or in "
        "PEFT's LoRA, trainable_token_indices or modules_to_save",
        help="call bowline.linear_cross_entropy(hidden, weight, labels) where the loss is computed",
    )


def _check_linear(model: nn.Module, head: nn.Module) -> None:
    weight = getattr(head, "weight", None)
    if not isinstance(weight, nn.Parameter) or not weight.is_floating_point():
        raise _no_linear(model, head)
    if type(head).forward not in (nn.Linear.forward, LMHead.forward):
        raise UsageError(
            f"the head of {type(model).__name__} is a {type(head).__name__}, which has a forward of its own; "
            f"expected logits of nn.Linear",
            help="leave the model as it is; if they are hidden @ weight.T, call bowline.linear_cross_entropy",
        )
    if "forward" in head.__dict__:
        raise UsageError(
            f"the head of {type(model).__name__} has a forward of its own already", help="remove the other hook before"
        )
