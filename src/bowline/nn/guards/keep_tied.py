"""`keep_tied`: keeps ties through conversions, loads, swapped modules and quantisers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from bowline.errors import TieError
from bowline.nn.state.load_state import load_state
from bowline.nn.ties.conflict_policy import Conflict, check_policy, expect_equal_targets
from bowline.nn.ties.declared_ties import Ties, as_ties, declared_ties
from bowline.nn.ties.module_sizes import fit_sizes, tell_transformers
from bowline.nn.ties.shared_parameters import shared_ties
from bowline.nn.ties.tensor_comparison import difference, is_plain, state_of
from bowline.nn.ties.tying import check_bias
from bowline.nn.tree.slots import Slot, slot
from bowline.nn.tree.table_slots import TableSlot, tie_ends
from bowline.tie import Tie, TieState

__all__ = ["keep_tied"]

Model = TypeVar("Model", bound=nn.Module)


@contextmanager
def keep_tied(model: Model, ties: Ties | None = None, *, on_conflict: Conflict = "raise") -> Iterator[Model]:
    """Gives `model` the same ties on exit as on entry, whatever happens inside; raises if that is impossible.

    Inside, `model.to(...)`, `to_empty`, `.half()` and every other conversion of the whole model keep the ties, and
    `model.load_state_dict` is `bowline.nn.load_state`, so that `assign=True` keeps them too. On exit whatever else came
    between the ends is mended: ends that hold the same bits, or of which only some have values (the others are on
    meta), become one `Parameter` again, the one that was there on entry if it still is; also where a module was swapped
    for another. A quantised matrix serves both ends if the embedding can look up in it; a table that `quantize_tied`
    made serves the ends that it had on exit. `ties` are all that are shared
    or declared, unless they are given. `on_conflict` names the end that stays where the ends, or a state that is
    loaded, differ.

    Raises:
        TieError: on exit, the ends differ (`on_conflict` says which to keep), no longer fit each other, or one of them
            is gone; the message says what happened to each. Out of an exception, the ties are restored as far as they
            can be and the exception goes on.
        UsageError: an unknown policy.

    Example:
        >>> model = nn.ModuleDict({"wte": nn.Embedding(9, 4), "lm_head": nn.Linear(4, 9, bias=False)})
        >>> model["lm_head"].weight = model["wte"].weight
        >>> with keep_tied(model):
        ...     _ = model.to("meta").to_empty(device="cpu")
        >>> model["lm_head"].weight is model["wte"].weight
        True
    """
    check_policy(on_conflict)
    known = tie_ends(model)
    wanted = (*shared_ties(model, known), *declared_ties(model, known=known)) if ties is None else as_ties(ties)
    wanted = tuple({tie.target: tie for tie in wanted}.values())
    entry = [_Kept(tie, slot(model, tie.target, known), slot(model, tie.source, known)) for tie in wanted]
    apart = [kept.tie for kept in entry if not kept.holds]
    if apart:
        raise TieError(f"{apart[0]}: not tied, so it cannot be kept", help="call tie_weights(model) first")
    knots: dict[str, list[_Kept]] = {}
    for kept in entry:
        knots.setdefault(kept.tie.source, []).append(kept)
    parameters = {source: known[source].tensor for source in knots}
    with _aware(model, entry, on_conflict):
        try:
            yield model
        except BaseException as error:
            now = tie_ends(model)
            for source, knot in knots.items():
                try:
                    _restore(model, now, knot, parameters[source], "raise")
                except TieError as also:
                    error.add_note(f"a tie was broken too: {also}")
            raise
    now = tie_ends(model)
    for source, knot in knots.items():
        _restore(model, now, knot, parameters[source], on_conflict)
    tell_transformers(model)


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """A tie and the places of its ends on entry."""

    tie: Tie
    target: Slot
    source: Slot

    @property
    def holds(self) -> bool:
        """Whether both places hold one parameter, or read one table."""
        if isinstance(self.source, TableSlot) or isinstance(self.target, TableSlot):
            return self.source.tensor is self.target.tensor
        held = self.source.module._parameters.get(self.source.attribute)
        return held is not None and held is self.target.module._parameters.get(self.target.attribute)


@contextmanager
def _aware(model: nn.Module, entry: Sequence[_Kept], on_conflict: Conflict) -> Iterator[None]:
    """This one model's `_apply`, through which all conversions go, and `load_state_dict`, made aware of its ties.

    As bound methods, which a copy or a pickle of the model, made meanwhile, binds to itself.
    """
    convert: Callable[..., nn.Module] = model._apply

    def _apply(self: nn.Module, *arguments: Any, **options: Any) -> nn.Module:
        if self is not model:
            plain: Callable[..., nn.Module] = type(self)._apply
            return plain(self, *arguments, **options)
        together = [kept for kept in entry if kept.holds]  # ends that came apart before may hold two matrices
        converted = convert(*arguments, **options)
        for kept in together:
            _hang(kept)
        return converted

    def load_state_dict(
        self: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        if self is not model:
            loaded: _IncompatibleKeys = type(self).load_state_dict(self, state_dict, strict, assign)
            return loaded
        mine = model.__dict__.pop("load_state_dict")  # load_state calls torch's
        try:
            report = load_state(model, state_dict, assign=assign, strict=strict, on_conflict=on_conflict)
        finally:
            model.__dict__["load_state_dict"] = mine
        return _IncompatibleKeys(list(report.missing), list(report.unexpected))

    aware = {method.__name__: MethodType(method, model) for method in (_apply, load_state_dict)}
    shadowed: dict[str, Any] = {name: model.__dict__[name] for name in aware if name in model.__dict__}
    model.__dict__.update(aware)
    try:
        yield
    finally:
        for name in aware:
            del model.__dict__[name]
        model.__dict__.update(shadowed)


def _hang(kept: _Kept) -> None:
    """After a conversion of the whole model: both ends were converted alike, so the source's result serves."""
    if isinstance(kept.source, TableSlot):
        return  # a table is one module, which stays one
    converted = kept.source.module._parameters.get(kept.source.attribute)
    if converted is not None and kept.target.module._parameters.get(kept.target.attribute) is not None:
        kept.target.put(converted)


