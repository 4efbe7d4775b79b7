"""Makes ties: one `Parameter` at both ends, or an error that leaves the model unchanged."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from bowline.errors import TieError
from bowline.nn.config.head_scaling import follows_flag, idle_scale, set_scaling, undo_scaling
from bowline.nn.config.live_config import restore, set_flag
from bowline.nn.ties import optimizer_groups
from bowline.nn.ties.conflict_policy import Conflict, check_policy, expect_equal_targets
from bowline.nn.ties.declared_ties import Ties, as_ties, declared_ties
from bowline.nn.ties.ends import holds, makes_logits, there
from bowline.nn.ties.module_sizes import fit_sizes, tell_transformers
from bowline.nn.ties.tensor_comparison import difference, is_plain, kind_of, same_bits, state_of
from bowline.nn.ties.tie_check import check_ties
from bowline.nn.ties.tie_report import TieReport
from bowline.nn.tree.slots import Slot, slot, slots
from bowline.nn.tree.table_slots import table_slots
from bowline.nn.tree.wrappers import refuse_wrapped
from bowline.tie import Tie, TieState

__all__ = ["Knot", "check_bias", "hang", "knots_of", "tie_weights"]


@dataclass(frozen=True, slots=True)
class Knot:
    """The slots that will hold one `Parameter`: the source first, then its targets."""

    source: Slot
    targets: tuple[tuple[Tie, Slot], ...]


def tie_weights(
    model: nn.Module, ties: Ties | None = None, *, on_conflict: Conflict = "raise", optimizer: Optimizer | None = None
) -> TieReport:
    """Make each tie's target the source's `Parameter`: after it, `target is source`.

    `ties` are those that the model's classes declare (whatever the flag says now), unless they are given. Two ends that
    hold the same bits become one. Two that differ are a conflict: the default refuses, because one of two trained
    matrices would be lost; `on_conflict` names the end whose values stay. `out_features` and `num_embeddings` follow,
    `tie_word_embeddings` becomes true where it decides, and `optimizer` keeps one entry for the shared parameter, with
    the state and the group of the end that stays. Configs are changed in place, also for another model that shares
    them. What `untie_weights` made of a T5 is tied again with its scale.

    Raises:
        TieError: an unknown name, a buffer, a quantised or parametrized tensor, ends that differ in shape, dtype or
            device (so also one end on meta), a bias that would not fit, a cycle, two sources for one target, or a
            conflict. The model is as it was.

    Example:
        >>> model = nn.ModuleDict({"wte": nn.Embedding(9, 4), "lm_head": nn.Linear(4, 9, bias=False)})
        >>> report = tie_weights(model, [("lm_head.weight", "wte.weight")], on_conflict="source")
        >>> model["lm_head"].weight is model["wte"].weight
        True
    """
    check_policy(on_conflict)
    refuse_wrapped(model)
    if optimizer is not None:
        optimizer_groups.expect(optimizer)
    wanted = declared_ties(model, flag=True) if ties is None else as_ties(ties)
    if not wanted:
        seen = f"{type(model).__name__} declares no ties" if ties is None else "no ties were given"
        raise TieError(seen, help="name the ties: tie_weights(model, [(target, source)])")
    ends = table_slots(model)
    if ends and all(there(tie, ends) and holds(tie, ends) for tie in wanted):
        return check_ties(model, wanted, optimizer=optimizer)  # tied by a quantised table
    known = slots(model)
    grouped = knots_of(model, wanted, known)
    scale = _scale_to_come(model, grouped)
    winners = [(knot, _winner(knot, on_conflict, scale)) for knot in grouped]
    for knot, winner in winners:
        for end in (knot.source, *(target for _, target in knot.targets)):
            check_bias(end, winner)
    with ExitStack() as undo:
        replaced = [(loser, winner) for knot, winner in winners for loser in hang(known, knot, winner, undo)]
        if _governed(model, wanted):
            undo.callback(restore, set_flag(model, True))
        if scale != 1.0:
            undo.callback(undo_scaling, set_scaling(model, True))
        undo.pop_all()
    if optimizer is not None:
        for loser, winner in replaced:
            optimizer_groups.replace(optimizer, loser, winner)
    tell_transformers(model)
    return check_ties(model, wanted, optimizer=optimizer)


def knots_of(model: nn.Module, ties: tuple[Tie, ...], known: dict[str, Slot]) -> list[Knot]:
    """The ties by their source, every name looked up and found to be a parameter that can be tied."""
    for tie in ties:
        _check_pair(tie, slot(model, tie.target, known), slot(model, tie.source, known))
    # Names that are already one parameter count as one end; otherwise two ties could demand different values of it.
    first = {id(end.tensor): name for name, end in reversed(known.items())}
    ends = [(first[id(known[tie.target].tensor)], first[id(known[tie.source].tensor)]) for tie in ties]
    roots = {tie.target: tie.source for tie in as_ties([(one, other) for one, other in ends if one != other])}
    grouped: dict[str, list[tuple[Tie, Slot]]] = {}
    names: dict[str, str] = {}
    for tie, (_, source) in zip(ties, ends, strict=True):
        owner = roots.get(source, source)
        names.setdefault(owner, tie.source if owner == source else owner)
        grouped.setdefault(owner, []).append((tie, known[tie.target]))
    return [Knot(known[names[owner]], tuple(targets)) for owner, targets in grouped.items()]


def hang(known: dict[str, Slot], knot: Knot, winner: nn.Parameter, undo: ExitStack) -> list[torch.Tensor]:
    """Put `winner` in every slot of the knot and of the parameters that it replaces; returns those."""
    losers = {id(end.tensor): end.tensor for end in (knot.source, *(target for _, target in knot.targets))}
    losers.pop(id(winner), None)
    ends = [end for end in known.values() if id(end.tensor) in losers and end.is_parameter] if losers else []
    for end in ends:
        undo.callback(end.put, end.tensor)  # type: ignore[arg-type]
        end.put(winner)
    for end in (knot.source, *(target for _, target in knot.targets)):
        undo.callback(fit_sizes(end))
    return list(losers.values())


def _check_pair(tie: Tie, target: Slot, source: Slot) -> None:
    for end in (target, source):
        if not end.is_parameter:
            raise TieError(
                f"{tie}: {end.name} is a buffer, expected a parameter", help="register it as a torch.nn.Parameter"
            )
        if not isinstance(end.tensor, nn.Parameter):
            raise TieError(
                f"{tie}: {end.name} is a TorchScript parameter, expected a torch.nn.Parameter",
                help="tie the module before it is traced, scripted or saved",
            )
        if not is_plain(end.tensor):
            raise TieError(
                f"{tie}: {end.name} is {kind_of(end.tensor)}, expected a plain dense parameter",
                help="tie before quantising or sharding, or dequantise first",
            )
    a, b = target.tensor, source.tensor
    for what, seen, other in (
        ("shape", tuple(a.shape), tuple(b.shape)),
        ("dtype", str(a.dtype), str(b.dtype)),
        ("device", str(a.device), str(b.device)),
    ):
        if seen != other:
            raise TieError(
                f"{tie}: {target.name} has {what} {seen}, {source.name} has {other}; one matrix has one {what}",
                help=_way_out(what, a, b),
            )


def _way_out(what: str, a: torch.Tensor, b: torch.Tensor) -> str:
    if what == "shape":
        if a.ndim == 2 and tuple(a.shape) == tuple(b.shape)[::-1]:
            return (
                "one is the other's transpose, and one parameter cannot be both: store the head as (vocabulary, width)"
            )
        return "resize_vocab gives both ends one size; or leave them untied"
    if what == "dtype":
        return "convert both ends to one dtype with .to(dtype) first"
    return "load or move the end on meta first" if a.is_meta or b.is_meta else "move both ends to one device first"


def _scale_to_come(model: nn.Module, grouped: list[Knot]) -> float:
    """The factor that tying will put on the head's input (T5's relatives), or 1.

    It applies if the flag alone decides, and if the head's matrix carries the factor, as `untie_weights` leaves it.
    """
    scale = idle_scale(model)
    heads = [(end, knot.source) for knot in grouped for _, end in knot.targets if makes_logits(end, knot.source)]
    if scale == 1.0 or not heads:
        return 1.0
    carried = all(_same(end.tensor, source.tensor, scale) for end, source in heads)
    return scale if carried or follows_flag(model) else 1.0


def _same(target: torch.Tensor, source: torch.Tensor, scale: float) -> bool:
    """Whether `target` is `source` times the scale, bit for bit."""
    if scale == 1.0:
        return state_of(target, source) is not TieState.DIVERGED
    return not source.is_meta and same_bits(target, source.detach() * scale)


def _winner(knot: Knot, on_conflict: Conflict, scale: float) -> nn.Parameter:
    """The `Parameter` whose values stay."""
    source = knot.source.tensor
    assert isinstance(source, nn.Parameter)
    ends = [
        (tie, end, scale if makes_logits(end, knot.source) else 1.0)
        for tie, end in knot.targets
        if end.tensor is not source
    ]
    apart = [(tie, end) for tie, end, factor in ends if not _same(end.tensor, source, factor)]
    if not apart or on_conflict == "source":
        return source
    tie, end = apart[0]
    if on_conflict == "raise":
        if scale != 1.0 and state_of(end.tensor, source) is not TieState.DIVERGED:
            raise TieError(
                f"{tie}: once tied, the model would multiply the head's input by {scale:.3g}, which it does not do now",
                help='on_conflict="source" ties and scales; leave it untied to keep what the model computes',
            )
        raise TieError(
            f"{tie}: the two ends hold different values ({difference(end.tensor, source)}); one of them would be lost",
            help='on_conflict="source" keeps the embedding, "target" the head; leave them untied to keep both',
        )
    expect_equal_targets(
        tie.source,
        [(one.target, target.tensor) for one, target in apart],
        help='tie them one at a time, or use on_conflict="source"',
    )
    assert isinstance(end.tensor, nn.Parameter)
    return end.tensor


def check_bias(end: Slot, winner: torch.Tensor) -> None:
    """Raise if a head's bias does not have as many entries as its new matrix has rows."""
    bias = end.beside("bias")
    is_weight = isinstance(end.module, nn.Linear) and end.attribute == "weight"
    if is_weight and bias is not None and len(bias) != len(winner):
        raise TieError(
            f"{end.name}: its bias has {len(bias)} entries, but the shared matrix has {len(winner)} rows",
            help="resize_vocab resizes both; or give the head a bias of that length",
        )


def _governed(model: nn.Module, wanted: tuple[Tie, ...]) -> bool:
    """Whether a flag decides about any of these ties, and may be true because all ties that it decides hold now."""
    declared, known = declared_ties(model, flag=True), slots(model)
    return bool(set(wanted) & set(declared)) and all(holds(tie, known) for tie in declared if there(tie, known))
