"""Decides what a saved `config.json` says about ties, and which names of a tied matrix its files may omit.

The live tensors decide the flag: it is true if every tie that the classes could make holds, and false otherwise. A name
is omitted only if every known loader makes the tie under that flag. Any other shared tensor is written under each name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from bowline.checkpoint.formats.json_edit import set_values
from bowline.families.resolver import FLAG, FLAGS, resolve, stated_levels
from bowline.nn.ties.declared_ties import declared_ties
from bowline.nn.ties.shared_parameters import find_ties
from bowline.nn.tree.storages import knots
from bowline.nn.tree.table_slots import tie_ends
from bowline.tie import Tie

__all__ = ["Knots", "flag_of_bytes", "remade", "shared_names", "with_flag"]

Knots = list[list[str]]
"""Groups of names of one parameter, the source first."""


def shared_names(model: nn.Module) -> Knots:
    """Group the names that share one parameter now."""
    grouped: dict[str, list[str]] = {}
    for tie in find_ties(model):
        grouped.setdefault(tie.source, [tie.source]).append(tie.target)
    return list(grouped.values())


def flag_of_bytes(model: nn.Module) -> bool | None:
    """The flag that describes the live tensors; `None` if the classes cannot tie anything."""
    known = tie_ends(model)
    could = [tie for tie in declared_ties(model, flag=True) if tie.target in known and tie.source in known]
    return all(known[tie.target].tensor is known[tie.source].tensor for tie in could) if could else None


def with_flag(config: str, flag: bool, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return the text of a `config.json` with every key that decides a tie of its class set to `flag`."""
    content: Mapping[str, Any] = json.loads(config)
    paths = {path for tie in resolve(content, shapes).ties for path in tie.paths}
    deciding = {path for path in paths if path.rpartition(".")[2] in FLAGS}
    wanted = {FLAG, *(path for path in deciding if _parent_exists(content, path))}
    if not flag:
        wanted |= set(stated_levels(content))
    return set_values(config, dict.fromkeys(sorted(wanted), flag))


def _parent_exists(content: Mapping[str, Any], path: str) -> bool:
    level: Any = content
    for key in path.split(".")[:-1]:
        level = level.get(key) if isinstance(level, Mapping) else None
    return isinstance(level, Mapping)


def remade(
    model: nn.Module, groups: Knots, disk: Mapping[str, str], config: str | None, shapes: Mapping[str, tuple[int, ...]]
) -> Knots:
    """Reduce each group to the names that every loader ties again by itself: the source, then the names to omit.

    `disk` maps live names to names on disk; `shapes` uses the names on disk. Without a config all groups are returned:
    such a checkpoint is read by `load_checkpoint`, into a model that has the same ties.
    """
    if config is None:
        return groups
    content = json.loads(config)
    declaration = resolve(content, shapes)
    if declaration.loaders and not declaration.inferred:
        made = [_connected(declaration.made.get(loader, ())) for loader in sorted(declaration.loaders)]
    else:
        stated = content.get(FLAG)
        ties = declared_ties(model, flag=bool(stated) if stated is not None else None)
        made = [_connected(Tie(disk.get(tie.target, tie.target), disk.get(tie.source, tie.source)) for tie in ties)]
    kept: Knots = []
    for group in groups:
        source = disk[group[0]]
        again = [name for name in group[1:] if all(_together(source, disk[name], knotted) for knotted in made)]
        if again:
            kept.append([group[0], *again])
    return kept


def _connected(ties: Iterable[Tie]) -> Sequence[Sequence[str]]:
    return knots((tie.target, tie.source) for tie in ties)


def _together(one: str, other: str, knotted: Sequence[Sequence[str]]) -> bool:
    return any(one in knot and other in knot for knot in knotted)