def _restore(
    model: nn.Module, known: dict[str, Slot], knot: Sequence[_Kept], before: torch.Tensor, on_conflict: Conflict
) -> None:
    """Make all ends of one source's ties one `Parameter` again: `before`, if an end that stays still holds it."""
    for kept in knot:
        for end in (kept.target, kept.source):
            try:
                slot(model, end.name, known)
            except TieError as error:
                seen = _replaced(model, end) or error.message
                raise TieError(f"{kept.tie}: broken inside keep_tied: {seen}", help=error.help) from None
    source = known[knot[0].tie.source]
    targets = [known[kept.tie.target] for kept in knot]
    if any(isinstance(end, TableSlot) for end in (source, *targets)):
        _share_table(knot, source, targets, on_conflict)
        return
    for kept, target in zip(knot, targets, strict=True):
        if target.tensor is not source.tensor and not (is_plain(target.tensor) and is_plain(source.tensor)):
            _share_converted(kept, target, source)
    if all(target.tensor is source.tensor for target in targets):
        return
    winner = _winner(knot, source, targets, before, on_conflict)
    for kept, target in zip(knot, targets, strict=True):
        if not (isinstance(winner, nn.Parameter) and source.is_parameter and target.is_parameter):
            raise TieError(
                f"{kept.tie}: broken inside keep_tied: {_story(kept, target, source)}",
                help="keep both ends parameters, or call untie_weights(model) before keep_tied",
            )
        check_bias(target, winner)
    for end in (source, *targets):
        end.put(winner)  # type: ignore[arg-type]
        fit_sizes(end)


def _share_table(knot: Sequence[_Kept], source: Slot, targets: Sequence[Slot], on_conflict: Conflict) -> None:
    """Have all ends read one quantised table again: the source's, or, if the policy says so, a target's."""
    winner = source
    for kept, target in zip(knot, targets, strict=True):
        if not (isinstance(source, TableSlot) and isinstance(target, TableSlot)):
            raise TieError(
                f"{kept.tie}: broken inside keep_tied: {_story(kept, target, source)}",
                help="quantize_tied(model) makes one table for both ends; to keep both, call untie_weights(model) "
                "before keep_tied",
            )
        if target.tensor is source.tensor:
            continue
        one, other = target.end.weight, source.end.weight
        if state_of(one, other) is TieState.EQUAL:
            continue
        if on_conflict == "raise" or one.shape != other.shape:
            raise TieError(
                f"{kept.tie}: broken inside keep_tied, and cannot be restored: {_story(kept, target, source)}; "
                f"{difference(one, other) if one.shape == other.shape else _unlike(target, source)}",
                help='on_conflict="source" or "target" says which table to keep; to keep both, call '
                "untie_weights(model) before keep_tied",
            )
        winner = target if on_conflict == "target" else winner
    assert isinstance(winner, TableSlot)
    table = winner.end.table
    for end in (source, *targets):
        if isinstance(end, TableSlot) and end.end.table is not table:
            end.end.read(table)


