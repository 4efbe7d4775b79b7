"""Finds the vocabulary axes of live modules whose class is in the families' table."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from bowline.errors import TieError
from bowline.families.quirks import quirks_of
from bowline.families.stored_vocabulary import PER_LAYER, any_layer
from bowline.families.transformers_table import ArchitectureFacts, Declared, load_table
from bowline.nn.tree.sharding import class_name
from bowline.nn.tree.slots import Slot, slot

__all__ = ["KnownPart", "known_parts"]


@dataclass(frozen=True, slots=True, eq=False)
class KnownPart:
    """A module whose class is in the table: its vocabulary's tensors by live name, each with its axis and excess."""

    prefix: str
    module: nn.Module
    path: str
    axes: Mapping[str, int]
    longer: Mapping[str, int | None]
    per_layer: Mapping[str, int] = field(default_factory=dict)
    others: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    same_tokens: tuple[str, ...] = ()
    fixed_ids: bool = False
    exact: bool = True
    """Whether the module is of the table's class itself; a subclass may have added a head."""

    @property
    def config(self) -> Any:
        """The module's config, if it has one."""
        return self.module.__dict__.get("config")

    def size(self, known: Mapping[str, Slot]) -> int:
        """How many tokens: what the config says if the tensors agree, else what the tensors say.

        Raises:
            TieError: the tensors contradict each other, or their length depends on the vocabulary in a way that the
                table does not describe.
        """
        unknown = [name for name in self.axes if self.longer.get(name, 0) is None]
        if unknown:
            raise TieError(
                f"{type(self.module).__name__} does not have one row for each token in {', '.join(unknown)}",
                help="name the tensors and axes to resize: axes={name: axis}",
            )
        lengths = {name: int(known[name].tensor.shape[axis]) for name, axis in self.axes.items()}
        bare = {name: length - (self.longer.get(name) or 0) for name, length in lengths.items()}
        stated = at(self.config, self.path)
        alike = len(set(lengths.values())) == 1
        if stated in bare.values() and (alike or len(set(bare.values())) == 1):
            return int(stated)  # alike, though one should be longer: a tie made the other as long
        for sizes in (lengths, bare):
            if len(set(sizes.values())) == 1:
                return next(iter(sizes.values()))
        short, long = (chosen(bare, key=lambda name: bare[name]) for chosen in (min, max))
        raise TieError(
            f"{short} has {lengths[short]} rows and {long} has {lengths[long]}, expected one vocabulary size",
            help="name the tensors and axes to resize: axes={name: axis}",
        )


def at(config: Any, path: str) -> Any:
    """The value at a dotted path of a live config, or `None`."""
    for key in path.split("."):
        config = config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)
    return config


def known_parts(model: nn.Module, known: Mapping[str, Slot], *, strict: bool = True) -> list[KnownPart]:
    """The outermost modules that the table knows and that have a vocabulary; unless `strict`, whatever its state.

    Raises:
        TieError: a module's weight that the table names is computed, packed or wrapped; or a model has several
            vocabularies and none that is its input's.
    """
    parts: list[KnownPart] = []
    for prefix, module in model.named_modules():
        inside = any(part.prefix == "" or prefix.startswith(part.prefix + ".") for part in parts)
        architecture = None if inside else _architecture(module)
        if architecture is not None:
            part = _part(model, prefix, module, architecture, known, strict)
            if part is not None and (part.axes or not strict):
                parts.append(part)
    return parts


def _architecture(module: nn.Module) -> ArchitectureFacts | None:
    table = load_table()
    for cls in type(module).__mro__:
        if cls is nn.Module:
            break
        found = table.architecture(cls.__name__)
        if found is not None and (_is_transformers(cls) or _same_layout(module, _declared(found))):
            return found
    return None


