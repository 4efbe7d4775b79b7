"""Finds a model's vocabulary axes: from the caller, from the families' table, or from the model's structure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from bowline.errors import TieError, UsageError
from bowline.nn.config.live_config import levels, text_config
from bowline.nn.tree.slots import Slot, slot
from bowline.nn.tree.table_slots import is_head, is_lookup, tie_ends
from bowline.nn.vocabulary.axes import Stated, Vocabulary, axes_of, check_tensors
from bowline.nn.vocabulary.family_axes import KnownPart, at, known_parts
from bowline.nn.vocabulary.structural_axes import infer_axes

__all__ = ["find_vocabulary"]


def find_vocabulary(model: nn.Module, axes: Mapping[str, int] | None = None) -> Vocabulary:
    """Every tensor with a vocabulary axis, the number of tokens, and where configs state it.

    Raises:
        TieError: the tensors are ambiguous or cannot be resized; the message names them.
        UsageError: `axes` is not a mapping of names to axes.
    """
    known = tie_ends(model)
    if axes is not None:
        vocabulary = _given(model, known, axes)
    else:
        parts = known_parts(model, known)
        vocabulary = _known(model, known, parts) if parts else _inferred(model, known)
    check_tensors(known, vocabulary.axes)
    return vocabulary


def _given(model: nn.Module, known: dict[str, Slot], axes: Mapping[str, int]) -> Vocabulary:
    if not isinstance(axes, Mapping) or not axes:
        raise UsageError(
            f"axes={axes!r}: expected {{tensor name: axis}}",
            help='for instance axes={"lm_head.weight": 0, ...}',
            argument="axes",
        )
    wanted: dict[str, int] = {}
    for name, axis in axes.items():
        shape = slot(model, name, known).tensor.shape
        if isinstance(axis, bool) or not isinstance(axis, int) or not -len(shape) <= axis < len(shape):
            raise UsageError(
                f"axes[{name!r}]={axis!r}: {name} has shape {tuple(shape)}, expected one of its axes",
                help="axes count from 0, or from -1 at the end",
                argument="axes",
            )
        wanted[name] = axis % len(shape)
    lengths = {name: int(known[name].tensor.shape[axis]) for name, axis in wanted.items()}
    (first, size), *others = lengths.items()
    for name, length in others:
        if length != size:
            raise TieError(
                f"{first} has {size} entries along axis {wanted[first]}, {name} has {length} along axis "
                f"{wanted[name]}; a vocabulary has one size",
                help="resize them in two calls",
            )
    parts = known_parts(model, known, strict=False)
    stated = [
        Stated(part.prefix, part.config, path)
        for part in parts
        for path, names in ((part.path, part.axes), *part.others.items())
        if set(names) & set(wanted) and at(part.config, path) == size
    ]
    return Vocabulary(size, axes_of(known, wanted, size), tuple(stated) if parts else _stated(model, size))


def _known(model: nn.Module, known: dict[str, Slot], parts: list[KnownPart]) -> Vocabulary:
    sizes = [part.size(known) for part in parts]
    first = parts[0]
    held = {id(known[name].tensor) for name in first.axes}
    for part, size in zip(parts[1:], sizes[1:], strict=True):
        if size != sizes[0] or not held & {id(known[name].tensor) for name in part.axes}:
            raise TieError(
                f"{type(model).__name__} has two vocabularies: {', '.join(first.axes)} ({sizes[0]} tokens) and "
                f"{', '.join(part.axes)} ({size})",
                help=f"resize one part, such as model.{part.prefix}, or name the tensors: axes={{name: axis}}",
            )
    _refuse_another(model, known, parts)
    wanted = {name: axis for part in parts for name, axis in part.axes.items()}
    per_layer = {name: axis for part in parts for name, axis in part.per_layer.items()}
    if len(parts) == 1 and (first.prefix or not first.exact):
        others = {name for names in first.others.values() for name in names}
        settled = {name for name in known if first.exact and name.startswith(first.prefix + ".")}
        wanted |= infer_axes(model, known, wanted, others | settled)
    axes = axes_of(known, wanted | per_layer, sizes[0], dict.fromkeys(per_layer, 0))
    stated = [
        Stated(part.prefix, part.config, path)
        for part in parts
        if part.config is not None
        for path in (part.path, *part.same_tokens)
    ]
    return Vocabulary(sizes[0], axes, tuple(stated), any(part.fixed_ids for part in parts))


def _refuse_another(model: nn.Module, known: dict[str, Slot], parts: list[KnownPart]) -> None:
    """Raise if a model around a part that the table knows has an embedding and a head of its own, too.

    Raises:
        TieError: it has.
    """
    outside = [s for s in known.values() if not any(s.name.startswith(p.prefix + ".") or not p.prefix for p in parts)]
    mine = {int(known[name].tensor.shape[axis]) for part in parts for name, axis in part.axes.items()}
    for table in outside:
        rows = len(table.tensor) if table.tensor.ndim == 2 and is_lookup(table.module) else 0
        heads = [s for s in outside if is_head(s.module) and s.tensor.shape[:1] == (rows,)]
        if rows and rows not in mine and heads:
            raise TieError(
                f"{type(model).__name__} has two vocabularies: {', '.join(parts[0].axes)}, and {table.name} with "
                f"{heads[0].name}",
                help=f"resize one part, such as model.{parts[0].prefix}, or name the tensors: axes={{name: axis}}",
            )


def _inferred(model: nn.Module, known: dict[str, Slot]) -> Vocabulary:
    wanted = infer_axes(model, known)
    name, axis = next(iter(wanted.items()))
    size = int(known[name].tensor.shape[axis])
    return Vocabulary(size, axes_of(known, wanted, size), _stated(model, size))


def _stated(model: nn.Module, size: int) -> tuple[Stated, ...]:
    """The levels of the model's own config whose `vocab_size` is this size."""
    config: Any = model.__dict__.get("config")
    if config is None:
        return ()
    words = text_config(config)
    found = [path for path, level in levels(config) if level in (config, words) and at(level, "vocab_size") == size]
    return tuple(Stated("", config, f"{path}.vocab_size" if path else "vocab_size") for path in found)
