"""Facts about every model class of the transformers version that runs this file, as JSON.

    python -m tools.inspect_transformers names.json
    python -m tools.inspect_transformers facts.json CLASS ...

Nothing is read from source text. Each class is built tiny, many times: once per vocabulary key, to see which axes
follow it; once per combination of flags, to see which ties are made; and once for real, with every tie broken and every
tensor given its own values, to see under which names `save_pretrained` writes them.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import logging
import re
import sys
import tempfile
import types
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from tools.tiny import (
    Json,
    build,
    candidate_names,
    config_from_dict,
    default_config,
    fill,
    load_class,
    tiny_dict,
    without_initialisation,
)

FLAG = "tie_word_embeddings"
OTHER_SWITCHES = {
    "csm": ["tie_codebooks_embeddings"],
    "lfm2": ["tie_embedding"],
    "lfm2_moe": ["tie_embedding"],
    "lfm2_vl": ["tie_embedding"],
    "marian": ["share_encoder_decoder_embeddings"],
}
"""Keys beside the flag that some families read, at the level with that `model_type`."""
STEP = 128
"""How far a vocabulary is moved to see which axes follow it."""
MOST_SPARE_ROWS = 8
"""A larger excess over the vocabulary's size comes from other keys of the configuration, and is not the class's."""

WIDTH_NAMES = ("embedding_size", "hidden_size", "d_model", "n_embd", "emb_dim", "d_embed", "dim", "embed_dim")

COMPOSITE = ("encoder-decoder", "rag", "speech-encoder-decoder", "vision-encoder-decoder", "vision-text-dual-encoder")
"""Families whose tensors are those of any two models put together: they have no names of their own."""

Pair = tuple[str, str]
Setting = tuple[bool | None, ...]
Truth = dict[Setting, bool]


# --- paths in a configuration ----------------------------------------------------------------------------------------


def levels(content: Json, prefix: str = "") -> Iterator[tuple[str, Json]]:
    """The configuration and every configuration inside it, each with its dotted path ("" for the top)."""
    yield prefix, content
    for key, value in content.items():
        if isinstance(value, dict) and "model_type" in value:
            yield from levels(value, f"{prefix}.{key}" if prefix else key)


def integer_paths(content: Json) -> dict[str, int]:
    """Every integer of the configuration, at every level, by its dotted path."""
    return {
        f"{prefix}.{key}" if prefix else key: value
        for prefix, level in levels(content)
        for key, value in level.items()
        if isinstance(value, int) and not isinstance(value, bool)
    }


def is_vocabulary_key(path: str) -> bool:
    """Whether the name of a key says that it may be the size of a vocabulary."""
    key = path.rpartition(".")[2]
    return bool(re.search(r"vocab|^n_tokens?$|^num_tokens$", key)) and "type_vocab" not in key


def changed(content: Json, path: str, value: Any) -> Json:
    """A copy of `content` with another value at a dotted path."""
    content = copy.deepcopy(content)
    *parents, key = path.split(".")
    level = content
    for parent in parents:
        level = level[parent]
    level[key] = value
    return content


def switches(content: Json) -> list[str]:
    """Paths of the keys that may decide a tie: the flag at the top and at each level with words, and its relatives."""
    found = [FLAG]
    for prefix, level in levels(content):
        has_words = "vision" not in prefix and any(is_vocabulary_key(key) for key in level)
        if prefix and has_words and (FLAG in level or "text" in prefix):
            found.append(f"{prefix}.{FLAG}")
    for prefix, level in levels(content):
        others = OTHER_SWITCHES.get(level.get("model_type", ""), [])
        found += [f"{prefix}.{key}" if prefix else key for key in others]
    return found


def with_switches(content: Json, setting: dict[str, bool | None]) -> Json:
    """`content` without any flag at any level, then with the flags of `setting` that are not None."""
    content = copy.deepcopy(content)
    for _, level in levels(content):
        level.pop(FLAG, None)
    for path, value in setting.items():
        *parents, key = path.split(".")
        level = content
        for parent in parents:
            level = level[parent]
        level.pop(key, None)
        if value is not None:
            level[key] = value
    return content


def default_flags(config: Any, prefix: str = "") -> Json:
    """{path: (value the default configuration has there or None, whether the level has a vocabulary)}."""
    path = f"{prefix}.{FLAG}" if prefix else FLAG
    found: Json = {path: [getattr(config, FLAG, None), any(is_vocabulary_key(key) for key in vars(config))]}
    for key, value in vars(config).items():
        if isinstance(value, transformers.PretrainedConfig):
            found |= default_flags(value, f"{prefix}.{key}" if prefix else key)
    return found


# --- models ----------------------------------------------------------------------------------------------------------


def on_meta(cls: type[Any], content: Json) -> Any:
    """A model without storage; a few classes cannot be built so, and are built on the CPU."""
    try:
        with without_initialisation(), torch.device("meta"):
            return cls(config_from_dict(cls.config_class, content))
    except (NotImplementedError, RuntimeError):
        with without_initialisation():
            return cls(config_from_dict(cls.config_class, content))


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers under all their names, shared ones under each."""
    found = dict(model.named_parameters(remove_duplicate=False))
    return found | dict(model.named_buffers(remove_duplicate=False))


