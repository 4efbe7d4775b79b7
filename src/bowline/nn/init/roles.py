"""Finds the role of each parameter: by the ends of the tie first, then by classes, then by names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import nn

from bowline.errors import UsageError
from bowline.nn.config.live_config import owner
from bowline.nn.init.fused_matrices import Fused, check_fits, fused_in
from bowline.nn.init.matrix_names import FEED_FORWARD, embedding_role, is_norm, matrix_role, place_of
from bowline.nn.ties.ends import makes_logits, there
from bowline.nn.ties.shared_parameters import find_ties
from bowline.nn.tree.slots import Slot, slots
from bowline.nn.tree.storages import extent
from bowline.recipes import Role

__all__ = ["Found", "Roles", "find_roles", "survey"]

Roles: TypeAlias = Mapping[str, "Role | Fused | str"]
"""Roles given by a caller, by name or by pattern with `*`."""
GATES = re.compile(r"weight_(ih|hh|hr)(_l\d+)?(_reverse)?")
GATE_BIASES = re.compile(r"bias_(ih|hh)(_l\d+)?(_reverse)?")
BIASES = frozenset({"bias", "in_proj_bias", "q_bias", "k_bias", "v_bias"})
NORM_WEIGHTS, NORM_BIASES = frozenset({"weight", "scale", "gamma", "g"}), frozenset({"bias", "beta", "b"})
TORCH_ATTENTION = {"q_proj_weight": Role.QUERY, "k_proj_weight": Role.KEY, "v_proj_weight": Role.VALUE}


@dataclass(frozen=True, eq=False)
class Found:
    """The contents of a model: each storage once, under its source's name.

    `holders` are all slots of it, the source's first. `table` is the name of the input embedding, and `tied` whether it
    is also the head: `None` where there is no head.
    """

    roles: dict[str, Role | Fused]
    holders: dict[str, list[Slot]]
    table: str | None
    tied: bool | None


def find_roles(model: nn.Module, roles: Roles | None = None) -> dict[str, Role | Fused]:
    """The role of each parameter of `model`: each storage once, under the name of its source.

    A tied head is therefore the input embedding. Found from `get_input_embeddings` and `get_output_embeddings`, from
    ties, from classes (embeddings, norms, torch's attention and recurrent layers) and from the names that families use.
    Queries, keys and values in one matrix are a `Fused`. `roles` overrides roles that are found wrong or not at all:
    `{"encoder.*.gate.weight": Role.FEED_FORWARD_IN}`.

    Raises:
        UsageError: a parameter without a known role, or a pattern in `roles` that matches no parameter.

    Example:
        >>> model = nn.ModuleDict({"wte": nn.Embedding(9, 4), "ln_f": nn.LayerNorm(4), "lm_head": nn.Linear(4, 9)})
        >>> model["lm_head"].weight = model["wte"].weight
        >>> for name, role in find_roles(model).items():
        ...     print(f"{name}: {role}")
        wte.weight: input embedding
        ln_f.weight: norm weight
        ln_f.bias: norm bias
        lm_head.bias: head's bias
    """
    return survey(model, roles).roles


def survey(model: nn.Module, roles: Roles | None = None) -> Found:
    """`find_roles`, with the other contents that a draw needs."""
    known = slots(model)
    holders = _holders(model, known)
    if not isinstance(roles, Mapping | None):
        raise UsageError(f"roles={roles!r:.60}: expected {{name or pattern: Role}}", argument="roles")
    given = _given_roles(holders, roles or {})
    ends = _Ends(model, holders)
    found: dict[str, Role | Fused] = {}
    lost: list[str] = []
    for name, held in holders.items():
        role = given.get(name) or ends.role(name) or _role(model, held, ends)
        if role is None:
            lost.append(name)
        else:
            if isinstance(role, Fused):
                check_fits(name, role, held[0].tensor, held[0].module)
            found[name] = role
    if lost:
        first = holders[lost[0]][0]
        others = f", nor for {len(lost) - 1} more" if len(lost) > 1 else ""
        raise UsageError(
            f"{first.name} {tuple(first.tensor.shape)} of a {type(first.module).__name__}: "
            f"no role is known for this parameter{others}",
            help=f"give its role: roles={{{first.name!r}: Role.LINEAR}}, or another Role, or a Fused",
        )
    table = next((name for name, role in found.items() if role is Role.INPUT_EMBEDDING and name in ends.tables), None)
    table = table or next((name for name, role in found.items() if role is Role.INPUT_EMBEDDING), None)
    tied = None
    if any(name in ends.tied for name, role in found.items() if role is Role.INPUT_EMBEDDING):
        tied = True
    elif Role.HEAD in found.values():
        tied = False
    return Found(found, holders, table, tied)


def _holders(model: nn.Module, known: Mapping[str, Slot]) -> dict[str, list[Slot]]:
    """Each storage by its source's name; a parameter within another's memory belongs to the other.

    Raises:
        UsageError: two parameters overlap, and neither contains the other.
    """
    found = find_ties(model)
    source = {tie.target: tie.source for tie in found.ties if there(tie, known)}
    for tie in found.aliases:
        inner, outer = extent(known[tie.target].tensor), extent(known[tie.source].tensor)
        if inner is None or outer is None or not (outer[1] <= inner[1] and inner[2] <= outer[2]):
            raise UsageError(
                f"{tie.target} and {tie.source} overlap in memory, and neither contains the other",
                help="give each its own memory, or call tie_weights(model) first",
            )
        source[tie.target] = tie.source
    holders: dict[str, list[Slot]] = {}
    for name, slot in known.items():
        if slot.is_parameter and name not in source:
            holders[name] = [slot]
    for name, first in source.items():
        holders[source.get(first, first)].append(known[name])
    return holders


def _given_roles(holders: Mapping[str, list[Slot]], roles: Roles) -> dict[str, Role | Fused]:
    given: dict[str, Role | Fused] = {}
    for pattern, role in roles.items():
        if not isinstance(pattern, str):
            raise UsageError(
                f"roles[{pattern!r:.60}]: expected the name of a parameter, or a pattern", argument="roles"
            )
        try:
            meant = role if isinstance(role, Fused) else Role(role)
        except ValueError:
            raise UsageError(
                f"roles[{pattern!r}]={role!r:.60}: expected a Role or a Fused",
                help=f"the roles are {', '.join(Role)}",
                argument="roles",
            ) from None
        matched = [name for name, held in holders.items() if any(fnmatchcase(slot.name, pattern) for slot in held)]
        if not matched:
            raise UsageError(
                f"roles[{pattern!r}]: no parameter has a name that matches",
                help="find_roles(model) lists the names",
                argument="roles",
            )
        given |= dict.fromkeys(matched, meant)
    return given


class _Ends:
    """The two ends of a model: its tables of tokens, its heads, and the biases of those."""

    def __init__(self, model: nn.Module, holders: Mapping[str, list[Slot]]) -> None:
        self.holders = holders
        by_id = {id(slot.tensor): name for name, held in holders.items() for slot in held}
        stated = by_id.get(id(_weight(model, "get_input_embeddings")))
        self.tables = {stated} if stated is not None and _may_be_table(holders[stated][0]) else set()
        tables = {name: held for name, held in holders.items() if _is_table(held)}
        self.tied = {
            name
            for name, held in tables.items()
            for slot in held
            if makes_logits(slot, next(one for one in held if isinstance(one.module, nn.Embedding)))
        }
        self.tables |= {name for name, held in tables.items() if _table_role(held) is Role.INPUT_EMBEDDING}
        self.tables |= self.tied
        unnamed = [name for name, held in tables.items() if _table_role(held) is None]
        if not self.tables and len(unnamed) == 1:
            self.tables = set(unnamed)
        self.rows = {len(holders[name][0].tensor) for name in self.tables}
        head = by_id.get(id(_weight(model, "get_output_embeddings")))
        self.heads = {head} - self.tables if head is not None and holders[head][0].tensor.ndim == 2 else set()
        if not self.heads and not self.tied:
            self.heads = {name for name, held in holders.items() if self._may_be_head(held[0])}
        self.biases = self._find_biases()

    def _may_be_head(self, slot: Slot) -> bool:
        is_weight = isinstance(slot.module, nn.Linear) and slot.attribute == "weight"
        parts = _parts(slot)
        unclear = matrix_role(parts) is None and place_of(parts[:-1]) is None
        return is_weight and unclear and len(slot.tensor) in self.rows

    def _find_biases(self) -> set[str]:
        """The biases of heads, and of modules above a head, such as BERT's, which acts through the decoder's."""
        ids = {id(slot.tensor) for name in self.heads | self.tied for slot in self.holders[name]}
        lengths = {
            id(slot.module): len(slot.tensor)
            for name in self.heads | self.tied
            for slot in self.holders[name]
            if not isinstance(slot.module, nn.Embedding)
        }
        found = set()
        for name, held in self.holders.items():
            for slot in held:
                if slot.attribute == "bias" and slot.tensor.ndim == 1:
                    own = lengths.get(id(slot.module))
                    inside = (id(one) for part in slot.module._modules.values() if part for one in part.parameters())
                    above = len(slot.tensor) in self.rows and any(one in ids for one in inside)
                    if own == len(slot.tensor) or (above and slot.beside("weight") is None):
                        found.add(name)
        return found

    def role(self, name: str) -> Role | None:
        if name in self.tables:
            return Role.INPUT_EMBEDDING
        if name in self.heads:
            return Role.HEAD
        return Role.HEAD_BIAS if name in self.biases else None


def _may_be_table(slot: Slot) -> bool:
    """Whether the module looks up ids: a model of images or series may call a Linear its input embedding."""
    return slot.tensor.ndim == 2 and not isinstance(slot.module, nn.Linear)


def _is_table(held: list[Slot]) -> bool:
    return any(isinstance(slot.module, nn.Embedding) for slot in held)


def _table_role(held: list[Slot]) -> Role | None:
    """The role by the first of a tensor's names that has one."""
    named = (embedding_role(_parts(slot)[-1]) for slot in held if isinstance(slot.module, nn.Embedding))
    return next((role for role in named if role is not None), None)


def _weight(model: nn.Module, getter: str) -> torch.Tensor | None:
    find = getattr(owner(model), getter, None)
    try:
        weight = getattr(find(), "weight", None) if callable(find) else None
    except (AttributeError, NotImplementedError, TypeError):
        return None
    return weight if isinstance(weight, torch.Tensor) else None


def _parts(slot: Slot) -> list[str]:
    """The names from the root to the slot's module, without numbers; at the root, a single empty name."""
    path = slot.name.removesuffix(slot.attribute).removesuffix(".")
    return [part for part in path.split(".") if not part.isdecimal()] or [""]


def _role(model: nn.Module, held: list[Slot], ends: _Ends) -> Role | Fused | None:
    """The roles by class of the holder, or by name, for each slot of a tensor in turn."""
    if _is_table(held):
        return _table_role(held)
    return next((role for slot in held for role in _slot_roles(model, slot) if role is not None), None)


def _slot_roles(model: nn.Module, slot: Slot) -> Iterator[Role | Fused | None]:
    tensor, module, attribute, parts = slot.tensor, slot.module, slot.attribute, _parts(slot)
    if tensor.ndim == 1:
        if is_norm(parts[-1], module):
            yield Role.NORM_WEIGHT if attribute in NORM_WEIGHTS else None
            yield Role.NORM_BIAS if attribute in NORM_BIASES else None
        elif GATE_BIASES.fullmatch(attribute):
            yield Role.RECURRENT_BIAS
        else:
            yield Role.BIAS if attribute in BIASES else None
    elif isinstance(module, (nn.RNNBase, nn.RNNCellBase)) and GATES.fullmatch(attribute):
        yield Role.RECURRENT
    elif isinstance(module, nn.MultiheadAttention) and attribute == "in_proj_weight":
        yield Fused(tuple((role, len(tensor) // 3) for role in (Role.QUERY, Role.KEY, Role.VALUE)))
    elif isinstance(module, nn.MultiheadAttention):
        yield TORCH_ATTENTION.get(attribute)
    elif attribute == "weight" and tensor.ndim == 2:
        yield _matrix(model, slot, parts)
    elif attribute != "weight" and embedding_role(attribute) is Role.POSITIONS:
        yield Role.POSITIONS


def _matrix(model: nn.Module, slot: Slot, parts: list[str]) -> Role | Fused | None:
    path = slot.name.removesuffix(slot.attribute).removesuffix(".")
    above, _, leaf = path.rpartition(".")
    parent = model.get_submodule(above) if path else model
    fused = fused_in(leaf, slot.module, slot.tensor, parent, _config(model, parent))
    return fused or matrix_role(parts) or _in_sequence(slot, parent, parts)


def _config(model: nn.Module, module: nn.Module) -> Any:
    return module.__dict__.get("config") or getattr(owner(model), "config", None)


def _in_sequence(slot: Slot, parent: nn.Module, parts: list[str]) -> Role | None:
    """The role in a feed-forward part that is a sequence of two matrices and the modules between them."""
    matrices = [part for part in parent.children() if isinstance(part, nn.Linear)]
    if not isinstance(parent, nn.Sequential) or len(matrices) != 2 or place_of(parts) != FEED_FORWARD:
        return None
    return Role.FEED_FORWARD_IN if matrices[0] is slot.module else Role.FEED_FORWARD_OUT