def _is_transformers(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "transformers"


def _same_layout(module: nn.Module, declared: Declared) -> bool:
    """Whether a class of the same name from elsewhere holds its embedding under the same name."""
    names = dict(module.named_parameters(remove_duplicate=False))
    return declared.embedding is not None and _live(declared, declared.embedding) in names


def _declared(architecture: ArchitectureFacts) -> Declared:
    """What the class declares in the version of transformers that is loaded."""
    version = getattr(sys.modules.get("transformers"), "__version__", "").partition(".")[0]
    return architecture.declared.get(f"transformers-{version}", architecture.newest)


def _live(declared: Declared, name: str) -> str:
    return declared.module_names.get(name, name)


def _part(
    model: nn.Module,
    prefix: str,
    module: nn.Module,
    architecture: ArchitectureFacts,
    known: Mapping[str, Slot],
    strict: bool,
) -> KnownPart | None:
    declared = _declared(architecture)
    family = load_table().family(architecture.family)
    path = family.vocab_size if family and family.vocab_size else "vocab_size"
    quirks = quirks_of(architecture.family)
    path, *also = quirks.counted_by.get(architecture.name, (path,))
    others = {
        key: _present(model, prefix, declared, names, known, strict=False)
        for key, names in declared.other_vocabularies.items()
    }
    if strict and declared.embedding is None and "text_config" not in path and any(others.values()):
        candidates = "; ".join(f"{key}: {', '.join(names)}" for key, names in others.items() if names)
        raise TieError(
            f"{type(module).__name__} has several vocabularies, and none belongs to its input embedding: {path}: "
            f"{', '.join(declared.vocabulary) or 'no tensor'}; {candidates}",
            help="resize one of its parts, or name the tensors and axes: axes={name: axis}",
        )
    axes = _present(model, prefix, declared, declared.vocabulary, known, strict)
    same = (*also, *quirks.same_tokens)
    for key in same:
        axes |= others.get(key, {})
    if not axes and not any(others.values()):
        return None
    longer = _longer(prefix, declared, axes)
    stated = at(module.__dict__.get("config"), path)
    if quirks.prompt_rows and isinstance(stated, int):
        longer = {name: int(known[name].tensor.shape[axis]) - stated for name, axis in axes.items()}
    per_layer = {name: axis for key, names in others.items() if key.endswith(PER_LAYER) for name, axis in names.items()}
    exact = class_name(module) == architecture.name
    return KnownPart(prefix, module, path, axes, longer, per_layer, others, same, quirks.hashes_ids, exact)


def _longer(prefix: str, declared: Declared, axes: Mapping[str, int]) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for name, excess in declared.longer.items():
        pattern = any_layer(_join(prefix, _live(declared, name)))
        found |= {live: excess for live in axes if pattern.fullmatch(live)}
    return found


def _present(
    model: nn.Module,
    prefix: str,
    declared: Declared,
    names: Mapping[str, int],
    known: Mapping[str, Slot],
    strict: bool,
) -> dict[str, int]:
    """Those of the table's tensors that this model has; a numbered one stands for its like in every layer."""
    found: dict[str, int] = {}
    for stored, axis in names.items():
        name = _join(prefix, _live(declared, stored))
        if name not in known:
            if strict:
                _refuse_if_replaced(model, name, known)
            continue
        found[name] = axis
        pattern, shape = any_layer(name), known[name].tensor.shape
        if re.search(r"\.\d+\.", name):
            alike = (other for other in known if pattern.fullmatch(other))
            found |= {other: axis for other in alike if known[other].tensor.shape == shape}
    return found


def _refuse_if_replaced(model: nn.Module, name: str, known: Mapping[str, Slot]) -> None:
    """A module that is there without its weight has been quantised, parametrized or given an adapter."""
    path, _, attribute = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return
    if attribute != "weight" or attribute in module._parameters or isinstance(module, nn.Identity):
        return
    if hasattr(module, "weight") or any(other.startswith(path + ".") for other in known):
        try:
            slot(model, name, dict(known))
        except TieError as error:
            raise TieError(
                f"{error.message}; resize_vocab has to resize it",
                help=error.help or "merge adapters, dequantise and remove parametrizations before resizing",
            ) from None


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