def vocabulary_axes(before: Any, after: Any) -> dict[str, tuple[int, int]]:
    """{name: (axis, change)} of the tensors whose shape differs in one axis."""
    old, new = tensors(before), tensors(after)
    axes = {}
    for name, tensor in old.items():
        if name in new and new[name].ndim == tensor.ndim:
            steps = [wide - narrow for narrow, wide in zip(tensor.shape, new[name].shape, strict=True)]
            moved = [axis for axis, step in enumerate(steps) if step]
            if len(moved) == 1:
                axes[name] = moved[0], steps[moved[0]]
    return axes


def module_weight(model: Any, getter: str) -> str | None:
    """Name of the weight of `model.get_input_embeddings()` or `.get_output_embeddings()`: the first path to it."""
    try:
        module = getattr(model, getter)()
    except (NotImplementedError, AttributeError, TypeError):
        return None
    if not isinstance(getattr(module, "weight", None), torch.Tensor):
        return None
    paths = [path for path, found in model.named_modules(remove_duplicate=False) if found is module]
    return f"{paths[0]}.weight".lstrip(".") if paths else None


def declared_pairs(model: Any) -> dict[str, str]:
    """{target: source} that the classes of `model` and of its parts declare, whatever their flags (5.x)."""
    pairs: dict[str, str] = {}
    if not hasattr(model, "get_expanded_tied_weights_keys"):
        return pairs
    forced = types.SimpleNamespace(**{FLAG: True})
    for path, part in model.named_modules(remove_duplicate=False):
        if isinstance(part, transformers.PreTrainedModel):
            config, part.config = part.config, forced  # type: ignore[assignment]
            try:
                expanded = part.get_expanded_tied_weights_keys(all_submodels=False)
            finally:
                part.config = config
            prefix = f"{path}." if path else ""
            pairs |= {prefix + target: prefix + source for target, source in expanded.items()}
    return pairs


def declared_targets(model: Any) -> list[str]:
    """Patterns of the names that the classes of `model` declare as targets."""
    found = []
    for path, part in model.named_modules():
        keys = getattr(part, "_tied_weights_keys", None) or []
        found += [f"{path}.{key}" if path else key for key in keys]
    return found


def made_pairs(model: Any) -> set[Pair]:
    """(target, source) for each further name of a parameter that the model holds under several names.

    The source is the name that a save keeps: the one that no class declares as a target.
    """
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    embedding = module_weight(model, "get_input_embeddings")
    patterns = declared_targets(model)
    found = set()
    for names in groups.values():
        kept = [name for name in names if not any(re.search(pattern, name) for pattern in patterns)] or [max(names)]
        source = embedding if embedding in kept else kept[0]
        found |= {(name, str(source)) for name in names if name != source}
    return found


# --- gates -----------------------------------------------------------------------------------------------------------


def in_every_setting(cls: type[Any], content: Json, paths: list[str]) -> dict[Setting, Any]:
    """A model for each setting of the switches (True, False or None for absent per path) that the family accepts."""
    models = {}
    for setting in itertools.product((True, False, None), repeat=len(paths)):
        try:
            models[setting] = as_loaded(on_meta(cls, with_switches(content, dict(zip(paths, setting, strict=True)))))
        except Exception:
            if not any(setting):
                raise
    return models


def as_loaded(model: Any) -> Any:
    """`model` with the ties that a load makes: every parameter read on its own, then `tie_weights`.

    4.57 shares some tables when a model is built and not again when one is loaded; a checkpoint feels the latter.
    """
    part(model)
    model.tie_weights()
    return model


def owned_by_target(cls: type[Any], content: Json, pairs: Iterable[Pair]) -> set[Pair]:
    """The pairs of which a load keeps the target's own values, if it has any, and gives them to the source.

    That is 4.57's way with some output biases: `self.bias = self.decoder.bias`. In 5.x neither end is overwritten.
    """
    if hasattr(transformers.PreTrainedModel, "get_expanded_tied_weights_keys"):
        return set()
    with without_initialisation():
        model = cls(config_from_dict(cls.config_class, content))
    part(model)
    before = tensors(model)
    model.tie_weights()
    after = tensors(model)
    return {
        (target, source)
        for target, source in pairs
        if {target, source} <= before.keys()
        and before[target] is not before[source]  # one module under two names has nothing to decide
        and after[target] is before[target]
        and after[source] is before[target]
    }


