"""Gives every tensor of the vocabulary other rows, and the configs the sizes and ids that follow from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from bowline.auditing.quantised_names import in_other_form
from bowline.checkpoint.checkpoint import CONFIG
from bowline.edit.content import ChosenRows
from bowline.edit.dequantised_table import is_own_table
from bowline.edit.draft import GENERATION_CONFIG, Draft
from bowline.edit.made_rows import Mixed, made_rows, mean_row
from bowline.errors import TieError, UsageError
from bowline.families.config_levels import config_levels
from bowline.families.stored_vocabulary import StoredAxis, StoredVocabulary, stored_vocabulary
from bowline.families.token_ids import DROPPED, TOKEN_IDS, TokenMoves, named_tokens

__all__ = ["RowSelection", "named_ids", "refuse_quantised", "vocabulary_of", "with_rows"]

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class RowSelection:
    """A selection of tokens: the `kept` old ids become the first new ids, in their order; rows up to `size` are new."""

    old_size: int
    size: int
    kept: Ids

    @property
    def in_place(self) -> bool:
        """Whether every token that stays keeps its id."""
        return bool((self.kept == np.arange(len(self.kept))).all())

    def remap(self, tail: int = 0) -> Ids:
        """Old id to new id, -1 where the token is dropped; the `tail` rows past the vocabulary stay past it."""
        remap = np.full(self.old_size + tail, DROPPED, np.int64)
        remap[self.kept] = np.arange(len(self.kept))
        remap[self.old_size :] = np.arange(self.size, self.size + tail)
        return remap

    def origins(self, axis: StoredAxis) -> Ids:
        """The old row of each row, or -1, for a tensor of this axis."""
        held = self.old_size + min(axis.excess, 0)
        rows = np.full(self.size + axis.excess, -1, np.int64)
        kept = np.where(self.kept < held, self.kept, -1 if axis.stand_in is None else axis.stand_in)[: len(rows)]
        rows[: len(kept)] = kept
        if axis.excess > 0:
            rows[self.size :] = np.arange(self.old_size, self.old_size + axis.excess)
        return rows


def vocabulary_of(draft: Draft) -> StoredVocabulary:
    """The draft's vocabulary. Raises `TieError` for a table that is stored quantised, or an unknown one."""
    vocabulary = stored_vocabulary(draft.config, draft.shapes)
    refuse_quantised(draft, vocabulary.axes)
    return vocabulary


def refuse_quantised(draft: Draft, names: Mapping[str, Any] | tuple[str, ...]) -> None:
    """Raise if one of these tensors, or one that its class declares, is stored quantised.

    Raises:
        TieError: it is.
    """
    declaration = draft.declaration
    ends = [name for tie in declaration.ties for name in (tie.tie.target, tie.tie.source)]
    for name in dict.fromkeys([*names, *ends]):
        if in_other_form(name, draft.tensors):
            raise TieError(
                f"{name}: is stored quantised, expected a plain float tensor",
                help="`bowline export DIR FLOATS --to hf` writes it in floats"
                if is_own_table(draft.source.config)
                else "edit the checkpoint that it was quantised from, or dequantise it with the tool that quantised it",
            )


def named_ids(draft: Draft, levels: tuple[tuple[str, ...], ...]) -> dict[int, str]:
    """Each token id that these levels of the config, or the generation config, name, with the place."""
    found: dict[int, str] = {}
    for keys, level in config_levels(draft.config):
        if keys in levels:
            for token, key in named_tokens(level).items():
                found.setdefault(token, f"{CONFIG}: {'.'.join((*keys, key))}")
    generation = draft.json(GENERATION_CONFIG)
    if isinstance(generation, dict):
        for token, key in named_tokens(generation).items():
            found.setdefault(token, f"{GENERATION_CONFIG}: {key}")
    return found


def with_rows(
    draft: Draft,
    vocabulary: StoredVocabulary,
    selection: RowSelection,
    rule: str,
    way_out: str,
    pieces: Mapping[int, Sequence[int]] = MappingProxyType({}),
) -> Draft:
    """The draft with the selected rows in every tensor of the vocabulary, and its configs after them.

    New rows are made by `rule` from each tensor's own rows, or are the mean of old rows where `pieces` lists their ids
    for the new id; such a row may also be in place of an old one, which no token has. `way_out` is the help of the
    error about a token that a config names and the selection drops.

    Raises:
        UsageError: a config names a token that goes, or the model computes with ids and one would change.
    """
    if vocabulary.fixed_ids and not selection.in_place:
        raise UsageError(
            f"{draft.declaration.architecture} hashes token ids, so no token can get another id",
            help="keep the first ids in their order: `bowline resize --to`",
        )
    padding = draft.config.get("pad_token_id")
    skipped = frozenset([padding] if type(padding) is int else [])
    tensors = dict(draft.tensors)
    for name, axis in vocabulary.axes.items():
        content, origins = tensors[name], selection.origins(axis)
        means = {row: ids for row, ids in pieces.items() if row < len(origins)}
        origins[list(means)] = -1
        if np.array_equal(origins, np.arange(content.shape[axis.axis])):
            continue
        count = int((origins < 0).sum())
        new = made_rows(rule, content, axis.axis, selection.old_size, count, skipped, name) if count else None
        if new is not None and means:
            places = np.flatnonzero(origins < 0).tolist()
            of_pieces = {places.index(row): mean_row(content, axis.axis, ids) for row, ids in means.items()}
            new = Mixed(new, of_pieces)
        tensors[name] = ChosenRows(content, axis.axis, origins, new)
    edited = replace(draft, tensors=tensors)
    edited = edited.with_values(CONFIG, _sizes(draft, vocabulary, selection))
    return _with_ids(edited, vocabulary, selection, way_out)


def _sizes(draft: Draft, vocabulary: StoredVocabulary, selection: RowSelection) -> dict[tuple[str, ...], Any]:
    sizes: dict[tuple[str, ...], Any] = dict.fromkeys(vocabulary.stated or (("vocab_size",),), selection.size)
    second = next((axis for axis in vocabulary.axes.values() if axis.stand_in is not None), None)
    if second is not None:
        sizes |= dict.fromkeys(vocabulary.per_layer, selection.size + second.excess)
    return sizes


def _with_ids(draft: Draft, vocabulary: StoredVocabulary, selection: RowSelection, way_out: str) -> Draft:
    remap = selection.remap(vocabulary.tail)
    changed = {int(old): int(remap[old]) for old in np.flatnonzero(remap != np.arange(len(remap)))}
    if not changed:
        return draft
    moves = TokenMoves(changed, lambda token, where: way_out)
    levels = [(CONFIG, keys, level) for keys, level in config_levels(draft.config) if keys in vocabulary.levels]
    generation = draft.json(GENERATION_CONFIG)
    if isinstance(generation, dict):
        levels.append((GENERATION_CONFIG, (), generation))
    for file, keys, level in levels:
        values: dict[tuple[str, ...], Any] = {}
        for key, value in level.items():
            if isinstance(key, str) and TOKEN_IDS.fullmatch(key):
                new = moves(key, value, f"{file}: {'.'.join((*keys, key))}")
                if new != value:
                    values[(*keys, key)] = new
        draft = draft.with_values(file, values)
    return draft
