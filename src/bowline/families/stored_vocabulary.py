"""Finds the tensors of a file that have a vocabulary axis, and where the config states how long it is."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bowline.errors import TieError
from bowline.families.config_levels import config_levels
from bowline.families.name_patterns import infer_vocabulary
from bowline.families.quirks import quirks_of
from bowline.families.resolver import Shapes, Spelling, architecture_of, resolve, stated_size
from bowline.families.transformers_table import ArchitectureFacts, Declared, load_table, lookup

__all__ = ["BESIDE", "PER_LAYER", "StoredAxis", "StoredVocabulary", "any_layer", "stored_vocabulary"]

PER_LAYER = "vocab_size_per_layer_input"
"""Gemma 3n and 4: a second table that the same token ids look up; ids past its end look up row 0."""
BESIDE = ("src_vocab_size", "tgt_vocab_size", "decoder_vocab_size")
"""Keys beside a config's `vocab_size` that count the same tokens if they are equal to it (FSMT, Marian)."""
NAMED_HELP = "convert it with the tool that made it, or resize the model that transformers loads (bowline.resize_vocab)"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAxis:
    """One tensor's vocabulary axis; `excess` is how much longer than the vocabulary it is.

    `stand_in` is the row used for the tokens that a shorter axis leaves out.
    """

    axis: int
    excess: int = 0
    stand_in: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredVocabulary:
    """All axes of one vocabulary by tensor name, its number of tokens, and the keys of the config that state it.

    `levels` are the levels of the config whose token ids belong to this vocabulary. `fixed_ids` is true if the model
    computes with the ids themselves, so that no id may change.
    """

    size: int
    axes: Mapping[str, StoredAxis]
    stated: tuple[tuple[str, ...], ...]
    levels: tuple[tuple[str, ...], ...]
    per_layer: tuple[tuple[str, ...], ...] = ()
    fixed_ids: bool = False

    @property
    def tail(self) -> int:
        """The number of rows past the vocabulary in the longest axis."""
        return max(0, *(axis.excess for axis in self.axes.values()))


def stored_vocabulary(config: Mapping[str, Any], shapes: Shapes) -> StoredVocabulary:
    """Find the vocabulary of a file by its config and the names and shapes of its tensors.

    For a class of the table these are the tensors that the table names. For another class they are the embedding, the
    head and their biases; a further tensor with an axis of that length is refused, since it may or may not belong.

    Raises:
        TieError: there is no vocabulary, there are several, or a tensor's axis cannot be told.

    Example:
        >>> config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 50257}
        >>> found = stored_vocabulary(config, {"transformer.wte.weight": (50257, 768)})
        >>> found.size, found.axes, found.stated
        (50257, {'transformer.wte.weight': StoredAxis(axis=0, excess=0, stand_in=None)}, (('vocab_size',),))
    """
    architecture = architecture_of(config, shapes)
    return _known(architecture, config, shapes) if architecture is not None else _inferred(config, shapes)


def any_layer(name: str) -> re.Pattern[str]:
    """A pattern of the names that differ from this one by the numbers of layers alone."""
    return re.compile(re.sub(r"(?<=\\\.)\d+(?=\\\.)", r"\\d+", re.escape(name)))


def _known(architecture: ArchitectureFacts, config: Mapping[str, Any], shapes: Shapes) -> StoredVocabulary:
    declared, spell = architecture.newest, Spelling(architecture, shapes)
    family, quirks = load_table().family(architecture.family), quirks_of(architecture.family)
    own_path = family.vocab_size if family and family.vocab_size else "vocab_size"
    path, *also = quirks.counted_by.get(architecture.name, (own_path,))
    others = {key: _present(names, spell) for key, names in declared.other_vocabularies.items()}
    if declared.embedding is None and "text_config" not in path and any(others.values()):
        raise TieError(
            f"{architecture.name} has several vocabularies, none of them its input embedding's: {', '.join(others)}",
            help=NAMED_HELP,
        )
    axes = _present(declared.vocabulary, spell)
    same = (*also, *quirks.same_tokens)
    for key in same:
        axes |= others.get(key, {})
    if not axes:
        raise TieError(
            f"no tensor of {architecture.name}'s vocabulary is stored, "
            f"expected {', '.join(declared.vocabulary) or 'one'}",
            help="check that the names carry no wrapper's prefix: `bowline audit` names one",
        )
    stated = stated_size(config, path)
    longer = _longer(declared, spell, axes)
    if quirks.prompt_rows and stated is not None:
        longer = {name: shapes[name][axis] - stated.value for name, axis in axes.items()}
    size = _size(architecture.name, shapes, axes, longer, stated.value if stated else None)
    per_layer = {name: axis for key, names in others.items() if key.endswith(PER_LAYER) for name, axis in names.items()}
    found = {name: StoredAxis(axis=axis, excess=shapes[name][axis] - size) for name, axis in axes.items()}
    found |= {
        name: StoredAxis(axis=axis, excess=shapes[name][axis] - size, stand_in=0) for name, axis in per_layer.items()
    }
    keys = (stated.path if stated else path, *same)
    return StoredVocabulary(
        size=size,
        axes=found,
        **_stated(config, keys, size, {shapes[name][axis] for name, axis in per_layer.items()}),
        fixed_ids=quirks.hashes_ids,
    )


