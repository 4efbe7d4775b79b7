"""`load_state`: loads a state dict into a model with ties; checks it first, and keeps the ties."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from bowline.errors import CheckpointError, TieError, UsageError
from bowline.functional.row_shard import is_dtensor
from bowline.nn.config.head_scaling import follows_flag, head_scale
from bowline.nn.state.load_inventory import LoadInventory, survey
from bowline.nn.state.tie_conflicts import Resolution, resolve_ties
from bowline.nn.state.trial_load import rehearse
from bowline.nn.ties.conflict_policy import ConflictOrUntie
from bowline.nn.ties.declared_ties import declared_ties
from bowline.nn.ties.module_sizes import fit_sizes, tell_transformers
from bowline.nn.ties.tensor_comparison import is_plain
from bowline.nn.ties.untying import separate
from bowline.nn.tree.sharding import spread_like
from bowline.nn.tree.slots import Slot, expect_module, slots
from bowline.nn.tree.storages import knots, overlapping
from bowline.tie import Tie
from bowline.wording import listed

__all__ = ["LoadReport", "load_into", "load_state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The result of a load: names missing from the state, names unknown to the model, ties kept and undone.

    Truthy if no name is missing or unexpected.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    tied: tuple[Tie, ...]
    untied: tuple[Tie, ...]

    def __bool__(self) -> bool:
        return not self.missing and not self.unexpected

    def __str__(self) -> str:
        parts = [
            f"{len(self.tied)} tie{'s' * (len(self.tied) != 1)}",
            f"{len(self.untied)} undone" if self.untied else "",
        ]
        parts += [f"missing {listed(self.missing, 4)}" if self.missing else ""]
        parts += [f"unexpected {listed(self.unexpected, 4)}" if self.unexpected else ""]
        return "; ".join(part for part in parts if part)


def load_state(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    *,
    assign: bool = False,
    on_conflict: ConflictOrUntie = "raise",
    strict: bool = True,
) -> LoadReport:
    """`model.load_state_dict` for models with ties: ties stay, and no end is overwritten by the other.

    Of a model that is sharded (DTensors), each process takes its own part of a whole tensor.

    A state that holds one end of a tie loads it for both. A state that holds both must hold the same bits, or say by
    `on_conflict` which to keep: `"source"`, `"target"`, or `"untie"`, which keeps both and clears the flag. `assign`
    takes the given tensors' memory (what a model on meta needs) without making new `Parameter`s, so optimizers stay
    right; it leaves no trace in the state dict. Hooks and custom loading of modules run as in torch.

    Raises:
        TieError: the ends of a tie differ, or an untied head is missing while its embedding is there.
        CheckpointError: with `strict`, names that are missing or unexpected; always, shapes that differ. The model is
            as it was.

    Example:
        >>> model = nn.ModuleDict({"wte": nn.Embedding(3, 2), "lm_head": nn.Linear(2, 3, bias=False)})
        >>> model["lm_head"].weight = model["wte"].weight
        >>> print(load_state(model, {"wte.weight": torch.ones(3, 2)}, assign=True))
        1 tie
        >>> model["lm_head"].weight is model["wte"].weight
        True
    """
    expect_module(model)
    return load_into(
        model, survey(model), state_dict, assign=lambda name: assign, on_conflict=on_conflict, strict=strict
    )


def load_into(
    model: nn.Module,
    seen: LoadInventory,
    state: Mapping[str, Any],
    *,
    assign: Callable[[str], bool],
    on_conflict: ConflictOrUntie,
    strict: bool,
    optional: Callable[[str], bool] = lambda name: False,
    unscaled: bool = False,
    disjoint: bool = False,
) -> LoadReport:
    """`load_state`, with a choice for each name whether to take the memory (`assign`) or copy the values.

    `seen` is `survey(model)`. `optional` names may be lacking on either side. `unscaled`: the state is known
    to come from a model that does not scale its head's input. `disjoint`: no two tensors of it share memory.
    """
    tensors = _tensors(state, seen)
    resolution = resolve_ties(model, seen.slots, tensors, on_conflict)
    single, expected = _one_name_each(seen, state, resolution)
    if not seen.plain:
        single = _spread(single, seen.tensors)
    rehearsed = rehearse(model, seen.tensors.values(), _clean(single, state)) if seen.own_rules else None
    lacking, needless = rehearsed or (expected, [name for name in single if name not in expected])
    missing = tuple(name for name in lacking if name in expected and name not in single and not optional(name))
    unexpected = tuple(name for name in needless if not optional(name))
    _check_fit(seen, single, assign)
    if strict and (missing or unexpected):
        _refuse(model, tensors, missing, unexpected)
    if follows_flag(model) and head_scale(model) != 1.0 and not unscaled:
        _check_scale(model, seen, resolution)
    known = seen.slots
    if resolution.apart:
        separate(model, tuple(tie for tie in resolution.apart if _is_tied(tie, known)))
        known = slots(model)
    pairs = [(name, source) for source, names in resolution.names.items() for name in names]
    new = any(known[name].tensor is not known[source].tensor for name, source in pairs)
    copied: dict[str, Any] = {}
    taken: dict[str, Any] = {}
    for name, value in single.items():
        (taken if assign(name) else copied)[name] = value
    if not disjoint:
        taken = _apart(taken)
    if seen.own_rules or not seen.plain:
        with _same_parameters(known), _without_swaps():
            for part, taking in ((copied, False), (taken, True)):
                if part:
                    model.load_state_dict(_clean(part, state), strict=False, assign=taking)
    else:
        _put(known, {name: value for name, value in copied.items() if name in expected}, taking=False)
        _put(known, {name: value for name, value in taken.items() if name in expected}, taking=True)
    tied = _share(known, resolution)
    if new:
        tell_transformers(model)
    return LoadReport(missing=missing, unexpected=unexpected, tied=tied, untied=resolution.apart)


def _tensors(state: Mapping[str, Any], seen: LoadInventory) -> dict[str, torch.Tensor]:
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise UsageError(
            f"state_dict is a {type(state).__name__}, expected a mapping of names to tensors",
            help="load_checkpoint(model, path) reads files",
            argument="state_dict",
        )
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    for name in state.keys() & seen.slots.keys() - tensors.keys():
        raise CheckpointError(
            f"{name}: the state holds a {type(state[name]).__name__}, expected a tensor",
            help="convert an array with torch.as_tensor",
        )
    return tensors


def _one_name_each(
    seen: LoadInventory, state: Mapping[str, Any], resolution: Resolution
) -> tuple[dict[str, Any], dict[str, None]]:
    """The state with each shared matrix under its source's name alone, and the names of a complete state."""
    spoken_for = {name for names in resolution.names.values() for name in names}
    single = {name: value for name, value in state.items() if name not in spoken_for}
    single.update(resolution.values)
    borrowed = spoken_for - set(resolution.values)
    return single, {name: None for name in seen.state if name not in borrowed}


