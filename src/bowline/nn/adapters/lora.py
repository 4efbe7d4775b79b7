"""Merges a peft model's LoRA into its base, correctly if the base is tied.

A merge adds each adapter's delta to the matrix under it. Where two modules share that matrix, a delta that was trained
at one end reaches the other, and a delta that both ends carry is added twice. Here each shared matrix is looked at
first: ends that the adapters treat alike stay tied and get the delta once, ends that they treat unlike are parted.
peft is not imported: its layers are known by what they hold.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import nn

from bowline.errors import TieError, UsageError
from bowline.nn.config.head_scaling import head_scale, set_scaling
from bowline.nn.ties.declared_ties import declared_ties
from bowline.nn.ties.ends import makes_logits
from bowline.nn.ties.module_sizes import fit_sizes
from bowline.nn.ties.tensor_comparison import difference
from bowline.nn.ties.untying import untie_weights
from bowline.nn.tree.slots import Slot, slots
from bowline.tie import Tie

__all__ = ["merge_lora"]

Parts: TypeAlias = dict[str, torch.Tensor]

PEFT_ON_TIES = r"Model with `tie_word_embeddings=True`|Input and output embeddings are no longer tied after merging"
"""peft's warning about merging onto a tie, silenced because ties are handled here."""


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A parameter of the merged model: its place, its adapters, and the place of its wrapper."""

    slot: Slot
    layers: tuple[Any, ...]
    parent: nn.Module
    child: str

    @property
    def name(self) -> str:
        """Its name in the base model."""
        return self.slot.name

    def bare(self, undo: ExitStack) -> None:
        """Remove the adapters."""
        undo.callback(self.parent._modules.__setitem__, self.child, self.parent._modules[self.child])
        self.parent._modules[self.child] = self.slot.module


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """One adapter's effect on a parameter, in words, and the parts by which two effects are compared, if possible."""

    text: str
    parts: Parts | None


def merge_lora(model: nn.Module, *, on_tie: Literal["raise", "untie"] = "raise") -> nn.Module:
    """Merge the adapters of a peft model; returns the base model, which computes what `model` computed.

    Every active adapter is merged as peft merges it. A tie stays when both ends carry the same adapter
    (`ensure_weight_tying=True`), whose delta is then added once, or none. It cannot stay when an adapter sits at one
    end only, when the two ends carry different ones, or when `modules_to_save` trained a copy: the default refuses,
    `on_tie="untie"` gives each end a matrix with its own delta and clears `tie_word_embeddings`, so that a save keeps
    the head. As with peft, `model` is used up.

    Raises:
        UsageError: `model` is not a peft model with adapters to merge, or is used up; a LoRA bias but no base bias; an
            adapter inside another at one module, as trained rows inside a LoRA.
        TieError: a tie that cannot stay, or one that `merge_adapter()` has merged onto already; `model` is unchanged.

    Example:
        >>> from peft import LoraConfig, get_peft_model
        >>> tiny = nn.ModuleDict({"wte": nn.Embedding(9, 4), "lm_head": nn.Linear(4, 9, bias=False)})
        >>> tiny["lm_head"].weight = tiny["wte"].weight
        >>> adapted = get_peft_model(tiny, LoraConfig(target_modules=["lm_head"], r=2, lora_alpha=4))
        >>> merge_lora(adapted)
        Traceback (most recent call last):
        ...
        bowline.errors.TieError: lm_head.weight <- wte.weight: lm_head.weight has the adapter 'default' (LoRA of rank 2,
        scaling 2.0) and wte.weight no adapter; one matrix cannot hold both (help: on_tie="untie" gives each end its
        own; ensure_weight_tying=True in LoraConfig trains one adapter for both)
        >>> merged = merge_lora(adapted, on_tie="untie")
        >>> merged["lm_head"].weight is merged["wte"].weight
        False
    """
    if on_tie not in ("raise", "untie"):
        raise UsageError(f"on_tie={on_tie!r}: expected 'raise' or 'untie'")
    base = _base_of(model)
    before = {place.name: place.slot.tensor for place in _places(base, base, "", trained=False)}
    places = list(_places(base, base, "", trained=True))
    _check_biases(places)
    _check_nesting(places)
    knots = [_alike(knot) for knot in _knots(places, before)]
    for groups in knots:
        _check_knot(groups, before, on_tie)
    scale = head_scale(base)  # read before the flag changes
    with ExitStack() as undo:
        for groups in knots:
            _prepare(groups, undo)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", PEFT_ON_TIES, UserWarning)
            merged = cast(nn.Module, cast(Any, model).merge_and_unload())
        undo.pop_all()
    for place in (place for groups in knots for group in groups for place in group):
        fit_sizes(place.slot)  # peft swaps the sizes of a tied `modules_to_save` head
    if any(len(groups) > 1 for groups in knots):
        _untie_declared(merged, before, scale)
    return merged