def is_tied(model: Any, target: str, source: str) -> bool:
    """Whether the two names are one parameter, or, for buffers, listed as a tie in force (5.x)."""
    names = tensors(model)
    listed = getattr(model, "all_tied_weights_keys", None) or {}
    same = names.get(target) is not None and names.get(target) is names.get(source)
    return same or (listed.get(target) == source and target in names)


def without_detours(truth: dict[Pair, Truth]) -> dict[Pair, Truth]:
    """`truth` without the pairs that follow from two others: a <- c where a <- b and b <- c say as much."""

    def follows(target: str, source: str) -> bool:
        for other, middle in truth:
            if other == target and (middle, source) in truth:
                first, second = truth[target, middle], truth[middle, source]
                if truth[target, source] == {setting: tied and second[setting] for setting, tied in first.items()}:
                    return True
        return False

    return {pair: table for pair, table in truth.items() if any(table.values()) and not follows(*pair)}


def _by_rule(rule: str, present: list[bool], default: bool) -> bool:
    if not present:
        return default
    return present[0] if rule == "first" else any(present) if rule == "any" else all(present)


def gate(paths: list[str], truth: Truth) -> Json:
    """The shortest description of a truth table over flags: see `bowline.families` for how it is read."""
    relevant = [
        i
        for i in range(len(paths))
        if any(
            len({truth[s] for s in ((*k[:i], v, *k[i + 1 :]) for v in (True, False, None)) if s in truth}) > 1
            for k in truth
        )
    ]
    default = truth[(None,) * len(paths)]
    if not relevant:
        return {"paths": [], "default": default}
    reduced = {
        tuple(setting[i] for i in relevant): tied
        for setting, tied in truth.items()
        if all(setting[i] is None for i in range(len(paths)) if i not in relevant)
    }
    if len(relevant) == 1 and reduced.get((True,)) and not reduced.get((False,)):
        return {"paths": [paths[relevant[0]]], "default": default}
    for rule in ("first", "any", "all"):
        for order in itertools.permutations(range(len(relevant))):
            if len(relevant) > 1 and all(
                tied == _by_rule(rule, [s[i] for i in order if s[i] is not None], default)  # type: ignore[misc]
                for s, tied in reduced.items()
            ):
                return {"paths": [paths[relevant[i]] for i in order], "rule": rule, "default": default}
    letters = {True: "T", False: "F", None: "-"}
    table = {"".join(letters[value] for value in setting): tied for setting, tied in reduced.items()}
    return {"paths": [paths[i] for i in relevant], "rule": "table", "table": table, "default": default}


def flat(cls: type[Any], content: Json) -> Json | None:
    """`content` as some families once wrote it, with the keys of the text model at the top; None if not read so."""
    text = content.get("text_config")
    if not isinstance(text, dict) or "vocab_size" not in text or "vocab_size" in content:
        return None
    merged = text | {key: value for key, value in content.items() if key != "text_config"}
    try:
        config = config_from_dict(cls.config_class, merged)
    except Exception:
        return None
    read = [config.get_text_config().to_dict().get(key) for key in ("vocab_size", "hidden_size")]
    return merged if read == [text["vocab_size"], text.get("hidden_size")] else None


def flat_gates(cls: type[Any], content: Json, pairs: Iterable[Pair]) -> dict[Pair, Json]:
    """The gate of each pair in a `config.json` of the flat layout; empty where the family does not read it."""
    merged = flat(cls, content)
    if merged is None:
        return {}
    models = in_every_setting(cls, merged, [FLAG])
    return {pair: gate([FLAG], {setting: is_tied(model, *pair) for setting, model in models.items()}) for pair in pairs}


# --- names on disk ---------------------------------------------------------------------------------------------------


def separate(model: torch.nn.Module) -> None:
    """Break every sharing: each module path its own module, each parameter name its own parameter."""
    seen: set[int] = set()
    for path, _ in list(model.named_modules(remove_duplicate=False)):
        parent = model.get_submodule(path.rpartition(".")[0])
        child = model.get_submodule(path)
        if path and id(child) in seen:
            child = copy.deepcopy(child)
            setattr(parent, path.rpartition(".")[2], child)
        seen.add(id(child))
    part(model)


def part(model: torch.nn.Module) -> None:
    """Each parameter name its own parameter; modules stay as they are."""
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) in seen:
                module._parameters[name] = torch.nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            seen.add(id(module._parameters[name]))


def _digest(tensor: torch.Tensor) -> tuple[tuple[int, ...], bytes]:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tuple(tensor.shape), hashlib.blake2b(data, digest_size=16).digest()


