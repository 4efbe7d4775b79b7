"""The record of one class: its vocabulary, its ties with their gates, and the names that its tensors have on disk."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import transformers

from tools.inspection.configurations import default_flags, integer_paths, is_vocabulary_key, switches
from tools.inspection.gates import Truth, flat_gates, gate, without_detours
from tools.inspection.models import in_every_setting, most_tied, on_meta, tensors
from tools.inspection.saved_names import disk_names
from tools.inspection.ties import Pair, declared_pairs, is_tied, made_pairs, module_weight, owned_by_target
from tools.inspection.vocabulary import STEP, Axes, axes_by_key, width_path
from tools.tiny import Json, default_config, load_class, tiny_dict

MOST_SPARE_ROWS = 8
"""A larger excess over the vocabulary's size comes from other keys of the configuration, and is not the class's."""

COMPOSITE = ("encoder-decoder", "rag", "speech-encoder-decoder", "vision-encoder-decoder", "vision-text-dual-encoder")
"""Families whose tensors are those of any two models put together: they have no names of their own."""


def inspect(names: list[str]) -> Json:
    """The facts of `names`: classes, families, and the reason for each class that could not be built."""
    found: Json = {"version": transformers.__version__, "classes": {}, "flags": {}, "failed": {}}
    for name in names:
        try:
            cls = load_class(name)
        except LookupError:
            continue
        except Exception as error:
            found["failed"][name] = {"declares": None, "reason": _reason(error)}
            continue
        family = cls.config_class.model_type
        try:
            known = facts(cls)
            if family not in found["flags"]:
                found["flags"][family] = default_flags(default_config(cls))
        except Exception as error:
            declares = bool(getattr(cls, "_tied_weights_keys", None)) or family in COMPOSITE
            found["failed"][name] = {"declares": declares, "reason": _reason(error)}
            continue
        if known is not None:
            found["classes"][name] = {"family": family, "prefix": cls.base_model_prefix, **known}
    return found


def facts(cls: type[Any]) -> Json | None:
    """Everything the table says of a class in this version; None for a class without a vocabulary of its own."""
    if cls.config_class.model_type in COMPOSITE:
        raise LookupError("composite: its tensors are those of the models it is made of")
    content = tiny_dict(cls)
    if not any(map(is_vocabulary_key, integer_paths(content))):
        return None
    paths = switches(content)
    content_tied = most_tied(cls, content, paths)
    model = on_meta(cls, content_tied)
    by_path = axes_by_key(cls, content_tied, model)
    embedding, head = (module_weight(model, f"get_{end}_embeddings") for end in ("input", "output"))
    tables = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, torch.nn.Embedding)}
    rows = {name for axes in by_path.values() for name, (axis, _) in axes.items() if axis == 0}
    if not rows & {*tables, embedding}:
        return None
    any_vocabulary = {name for axes in by_path.values() for name in axes}
    embedding = embedding if embedding in any_vocabulary else None
    head = head if head in any_vocabulary else None
    main = next((path for path, axes in by_path.items() if embedding in axes), None) or max(
        by_path, key=lambda path: (not tables.isdisjoint(by_path[path]), len(by_path[path]))
    )
    step = by_path[main][embedding][1] if embedding in by_path[main] else STEP
    vocabulary = {name: axis for name, (axis, change) in by_path[main].items() if change == step}

    declared = set(declared_pairs(model).items())
    models = in_every_setting(cls, content, paths)
    known = declared.union(*(made_pairs(model) for model in models.values()))
    pairs = {pair for pair in known if any_vocabulary & set(pair) and pair[::-1] not in declared}
    truth = {pair: {setting: is_tied(model, *pair) for setting, model in models.items()} for pair in pairs}
    made = without_detours(truth)
    others = {
        path: {name: axis for name, (axis, _) in sorted(axes.items()) if name not in vocabulary}
        for path, axes in sorted(by_path.items())
        if path != main and not axes.keys() <= vocabulary.keys()
    }
    wanted = {*vocabulary, *itertools.chain(*others.values()), *itertools.chain(*made)} | {
        name for name in (embedding, head) if name
    }
    on_disk = disk_names(cls, content_tied, wanted)

    def disk(name: str | None) -> str | None:
        return None if name is None else on_disk.get(name, name)

    shapes = tensors(model) | tensors(models.get((False,) * len(paths), model))  # untied, each has its own
    steps = {path: step if path == main else STEP for path in (main, *others)}
    excess = spare_rows(integer_paths(content_tied), by_path, {main: vocabulary} | others, steps, shapes)
    never = [f"{target} <- {source}" for (target, source), table in sorted(truth.items()) if not any(table.values())]
    declaration: Json = {
        "ties": tie_records(
            paths, made, flat_gates(cls, content, made), owned_by_target(cls, content_tied, made), disk
        ),
        "embedding": disk(embedding),
        "head": disk(head),
        "vocabulary": {str(disk(name)): axis for name, axis in sorted(vocabulary.items())},
        "longer": dict(sorted({str(disk(name)): rows for name, rows in excess.items()}.items())),
        "module_names": {on_disk[name]: name for name in sorted(on_disk) if on_disk[name] != name},
    }
    if others:
        declaration["other_vocabularies"] = {
            path: {str(disk(name)): axis for name, axis in axes.items()} for path, axes in others.items()
        }
    return {
        "vocab_size": main,
        "hidden_size": width_path(cls, content, embedding, main) if embedding else None,
        "never_made": never,
        "other_ties": len(declared - pairs),
        "declaration": declaration,
    }


def spare_rows(
    sizes: dict[str, int],
    by_path: dict[str, Axes],
    vocabularies: dict[str, dict[str, int]],
    steps: dict[str, int],
    shapes: dict[str, torch.Tensor],
) -> dict[str, int | None]:
    """{name: rows beyond the vocabulary's size} of the longer tensors; None where the excess has another cause."""
    longer: dict[str, int | None] = {}
    for path, names in vocabularies.items():
        for name, axis in names.items():
            excess = shapes[name].shape[axis] - sizes[path]
            follows = by_path[path][name][1] == steps[path] and abs(excess) <= MOST_SPARE_ROWS
            if excess or not follows:
                longer[name] = excess if follows else None
    return longer


def tie_records(
    paths: list[str],
    made: dict[Pair, Truth],
    without_text_config: dict[Pair, Json],
    backwards: Iterable[Pair],
    disk: Callable[[str], str | None],
) -> list[Json]:
    """Each tie as the table holds it: its ends on disk, its gate, and its owner where that is the target."""
    ties = []
    for target, source in sorted(made):
        tie = {"target": disk(target), "source": disk(source), "gate": gate(paths, made[target, source])}
        if (target, source) in without_text_config:
            tie["flat_gate"] = without_text_config[target, source]
        if (target, source) in backwards:
            tie["owner"] = "target"
        ties.append(tie)
    return ties


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:160]}"