def _base_of(model: nn.Module) -> nn.Module:
    """The model inside `PeftModel(LoraModel(base))`, or inside a bare `LoraModel`, with peft's layers in it."""
    tuner = getattr(model, "_modules", {}).get("base_model", model)
    base = getattr(tuner, "_modules", {}).get("model")
    if base is None or not hasattr(model, "merge_and_unload"):
        raise UsageError(
            f"{type(model).__name__}: has no adapters to merge, expected a peft model",
            help="peft.get_peft_model(model, LoraConfig(...)) or PeftModel.from_pretrained makes one",
        )
    if all(_below(module, trained=False) is None for module in base.modules()):
        raise UsageError(
            f"{type(model).__name__}: its adapters are merged already", help="use the model that merge_lora returned"
        )
    return cast(nn.Module, base)


def _places(module: nn.Module, parent: nn.Module, path: str, *, trained: bool) -> Iterator[Place]:
    """Every parameter of the base model by its name there: what it holds now, or (`trained`) what a merge leaves."""
    child = path.rpartition(".")[2]
    inner, layers = module, []
    while (below := _below(inner, trained=trained)) is not None:
        if "base_layer" in inner._modules:
            layers.append(inner)
        inner = below
    for attribute, parameter in inner._parameters.items():
        if parameter is not None:
            name = f"{path}.{attribute}" if path else attribute
            yield Place(Slot(name, inner, attribute), tuple(layers), parent, child)
    for name, module_below in inner._modules.items():
        if module_below is not None:
            yield from _places(module_below, inner, f"{path}.{name}" if path else name, trained=trained)


def _below(module: Any, *, trained: bool) -> nn.Module | None:
    """The base layer of one of peft's layers; `None` for any other module."""
    inside = module._modules
    if not hasattr(module, "active_adapters"):
        return None
    only = inside.get("base_layer") or inside.get("token_adapter")
    if only is not None or "modules_to_save" not in inside:
        return cast("nn.Module | None", only)
    active = module.active_adapters if trained else []
    copies = inside["modules_to_save"]
    return cast(nn.Module, copies[active[0]] if active and active[0] in copies else inside["original_module"])


def _knots(places: list[Place], before: Parts) -> Iterator[list[Place]]:
    """The places whose parameter the base model shares, embeddings first."""
    held: dict[int, list[Place]] = {}
    for place in places:
        if place.name in before:
            held.setdefault(id(before[place.name]), []).append(place)
    for knot in held.values():
        if len(knot) > 1:
            yield sorted(knot, key=lambda place: not isinstance(place.slot.module, nn.Embedding))


def _alike(knot: list[Place]) -> list[list[Place]]:
    """Groups of places of one parameter that the adapters treat alike."""
    groups: list[list[Place]] = []
    for place in knot:
        group = next((group for group in groups if _same(group[0], place)), None)
        if group is None:
            groups.append([place])
        else:
            group.append(place)
    return groups


def _same(one: Place, other: Place) -> bool:
    """Whether a merge gives both places the same values: one parameter now, and deltas of the same bits."""
    ours, theirs = list(_deltas(one)), list(_deltas(other))
    return (
        one.slot.tensor is other.slot.tensor
        and len(ours) == len(theirs)
        and all(_equal(a.parts, b.parts) for a, b in zip(ours, theirs, strict=True))
    )


