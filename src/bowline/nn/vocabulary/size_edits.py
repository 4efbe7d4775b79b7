"""Edits of modules and configs that state the vocabulary's size or a token's id; each can be undone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from bowline.errors import UsageError
from bowline.families.stored_vocabulary import BESIDE, PER_LAYER
from bowline.families.token_ids import TOKEN_IDS, TokenMoves
from bowline.nn.config.live_config import levels, write
from bowline.nn.tree.table_slots import TableEnd, is_head
from bowline.nn.vocabulary.axes import Axis, Stated, Vocabulary
from bowline.nn.vocabulary.family_axes import at
from bowline.nn.vocabulary.token_selection import Selection

__all__ = ["Edit", "edits_of", "padding_of"]

SIZES = ("vocab_size", "n_words", "n_vocab", "padded_vocab_size", "num_embeddings", "tgt_vocab_size", "src_vocab_size")
"""Attributes of modules that state the vocabulary's size if they are equal to it."""
ANOTHER_VOCABULARYS_ROOT = ("text_encoder",)
"""Parts of a config whose vocabulary is not the one that the ids at the config's root belong to."""


@dataclass(frozen=True, slots=True, eq=False)
class Edit:
    """`owner.key` (or `owner[key]`) becomes `value`."""

    owner: Any
    key: str
    value: Any

    def apply(self) -> Callable[[], None]:
        """Make the edit; returns a function that undoes it."""
        before = self.owner[self.key] if isinstance(self.owner, dict) else getattr(self.owner, self.key)
        write(self.owner, self.key, self.value)
        return lambda: write(self.owner, self.key, before)


def padding_of(vocabulary: Vocabulary) -> frozenset[int]:
    """The rows that any embedding of the vocabulary uses for padding."""
    found = (slot.module.__dict__.get("padding_idx") for axis in vocabulary.axes for slot in axis.slots)
    return frozenset(at for at in found if isinstance(at, int) and at >= 0)


def edits_of(model: nn.Module, vocabulary: Vocabulary, selection: Selection) -> list[Edit]:
    """All edits, collected before any is made: sizes, then ids.

    Raises:
        UsageError: a token that an embedding, a module or a config names would be dropped, or the padding token, from
            which a table of positions counts, would move.
    """
    moves = _moves(selection)
    return [
        *_module_sizes(model, vocabulary, selection),
        *_config_sizes(model, vocabulary, selection),
        *_module_ids(model, vocabulary, moves),
        *_config_ids(model, vocabulary, moves),
    ]


# --- sizes -----------------------------------------------------------------------------------------------------------


def _module_sizes(model: nn.Module, vocabulary: Vocabulary, selection: Selection) -> Iterator[Edit]:
    keys = {stated.path.rpartition(".")[2] for stated in vocabulary.stated}
    own = SIZES if not keys or keys & {"vocab_size", *BESIDE} else ()
    axes = sorted(vocabulary.axes, key=lambda axis: axis.tensor.ndim)  # the head's matrix decides before its bias
    holders = {id(slot.module): axis for axis in axes for slot in axis.slots}
    for module in _holding(model, vocabulary):
        axis = holders.get(id(module))
        if axis is not None and _stores_sizes(module, axis):
            yield Edit(module, _length_key(module, axis), selection.size + axis.excess)
            continue
        excess = 0 if axis is None else axis.excess
        old, new = vocabulary.size + excess, selection.size + excess
        stated = own if axis is None else SIZES
        yield from (Edit(module, key, new) for key in stated if _whole(module.__dict__.get(key)) == old)


def _stores_sizes(module: nn.Module, axis: Axis) -> bool:
    return axis.tensor.ndim == 2 and isinstance(module, (nn.Embedding, nn.EmbeddingBag, nn.Linear, TableEnd))


def _length_key(module: nn.Module, axis: Axis) -> str:
    names = ("out_features", "in_features") if is_head(module) else ("num_embeddings", "embedding_dim")
    return names[axis.axis]


def _config_sizes(model: nn.Module, vocabulary: Vocabulary, selection: Selection) -> Iterator[Edit]:
    seen: set[tuple[int, str]] = set()
    per_layer = next((axis for axis in vocabulary.axes if axis.stand_in is not None), None)
    wanted: dict[str, tuple[int | None, int]] = {PER_LAYER: (None, 0)}
    if per_layer is not None:
        wanted[PER_LAYER] = (per_layer.length, selection.size + per_layer.excess)
    for stated in vocabulary.stated:
        level, key = _leaf(stated)
        if _whole(at(level, key)) is not None:  # even if it was wrong before: the next load builds the tensors by it
            seen.add((id(level), key))
            yield Edit(level, key, selection.size)
    for level, own_key in [*_stating_levels(vocabulary), *_copies(model, vocabulary)]:
        keys = (own_key, *BESIDE, PER_LAYER) if own_key in ("vocab_size", *BESIDE) else (own_key,)
        for key in keys:
            old, new = wanted.get(key, (vocabulary.size, selection.size))
            if old is not None and (id(level), key) not in seen and _whole(at(level, key)) == old:
                seen.add((id(level), key))
                yield Edit(level, key, new)


