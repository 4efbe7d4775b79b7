"""Ties kept through what people do to models: conversions, loads, swapped modules, quantisers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from bowline.errors import TieError
from bowline.nn.slots import Slot, slot, slots
from bowline.nn.state.load import load_state
from bowline.nn.ties.compare import difference, is_plain, state_of
from bowline.nn.ties.declared import Ties, as_ties
from bowline.nn.ties.find import find_ties
from bowline.nn.ties.told import fit_sizes, tell_transformers
from bowline.nn.ties.tying import Conflict
from bowline.tie import Tie, TieState

__all__ = ["keep_tied"]

Model = TypeVar("Model", bound=nn.Module)
NAMES = ("_apply", "load_state_dict")


@contextmanager
def keep_tied(model: Model, ties: Ties | None = None, *, on_conflict: Conflict = "raise") -> Iterator[Model]:
    """The ties that `model` has on entry, it has on exit, whatever is done to it inside; or an error says why not.

    Inside, `model.to(...)`, `to_empty`, `.half()` and every other conversion of the whole model keep the ties, and
    `model.load_state_dict` is `bowline.nn.load_state`, so that `assign=True` keeps them too. On exit whatever else came
    between the two ends is mended: ends that hold the same bits, or of which only one has values (the other is on
    meta), become one `Parameter` again, also where a module was swapped for another; a quantised matrix serves both
    ends if the embedding can look up in it. `ties` are all that `find_ties` finds, unless they are given.

    Raises:
        TieError: on exit, the ends differ (`on_conflict` says which to keep), no longer fit each other, or one of them
            is gone; the message says what happened to each. Out of an exception, the ties are restored as far as they
            can be and the exception goes on.

    Example:
        >>> model = nn.ModuleDict({"wte": nn.Embedding(9, 4), "lm_head": nn.Linear(4, 9, bias=False)})
        >>> model["lm_head"].weight = model["wte"].weight
        >>> with keep_tied(model):
        ...     _ = model.to("meta").to_empty(device="cpu")
        >>> model["lm_head"].weight is model["wte"].weight
        True
    """
    known = slots(model)
    wanted = find_ties(model).ties if ties is None else as_ties(ties)
    entry = [_Kept(tie, slot(model, tie.target, known), slot(model, tie.source, known)) for tie in wanted]
    apart = [kept.tie for kept in entry if kept.target.tensor is not kept.source.tensor]
    if apart:
        raise TieError(f"{apart[0]}: not tied, so it cannot be kept", help="tie_weights(model) first")
    with _aware(model, entry):
        try:
            yield model
        except BaseException as error:
            for kept in entry:
                try:
                    _restore(model, kept, "raise")
                except TieError as also:
                    error.add_note(f"and a tie was broken: {also}")
            raise
    for kept in entry:
        _restore(model, kept, on_conflict)
    tell_transformers(model)


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """A tie and the places of its ends on entry."""

    tie: Tie
    target: Slot
    source: Slot


@contextmanager
def _aware(model: nn.Module, entry: list[_Kept]) -> Iterator[None]:
    """This one model's `_apply`, through which all conversions go, and `load_state_dict`, made aware of its ties."""
    shadowed: dict[str, Any] = {name: model.__dict__[name] for name in NAMES if name in model.__dict__}
    convert: Callable[..., nn.Module] = model._apply

    def apply(*arguments: Any, **options: Any) -> nn.Module:
        converted = convert(*arguments, **options)
        for kept in entry:
            _hang(kept)
        return converted

    def load(state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> _IncompatibleKeys:
        del model.__dict__["load_state_dict"]  # load_state calls torch's
        try:
            report = load_state(model, state_dict, assign=assign, strict=strict)
        finally:
            model.__dict__["load_state_dict"] = load
        return _IncompatibleKeys(list(report.missing), list(report.unexpected))

    model.__dict__.update(zip(NAMES, (apply, load), strict=True))
    try:
        yield
    finally:
        for name in NAMES:
            del model.__dict__[name]
        model.__dict__.update(shadowed)


def _hang(kept: _Kept) -> None:
    """After a conversion of the whole model: both ends were converted alike, so the source's result serves."""
    converted = kept.source.module._parameters.get(kept.source.attribute)
    if converted is not None and kept.target.module._parameters.get(kept.target.attribute) is not None:
        kept.target.put(converted)


def _restore(model: nn.Module, kept: _Kept, on_conflict: Conflict) -> None:
    known = slots(model)
    try:
        target, source = slot(model, kept.tie.target, known), slot(model, kept.tie.source, known)
    except TieError as error:
        raise TieError(f"{kept.tie}: broken while it was kept: {error.message}", help=error.help) from None
    if target.tensor is source.tensor:
        return
    if not is_plain(target.tensor) or not is_plain(source.tensor):
        _share_converted(kept, target, source)
        return
    winner = _winner(kept, target, source, on_conflict)
    loser = source if winner is target else target
    if not isinstance(winner.tensor, nn.Parameter) or not loser.is_parameter:
        raise TieError(
            f"{kept.tie}: broken while it was kept: {_story(kept, target, source)}",
            help="keep both ends parameters, or untie_weights(model) before",
        )
    loser.put(winner.tensor)
    fit_sizes(loser)


def _winner(kept: _Kept, target: Slot, source: Slot, on_conflict: Conflict) -> Slot:
    """The end whose values stay."""
    if target.tensor.is_meta is not source.tensor.is_meta and target.tensor.shape == source.tensor.shape:
        return target if source.tensor.is_meta else source
    state = state_of(target.tensor, source.tensor)
    if state in (TieState.EQUAL, TieState.ALIAS):
        return source
    if state is TieState.DIVERGED and on_conflict != "raise":
        return source if on_conflict == "source" else target
    how = str(difference(target.tensor, source.tensor)) if state is TieState.DIVERGED else _unlike(target, source)
    raise TieError(
        f"{kept.tie}: broken while it was kept, and cannot be mended: {_story(kept, target, source)}; {how}",
        help='on_conflict="source" or "target" says which end to keep; untie_weights(model) before keeps both',
    )


def _share_converted(kept: _Kept, target: Slot, source: Slot) -> None:
    """One end was converted (quantised, say) by something that knows one kind of module: let it serve both."""
    done, left = (target, source) if not is_plain(target.tensor) else (source, target)
    before = left.tensor
    if isinstance(done.tensor, nn.Parameter) and isinstance(before, nn.Parameter) and done.tensor.shape == before.shape:
        left.put(done.tensor)
        if _works(left):
            return
        left.put(before)
    raise TieError(
        f"{kept.tie}: broken while it was kept: {_story(kept, target, source)}, which "
        f"{type(left.module).__name__} cannot use",
        help="quantize_tied(model) quantises the matrix once for both ends; or untie_weights(model) before",
    )


def _works(end: Slot) -> bool:
    """Whether the module still computes with what was hung there."""
    width = end.tensor.shape[-1]
    try:
        with torch.no_grad():
            if isinstance(end.module, nn.Embedding):
                found = end.module(torch.zeros(1, dtype=torch.long, device=end.tensor.device))
            else:
                found = end.module(torch.zeros(1, width, dtype=end.tensor.dtype, device=end.tensor.device))
    except (RuntimeError, NotImplementedError, TypeError, AttributeError):
        return False
    return bool(torch.isfinite(found).all())


def _unlike(target: Slot, source: Slot) -> str:
    a, b = target.tensor, source.tensor
    for what, seen, other in (("shape", tuple(a.shape), tuple(b.shape)), ("dtype", a.dtype, b.dtype)):
        if seen != other:
            return f"{target.name} has {what} {seen}, {source.name} has {other}"
    return f"{target.name} is on {a.device}, {source.name} on {b.device}"


def _story(kept: _Kept, target: Slot, source: Slot) -> str:
    """What happened to each end since entry, in words."""
    events = [_event(before, now) for before, now in ((kept.target, target), (kept.source, source))]
    return ", ".join(event for event in events if event) or "one end was assigned another parameter"


def _event(before: Slot, now: Slot) -> str:
    if now.module is not before.module:
        kinds = f"{type(before.module).__name__}, now {type(now.module).__name__}"
        return f"the module of {now.name} was replaced ({kinds})"
    if not now.is_parameter:
        return f"{now.name} became a buffer"
    if not is_plain(now.tensor):
        return f"{now.name} became a {type(now.tensor).__name__}"
    return ""