def _winner(
    knot: Sequence[_Kept], source: Slot, targets: Sequence[Slot], before: torch.Tensor, on_conflict: Conflict
) -> torch.Tensor:
    """The tensor that stays: the source's, unless the policy or missing values decide otherwise."""
    owner = next((end for end in (source, *targets) if not end.tensor.is_meta), source)
    differing: list[Slot] = []
    alike = [owner]
    for kept, target, end in zip((knot[0], *knot), (targets[0], *targets), (source, *targets), strict=True):
        if end.tensor.is_meta and not owner.tensor.is_meta and end.tensor.shape == owner.tensor.shape:
            continue
        state = state_of(end.tensor, owner.tensor)
        if state in (TieState.SHARED, TieState.EQUAL, TieState.ALIAS):
            alike.append(end)
            continue
        if state is not TieState.DIVERGED:
            raise TieError(
                f"{kept.tie}: broken inside keep_tied: {_story(kept, target, source)}; {_unlike(end, owner)}",
                help="resize_vocab resizes both ends at once; to keep both, call untie_weights(model) before keep_tied",
            )
        if on_conflict == "raise":
            raise TieError(
                f"{kept.tie}: broken inside keep_tied, and cannot be restored: {_story(kept, target, source)}; "
                f"{difference(end.tensor, owner.tensor)}",
                help='on_conflict="source" or "target" says which end to keep; to keep both, call untie_weights(model) '
                "before keep_tied",
            )
        differing.append(end)
    if on_conflict == "target" and differing:
        expect_equal_targets(
            source.name,
            [(end.name, end.tensor) for end in differing],
            help='on_conflict="source" keeps the embedding; to keep all, call untie_weights(model) before keep_tied',
        )
        alike = differing
    return next((end.tensor for end in alike if end.tensor is before), alike[0].tensor)


def _share_converted(kept: _Kept, target: Slot, source: Slot) -> None:
    """If only one end was converted, such as quantised, by a tool for one kind of module, use it for both ends."""
    done, left = (target, source) if not is_plain(target.tensor) else (source, target)
    before = left.tensor
    if isinstance(done.tensor, nn.Parameter) and isinstance(before, nn.Parameter) and done.tensor.shape == before.shape:
        left.put(done.tensor)
        if _works(left):
            return
        left.put(before)
    raise TieError(
        f"{kept.tie}: broken inside keep_tied: {_story(kept, target, source)}, which "
        f"{type(left.module).__name__} cannot compute with",
        help="quantize_tied(model) quantises the matrix once for both ends; or call untie_weights(model) before "
        "keep_tied",
    )


def _works(end: Slot) -> bool:
    """Whether the module still computes with the parameter that was put there."""
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
    """Describes in words what happened to each end since entry."""
    events = [_event(before, now) for before, now in ((kept.target, target), (kept.source, source))]
    return ", ".join(event for event in events if event) or "one end was assigned another parameter"


def _event(before: Slot, now: Slot) -> str:
    if now.module is not before.module:
        return _replacement(before, now.module)
    if not now.is_parameter:
        return f"{now.name} became a buffer"
    if not is_plain(now.tensor):
        return f"{now.name} became a {type(now.tensor).__name__}"
    return ""


def _replaced(model: nn.Module, before: Slot) -> str:
    """Says that the module was replaced by one without such a parameter; empty if it is the same or gone."""
    try:
        module = model.get_submodule(before.name.removesuffix("." + before.attribute))
    except AttributeError:
        return ""
    return "" if module is before.module else _replacement(before, module)


def _replacement(before: Slot, module: nn.Module) -> str:
    replaced = f"the module of {before.name} was replaced"
    old, new = type(before.module), type(module)
    if old is new:
        return f"{replaced} by another {new.__name__}"
    if old.__name__ != new.__name__:
        return f"{replaced} (was {old.__name__}, is now {new.__name__})"
    return f"{replaced} (was {old.__module__}.{old.__qualname__}, is now {new.__module__}.{new.__qualname__})"