def _stating_levels(vocabulary: Vocabulary) -> Iterator[tuple[Any, str]]:
    """The config levels on the way to the key that states the size, each with its key for these tokens, if any."""
    for stated in vocabulary.stated:
        *parents, key = stated.path.split(".")
        level = stated.config
        yield level, key if not parents or key == "vocab_size" else ""
        for depth, parent in enumerate(parents, 1):
            level = at(level, parent)
            if level is None:
                break
            yield level, key if depth == len(parents) or key == "vocab_size" else ""


def _leaf(stated: Stated) -> tuple[Any, str]:
    """The level that holds the size, and its key; older configs have the text model's keys at the top."""
    path, _, key = stated.path.rpartition(".")
    level = at(stated.config, path) if path else stated.config
    return (stated.config if level is None else level), key


def _copies(model: nn.Module, vocabulary: Vocabulary) -> Iterator[tuple[Any, str]]:
    """Further config levels that count these tokens: those of the parts that hold the tensors.

    A part is built from its own config, which may be a copy (a T5's encoder and decoder) or a level of another kind
    (Blt's local encoder): every level of the stating one's kind counts, and the nearest config above a tensor.
    """
    kinds: dict[type, str] = {}
    for stated in vocabulary.stated:
        leaf, key = _leaf(stated)
        kinds[type(leaf)] = key
    for module in _holding(model, vocabulary):
        config = module.__dict__.get("config")
        for _, level in levels(config) if config is not None else ():
            if type(level) in kinds and not isinstance(level, Mapping):
                yield level, kinds[type(level)]
    if "vocab_size" in kinds.values():
        yield from ((config, "vocab_size") for name in vocabulary.names if (config := _nearest_config(model, name)))


def _nearest_config(model: nn.Module, name: str) -> Any:
    while name:
        name = name.rpartition(".")[0]
        config = model.get_submodule(name).__dict__.get("config")
        if config is not None:
            return config
    return None


# --- ids -------------------------------------------------------------------------------------------------------------


def _moves(selection: Selection) -> TokenMoves:
    """Old ids to new ones."""
    remap = selection.remap.tolist()

    def way_out(token: int, where: str) -> str:
        return f"keep token {token} by a list of ids such as [*range(n), {token}], or change {where} first"

    return TokenMoves({old: new for old, new in enumerate(remap) if new != old}, way_out)


def _module_ids(model: nn.Module, vocabulary: Vocabulary, moves: TokenMoves) -> Iterator[Edit]:
    if not moves.changed:
        return
    mine = {id(module) for module in _holding(model, vocabulary)}
    for name, module in model.named_modules():
        padding = _whole(module.__dict__.get("padding_idx"))
        counts_from_it = re.search(r"pos(ition|$|_)", f"{name} {type(module).__name__}".lower()) is not None
        if id(module) not in mine and padding in moves.changed and counts_from_it:
            raise UsageError(
                f"{name} counts positions from the padding token, {padding}, which would be moved or dropped",
                help=f"keep the padding token at id {padding}: list it at that place",
            )
        if id(module) not in mine:
            continue
        for key, value in list(module.__dict__.items()):
            if (key == "padding_idx" or TOKEN_IDS.fullmatch(key)) and not key.startswith("_"):
                yield from _moved(module, key, value, f"{name}.{key}" if name else key, moves)


def _config_ids(model: nn.Module, vocabulary: Vocabulary, moves: TokenMoves) -> Iterator[Edit]:
    if not moves.changed:
        return
    foreign = [stated.path.startswith(ANOTHER_VOCABULARYS_ROOT) for stated in vocabulary.stated]
    roots = {id(stated.config) for stated, other in zip(vocabulary.stated, foreign, strict=True) if other}
    seen: set[int] = set(roots)
    for level, _ in [*_stating_levels(vocabulary), *_copies(model, vocabulary)]:
        if id(level) not in seen:
            seen.add(id(level))
            yield from _ids_of(level, "config", moves)
    if not any(foreign):
        for module in _holding(model, vocabulary):
            generation = module.__dict__.get("generation_config")
            if generation is not None and id(generation) not in seen:
                seen.add(id(generation))
                yield from _ids_of(generation, "generation_config", moves)


def _ids_of(level: Any, where: str, moves: TokenMoves) -> Iterator[Edit]:
    members = level if isinstance(level, Mapping) else getattr(level, "__dict__", {})
    for key, value in list(members.items()):
        if isinstance(key, str) and TOKEN_IDS.fullmatch(key):
            yield from _moved(level, key, value, f"{where}.{key}", moves)


def _moved(owner: Any, key: str, value: Any, where: str, moves: TokenMoves) -> Iterator[Edit]:
    new = moves(key, value, where)
    if new != value:
        yield Edit(owner, key, new)


def _holding(model: nn.Module, vocabulary: Vocabulary) -> Iterator[nn.Module]:
    """Modules that hold one of the vocabulary's tensors, at any depth."""
    names = vocabulary.names
    for prefix, module in model.named_modules():
        if prefix == "" or any(name.startswith(prefix + ".") for name in names):
            yield module


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