def _equal(one: Parts | None, other: Parts | None) -> bool:
    if one is None or other is None or one.keys() != other.keys():
        return False
    return all(torch.equal(one[key], other[key]) for key in one)


def _deltas(place: Place) -> Iterator[Delta]:
    """The effect of each active adapter on this parameter."""
    for layer in place.layers:
        for adapter in layer.active_adapters:
            if (delta := _delta(layer, adapter, place.slot.attribute)) is not None:
                yield delta


def _delta(layer: Any, adapter: str, attribute: str) -> Delta | None:
    if adapter in getattr(layer, "trainable_tokens_delta", {}):
        rows, indices = layer.trainable_tokens_delta[adapter], torch.tensor(layer.token_indices[adapter])
        text = f"the adapter {adapter!r} ({len(indices)} trained rows)"
        return Delta(text, {"rows": rows.detach(), "indices": indices}) if attribute == "weight" else None
    if adapter not in layer._get_available_adapters():
        return None
    factors = _factors(layer, adapter)
    if factors is None:
        return Delta(f"the adapter {adapter!r} ({type(layer).__name__})", None)
    if attribute == "bias" and not layer.lora_bias[adapter]:
        return None
    variant, scaling = layer.lora_variant.get(adapter), layer.scaling[adapter]
    kind = "LoRA" if variant is None else type(variant).__name__
    text = f"the adapter {adapter!r} ({kind} of rank {layer.r[adapter]}, scaling {scaling})"
    if variant is not None or layer.lora_bias[adapter]:
        return Delta(text, None)
    left, right = factors
    return Delta(text, {"left": left, "right": right, "scaling": torch.tensor(scaling, dtype=torch.float64)})