def _spread(single: Mapping[str, Any], held: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The state with this process's part of each whole tensor that the model holds as a DTensor."""
    return {
        name: spread_like(value, held[name])
        if name in held and is_dtensor(held[name]) and _is_whole(value) and value.shape == held[name].shape
        else value
        for name, value in single.items()
    }


def _is_whole(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_plain(value) and not value.is_meta


def _check_fit(seen: LoadInventory, single: Mapping[str, Any], assign: Callable[[str], bool]) -> None:
    """The problems that would make torch raise half-way or load nothing, tensor by tensor, found before any change."""
    misfits, empty = [], []
    for name, value in single.items():
        held = seen.tensors.get(name)
        if held is None or not isinstance(value, torch.Tensor) or (not seen.plain and is_lazy(held)):
            continue
        if value.shape != held.shape:
            misfits.append(f"{name} is {tuple(value.shape)}, the model's is {tuple(held.shape)}")
        elif is_plain(value) is not (seen.plain or is_plain(held)):
            raise CheckpointError(
                f"{name}: the model holds {_kind(held)} and the state {_kind(value)}, expected both plain or neither",
                help="load before sharding or quantising; or torch.distributed.checkpoint.state_dict loads into shards",
            )
        elif held.is_meta and not assign(name):
            empty.append(name)
    if misfits:
        raise CheckpointError(
            f"{len(misfits)} {'tensor does' if len(misfits) == 1 else 'tensors do'} not fit: {listed(misfits, 3)}",
            help="build the model from the checkpoint's config, or resize_vocab(model, ...) first",
        )
    if empty:
        raise CheckpointError(
            f"{listed(empty, 4)}: on meta in the model, so values cannot be copied into it",
            help="load with assign=True",
        )


def _refuse(
    model: nn.Module, given: Mapping[str, torch.Tensor], missing: tuple[str, ...], unexpected: tuple[str, ...]
) -> NoReturn:
    for tie in declared_ties(model, flag=True) if missing else ():
        if tie.target in missing and tie.source in given:
            raise TieError(
                f"{tie.target}: not in the state, which holds {tie.source}; the model is untied, so its head would "
                "keep its present values",
                help="if they are one matrix, call tie_weights(model, on_conflict='source') first; strict=False keeps "
                "the present head",
            )
    seen = [
        f"missing {listed(missing, 4)}" if missing else "",
        f"unexpected {listed(unexpected, 4)}" if unexpected else "",
    ]
    raise CheckpointError(
        f"the state does not fit the model: {'; '.join(part for part in seen if part)}",
        help="strict=False loads what fits and reports the rest",
    )


def _check_scale(model: nn.Module, seen: LoadInventory, resolution: Resolution) -> None:
    for tie in resolution.apart:
        if not isinstance(seen.slots[tie.target].module, nn.Embedding):
            raise TieError(
                f"{tie}: the state has two matrices, so the flag would be cleared; {type(model).__name__} scales its "
                "head's input by the same flag, so the head would compute other logits",
                help='on_conflict="source" or "target" keeps one; or build the model untied, if the state is unscaled',
            )


def _put(known: Mapping[str, Slot], part: Mapping[str, torch.Tensor], *, taking: bool) -> None:
    """Does the work of `load_state_dict` for modules without custom loading, without its walk over all modules."""
    with torch.no_grad():
        for name, value in part.items():
            slot = known[name]
            held = slot.tensor
            if not taking:
                held.copy_(value)
            elif not slot.is_parameter:
                slot.module._buffers[slot.attribute] = value
            else:
                kept = _take(held, value) if isinstance(held, nn.Parameter) else value
                if kept is not held:
                    slot.put(nn.Parameter(kept, held.requires_grad))


def _apart(part: Mapping[str, Any]) -> dict[str, Any]:
    """Gives memory shared by several names (a pickle of a tied model) to the first, so that no alias arises."""
    tensors = [(name, value) for name, value in part.items() if isinstance(value, torch.Tensor)]
    again = {name for _, *others in knots(overlapping(tensors)) for name in others}
    return {name: value.clone() if name in again else value for name, value in part.items()}


def _clean(part: Mapping[str, Any], state: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """A copy that torch may write into: it keeps the version metadata, but not a left-over `assign`."""
    clean = OrderedDict(part)
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        clean._metadata = OrderedDict(  # type: ignore[attr-defined]
            (prefix, {key: value for key, value in entry.items() if key != "assign_to_params_buffers"})
            for prefix, entry in metadata.items()
        )
    return clean


@contextmanager
def _without_swaps() -> Iterator[None]:
    """Disables torch's own way to keep parameters, which fails half-way if a graph is alive."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


class _same_parameters:  # noqa: N801 - reads as what it does
    """After an assignment, moves each new `Parameter`'s memory to the old object, so that optimizers and ties stay."""

    def __init__(self, known: Mapping[str, Slot]) -> None:
        self._before = [(slot, slot.tensor) for slot in known.values() if slot.is_parameter]

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        taken: dict[int, torch.Tensor] = {}
        for slot, old in self._before:
            new = slot.tensor
            if new is old or not isinstance(old, nn.Parameter):
                continue
            if id(old) not in taken:
                taken[id(old)] = _take(old, new)
            slot.put(taken[id(old)])  # type: ignore[arg-type]


def _take(old: nn.Parameter, new: torch.Tensor) -> torch.Tensor:
    """`old` with the memory of `new`, or `new` itself if torch cannot do that (from meta to a device)."""
    if (old.is_meta and not new.is_meta) or not torch._has_compatible_shallow_copy_type(old, new):
        return new
    if not is_plain(old):  # shards and quantised tensors have parts that `.data` does not replace
        with torch.no_grad():
            old.copy_(new)
        return old
    if old.grad is not None and (old.dtype, old.shape) != (new.dtype, new.shape):
        old.grad = None
    old.data = new.data
    return old


def _share(known: Mapping[str, Slot], resolution: Resolution) -> tuple[Tie, ...]:
    """Puts each source at the other names of its ties."""
    tied = []
    for source, names in resolution.names.items():
        owner = known[source].tensor
        for name in names:
            if name != source:
                if known[name].tensor is not owner and isinstance(owner, nn.Parameter):
                    known[name].put(owner)
                    fit_sizes(known[name])
                tied.append(Tie(name, source))
    return tuple(tied)


def _is_tied(tie: Tie, known: Mapping[str, Slot]) -> bool:
    return known[tie.target].tensor is known[tie.source].tensor


def _kind(tensor: torch.Tensor) -> str:
    return f"a plain {tensor.dtype} tensor" if is_plain(tensor) else f"a {type(tensor.detach()).__name__}"