def _renamed(model: Any, name: str, tensor: torch.Tensor) -> str:
    """The name that the version's own save would give to `name`, for a tensor that a save leaves out."""
    try:
        from transformers.core_model_loading import revert_weight_conversion

        return str(next(iter(revert_weight_conversion(model, {name: tensor}))))
    except ImportError:
        return name


def disk_names(cls: type[Any], content: Json, wanted: set[str]) -> dict[str, str]:
    """{state_dict name: name in the file that `save_pretrained` writes}, for the names of `wanted`."""
    model = build(cls, config_from_dict(cls.config_class, content))
    separate(model)
    fill(model)
    with torch.no_grad():
        for number, (name, buffer) in enumerate(model.named_buffers()):
            if name in wanted and buffer.is_floating_point():
                buffer.uniform_(number, number + 1)
    model.can_generate = lambda: False
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        files = sorted(Path(folder).glob("*.safetensors"))
        stored = {_digest(tensor): name for file in files for name, tensor in load_file(file).items()}
    present = {name: tensor for name, tensor in sorted(tensors(model).items()) if name in wanted}
    return {name: stored.get(_digest(tensor)) or _renamed(model, name, tensor) for name, tensor in present.items()}


# --- one class -------------------------------------------------------------------------------------------------------


def width_path(cls: type[Any], content: Json, embedding: str, vocabulary_path: str) -> str | None:
    """Path of the key that sets the width of the input embedding: the one whose doubling doubles it.

    Where the family refuses to have any of them changed alone, the likeliest name.
    """
    width = tensors(on_meta(cls, content))[embedding].shape[1]
    home = vocabulary_path.rpartition(".")[0]

    def likelihood(path: str) -> tuple[bool, int]:
        level, _, key = path.rpartition(".")
        return level != home, WIDTH_NAMES.index(key) if key in WIDTH_NAMES else len(WIDTH_NAMES)

    candidates = [path for path, value in integer_paths(content).items() if value == width and "vocab" not in path]
    candidates.sort(key=likelihood)
    for path in candidates:
        try:
            wider = tensors(on_meta(cls, changed(content, path, 2 * width)))
        except Exception:
            continue
        if embedding in wider and wider[embedding].shape[1] == 2 * width:
            return path
    return next((path for path in candidates if likelihood(path) < (False, len(WIDTH_NAMES))), None)


def most_tied(cls: type[Any], content: Json, paths: list[str]) -> Json:
    """`content` with every switch on; some families refuse one of them, which then stays absent or off."""
    refused: Exception | None = None
    for setting in itertools.product((True, None, False), repeat=len(paths)):
        candidate = with_switches(content, dict(zip(paths, setting, strict=True)))
        try:
            on_meta(cls, candidate)
        except Exception as error:
            refused = refused or error
        else:
            return candidate
    raise refused or RuntimeError("no setting of the flags builds")


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
    by_path: dict[str, dict[str, tuple[int, int]]] = {}
    for path, size in integer_paths(content).items():
        if is_vocabulary_key(path):
            try:
                axes = vocabulary_axes(model, on_meta(cls, changed(content_tied, path, size + STEP)))
            except Exception:
                continue
            if axes:
                by_path[path] = axes
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
    longer: dict[str, int | None] = {}
    for path, names in ({main: vocabulary} | others).items():
        size = integer_paths(content_tied)[path]
        for name, axis in names.items():
            excess = shapes[name].shape[axis] - size
            follows = by_path[path][name][1] == (step if path == main else STEP) and abs(excess) <= MOST_SPARE_ROWS
            if excess or not follows:
                longer[str(disk(name))] = excess if follows else None
    without_text_config = flat_gates(cls, content, made)
    backwards = owned_by_target(cls, content_tied, made)
    ties = []
    for target, source in sorted(made):
        tie = {"target": disk(target), "source": disk(source), "gate": gate(paths, made[target, source])}
        if (target, source) in without_text_config:
            tie["flat_gate"] = without_text_config[target, source]
        if (target, source) in backwards:
            tie["owner"] = "target"
        ties.append(tie)
    never = [f"{target} <- {source}" for (target, source), table in sorted(truth.items()) if not any(table.values())]
    declaration: Json = {
        "ties": ties,
        "embedding": disk(embedding),
        "head": disk(head),
        "vocabulary": {str(disk(name)): axis for name, axis in sorted(vocabulary.items())},
        "longer": dict(sorted(longer.items())),
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


def inspect(names: list[str]) -> Json:
    """The facts of `names`: classes, families, and for what could not be built the reason."""
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


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:160]}"


def main() -> None:
    """Write the facts of the classes named after the path given first; with only a path, the names of all classes."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(logging.CRITICAL + 1)
    transformers.logging.disable_progress_bar()
    destination, *names = sys.argv[1:]
    content = inspect(names) if names else candidate_names()
    Path(destination).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