def _factors(layer: Any, adapter: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The two matrices whose product is the delta, in a head's order; an embedding's LoRA is a head's transposed.

    Products are not compared: two orders of summation round differently. `None` where the delta is more than the
    product of two modules, as AdaLoRA's is.
    """
    if adapter in getattr(layer, "lora_embedding_A", {}):
        return layer.lora_embedding_A[adapter].detach().T, layer.lora_embedding_B[adapter].detach().T
    if hasattr(layer, "parameter_name") or not isinstance(getattr(layer, "lora_A", None), nn.ModuleDict):
        return None
    if adapter in layer.lora_A:
        return layer.lora_B[adapter].weight.detach(), layer.lora_A[adapter].weight.detach()
    return None


def _check_biases(places: list[Place]) -> None:
    """Raise before a merge for errors that peft finds only halfway through."""
    for place in places:
        for layer in place.layers:
            bias = getattr(place.slot.module, "bias", None)
            for adapter in layer.active_adapters:
                if bias is None and getattr(layer, "lora_bias", {}).get(adapter):
                    raise UsageError(
                        f"{place.name}: the adapter {adapter!r} has a bias (lora_bias=True) and the layer has none",
                        help="give the base layer a bias of zeros before the adapter is put on",
                    )


def _check_nesting(places: list[Place]) -> None:
    """Raise for an adapter inside another: peft merges the outer one and leaves the inner one in the model."""
    for place in places:
        if len(place.layers) > 1:
            kinds = " and ".join(type(layer).__name__ for layer in place.layers)
            raise UsageError(
                f"{place.name}: has adapters one inside the other ({kinds}), and PEFT merges only the outer one",
                help="train the module with one of them; rows of a tied embedding are trained at its head too",
            )


def _check_knot(groups: list[list[Place]], before: Parts, on_tie: str) -> None:
    source = groups[0][0]
    for place in (place for group in groups for place in group):
        done = [adapter for layer in place.layers for adapter in layer.merged_adapters]
        if done:
            raise TieError(
                f"{Tie(place.name, source.name) if place is not source else place.name}: {done[0]!r} is merged into "
                "the shared matrix already, so every end has its delta",
                help="model.unmerge_adapter() first",
            )
    for group in groups[1:]:
        target = group[0]
        tie = Tie(target.name, source.name)
        if on_tie == "raise":
            apart, instead = _apart(target, source, before)
            raise TieError(
                f"{tie}: {target.name} has {_said(target, before)} and {source.name} {_said(source, before)}{apart}; "
                "one matrix cannot hold both",
                help=f'on_tie="untie" gives each end its own; {instead}',
            )
        for other in (place for earlier in groups if earlier is not group for place in earlier):
            if any(place.slot.same_place(other.slot) for place in group):
                raise TieError(
                    f"{tie}: one module under two names, with an adapter over one of them, so they cannot be parted",
                    help="untie_weights(model) before the adapter is put on",
                )


def _said(place: Place, before: Parts) -> str:
    copied = ["a trained copy (modules_to_save)"] if _copied(place, before) else []
    return " and ".join([*copied, *(delta.text for delta in _deltas(place))]) or "no adapter"


def _copied(place: Place, before: Parts) -> bool:
    return place.slot.tensor is not before[place.name]


def _apart(target: Place, source: Place, before: Parts) -> tuple[str, str]:
    """How adapters at both ends stand to each other, empty if one end has none; and how to train one for both."""
    pairs = list(zip(_deltas(target), _deltas(source), strict=False))
    copies = _copied(target, before) and _copied(source, before)
    if not pairs and not copies:
        return "", "ensure_weight_tying=True in LoraConfig trains one adapter for both"
    if any(one.parts is None or other.parts is None for one, other in pairs):
        return (
            ", and deltas of these kinds cannot be compared",
            "to keep the tie, train plain LoRA with ensure_weight_tying=True in LoraConfig",
        )
    seen = [str(difference(target.slot.tensor, source.slot.tensor))] if copies else []
    seen += [_parts_differ(one.parts or {}, other.parts or {}) for one, other in pairs if one.text == other.text]
    details = next((": " + one for one in seen if one), "")
    return (
        f", trained separately{details}",
        "to keep the tie, train again with ensure_weight_tying=True in LoraConfig, which makes one adapter for both",
    )


def _parts_differ(one: Parts, other: Parts) -> str:
    """How two deltas of one description differ; empty if they do not."""
    if _equal(one, other):
        return ""
    if "indices" in one and not torch.equal(one["indices"], other["indices"]):
        return "they are rows of different tokens"
    most = max(float((one[key].double() - other[key].double()).abs().max()) for key in one)
    return f"their {'rows' if 'rows' in one else 'factors'} differ by at most {most:.3g}"


def _prepare(groups: list[list[Place]], undo: ExitStack) -> None:
    """Keep one place of the source's group with its adapters, and give every other place its own parameter."""
    kept, *parted = groups
    for place in kept[1:]:
        if any(True for _ in _deltas(place)):
            place.bare(undo)
    taken = [kept[0].slot.tensor]
    for place in (place for group in parted for place in group):
        shared = place.slot.tensor
        if any(shared is other for other in taken):
            undo.callback(place.slot.put, cast(nn.Parameter, shared))
            place.slot.put(nn.Parameter(shared.detach().clone(), requires_grad=shared.requires_grad))
        taken.append(shared)


def _untie_declared(merged: nn.Module, before: Parts, scale: float) -> None:
    """If a declared tie was undone, undo all ties that the same flag controls, and clear the flag."""
    known = slots(merged)
    declared = [
        tie
        for tie in declared_ties(merged, flag=True)
        if {tie.target, tie.source} <= known.keys() & before.keys() and before[tie.target] is before[tie.source]
    ]
    held = [tie for tie in declared if known[tie.target].tensor is known[tie.source].tensor]
    parted = [(known[tie.target], known[tie.source]) for tie in declared if tie not in held]
    if not parted:
        return
    heads = {id(target.tensor): target.tensor for target, source in parted if makes_logits(target, source)}
    untie_weights(merged, held)
    if heads and scale != 1.0:
        with torch.no_grad():
            for head in heads.values():
                head.mul_(scale)
        set_scaling(merged, False)