def _present(names: Mapping[str, int], spell: Spelling) -> dict[str, int]:
    """Those of the table's tensors that are stored; a numbered one stands for its like in every layer."""
    found: dict[str, int] = {}
    for declared, axis in names.items():
        name = spell(declared)
        if name not in spell.shapes:
            continue
        found[name] = axis
        if re.search(r"\.\d+\.", name):
            pattern, shape = any_layer(name), spell.shapes[name]
            found |= {
                other: axis for other in spell.shapes if pattern.fullmatch(other) and spell.shapes[other] == shape
            }
    return found


def _longer(declared: Declared, spell: Spelling, axes: Mapping[str, int]) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for name, excess in declared.longer.items():
        pattern = any_layer(spell(name))
        found |= {stored: excess for stored in axes if pattern.fullmatch(stored)}
    return found


def _size(
    name: str, shapes: Shapes, axes: Mapping[str, int], longer: Mapping[str, int | None], stated: int | None
) -> int:
    """How many tokens: what the config says if the tensors agree, else what the tensors say."""
    unknown = [tensor for tensor in axes if longer.get(tensor, 0) is None]
    if unknown:
        raise TieError(f"{name} does not have one row for each token in {', '.join(unknown)}", help=NAMED_HELP)
    lengths = {tensor: shapes[tensor][axis] for tensor, axis in axes.items()}
    bare = {tensor: length - (longer.get(tensor) or 0) for tensor, length in lengths.items()}
    alike = len(set(lengths.values())) == 1
    if stated is not None and stated in bare.values() and (alike or len(set(bare.values())) == 1):
        return stated  # alike, though one should be longer: a tie made the other as long
    for sizes in (lengths, bare):
        if len(set(sizes.values())) == 1:
            return next(iter(sizes.values()))
    short, long = (chosen(bare, key=lambda tensor: bare[tensor]) for chosen in (min, max))
    raise TieError(
        f"{short} has {lengths[short]} rows and {long} has {lengths[long]}, expected one vocabulary size",
        help="`bowline audit` says what loaders do with it; correct the shorter one first",
    )


def _inferred(config: Mapping[str, Any], shapes: Shapes) -> StoredVocabulary:
    declaration = resolve(config, shapes)
    axes = infer_vocabulary(shapes, declaration.embedding, declaration.head)
    if declaration.embedding is None:
        raise TieError("no input embedding was found among the tensors, so the vocabulary is unknown", help=NAMED_HELP)
    size = shapes[declaration.embedding][0]
    unclear = [name for name, shape in shapes.items() if size in shape and name not in axes]
    if unclear or shapes[declaration.embedding][1] == size:
        named = ", ".join(f"{name} {list(shapes[name])}" for name in unclear[:4]) or declaration.embedding
        raise TieError(
            f"{declaration.architecture or 'a class without a name'} is not in the table, and {named} may or may not "
            f"have one row for each of the {size} tokens",
            help=NAMED_HELP,
        )
    path = declaration.vocab_size.path if declaration.vocab_size else "vocab_size"
    found = {name: StoredAxis(axis=0, excess=shapes[name][0] - size) for name in axes}
    return StoredVocabulary(size=size, axes=found, **_stated(config, (path,), size, set()))


def _stated(config: Mapping[str, Any], paths: tuple[str, ...], size: int, per_layer: set[int]) -> dict[str, Any]:
    """The keys that state the size, and the levels on the way to them; older configs have the text model's at the top.

    A key that is stated at its own place counts even if its number was wrong: the next load builds tensors by it.
    """
    stated: dict[tuple[str, ...], None] = {}
    second: dict[tuple[str, ...], None] = {}
    levels: dict[tuple[str, ...], None] = {}
    by_keys = dict(config_levels(config))
    for path in paths:
        *parents, key = path.split(".")
        if type(lookup(config, path)) is int:
            stated[(*parents, key)] = None
        for depth in range(len(parents) + 1):
            at = tuple(parents[:depth])
            if at in by_keys:
                levels[at] = None
                stated |= dict.fromkeys(_counting(by_keys[at], at, key if depth == len(parents) else "", size))
                second |= {(*at, PER_LAYER): None for count in per_layer if by_keys[at].get(PER_LAYER) == count}
    return {"stated": tuple(stated), "levels": tuple(levels), "per_layer": tuple(second)}


def _counting(level: Mapping[str, Any], at: tuple[str, ...], key: str, size: int) -> Iterator[tuple[str, ...]]:
    own = key if not at or key else "vocab_size"
    for one in (own or "vocab_size", *BESIDE):
        if type(level.get(one)) is int and level[one] == size:
            yield (*at, one)
