"""Predicts what mlx-lm does with each tie, by rules that were found by building every model of mlx-lm.

mlx-lm reads `config.json` itself: the `model_type` names the class, and an absent flag has mlx-lm's own default, not
that of transformers. It loads strictly, so it refuses a whole checkpoint for one tensor that is missing, too many or of
another shape. `make sweep-mlx` compares every prediction of this file with a real load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from bowline.auditing.loaders.outcome import Fate, Outcome, Result, StoredFacts, refused_together
from bowline.families.declaration import Declaration, DeclaredTie
from bowline.families.loader_tables import loader_table
from bowline.families.transformers_table import ABSENT, lookup

__all__ = ["mlx_lm"]

WEIGHTS = "model*.safetensors"
TEXT = "text_config."
QUANTISED = ("quantization", "quantization_config")
NOT_READ = ("bitsandbytes", "torchao")
"""The `quant_method` of checkpoints whose parts of a weight mlx-lm's classes have no parameters for."""


def mlx_lm(declaration: Declaration, seen: StoredFacts) -> Result:
    """Predicts mlx-lm: a head whose flag is true is dropped or refused, by class, even if it was trained."""
    return refused_together(_each_tie(declaration, seen))


def _each_tie(declaration: Declaration, seen: StoredFacts) -> Iterator[tuple[str, Outcome | None]]:
    config = seen.config
    known = None if declaration.inferred else _known(declaration, config)
    refusal = None if declaration.inferred else _refusal(declaration, seen, known)
    for declared in declaration.ties:
        target = declared.tie.target
        if refusal:
            yield target, refusal
        elif known is None or "model_file" in config or target != declaration.head:
            yield target, None  # other code than mlx-lm's own, or a tie that was not tried
        else:
            yield target, _head(declared, seen, known)


def _known(declaration: Declaration, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The rule for the module that mlx-lm takes for this config; `None` if it has none, or if it is not known."""
    table = loader_table("mlx_lm")
    rule: Mapping[str, Any] | None = table["models"].get(_module(declaration, config))
    text_type = lookup(config, f"{TEXT}model_type")
    if rule is not None and text_type in rule.get("text_model_types", {}):
        other = rule["text_model_types"][text_type]
        return None if other is None else {**rule, **other}
    return rule


def _module(declaration: Declaration, config: Mapping[str, Any]) -> str | None:
    table, model_type = loader_table("mlx_lm"), config.get("model_type")
    if not isinstance(model_type, str):
        return None
    module: str = table["architecture_remapping"].get(
        f"{model_type}/{declaration.architecture}", table["remapping"].get(model_type, model_type)
    )
    return module


def _refusal(declaration: Declaration, seen: StoredFacts, known: Mapping[str, Any] | None) -> Outcome | None:
    """The refusal for another reason than a tie; `None` if there is none that a config and names show."""
    config = seen.config
    if not any(fnmatchcase(file.rpartition("/")[2], WEIGHTS) for file in seen.weight_files):
        return Outcome(Fate.REFUSED, f"mlx-lm reads only {WEIGHTS}")
    if "model_type" not in config:
        return Outcome(Fate.REFUSED, "config.json states no model_type")
    if "model_file" in config:
        return None
    if _module(declaration, config) not in loader_table("mlx_lm")["models"]:
        return Outcome(Fate.REFUSED, f"mlx-lm has no model type {config['model_type']}")
    method = lookup(config, "quantization_config.quant_method")
    if method in NOT_READ:
        return Outcome(Fate.REFUSED, f"mlx-lm does not read weights quantised by {method}")
    if method in ("awq", "gptq") and any(name.endswith(".g_idx") for name in seen.stored):
        return Outcome(Fate.REFUSED, "mlx-lm does not read weights with g_idx, the groups of GPTQ")
    missing = [path for path in known["requires"] if _of_level(config, path) is ABSENT] if known else []
    if missing:
        return Outcome(Fate.REFUSED, f"mlx-lm requires keys that config.json lacks: {', '.join(missing[:4])}")
    return None


def _head(declared: DeclaredTie, seen: StoredFacts, known: Mapping[str, Any]) -> Outcome | None:
    tie, config = declared.tie, seen.config
    fates = known["ties"].get(str(tie))
    if fates is None or any(key in level for level in _levels(config) for key in QUANTISED):
        return None
    if fates == "refused":
        return Outcome(Fate.REFUSED, f"mlx-lm's class does not find {tie.source}")
    if tie.source not in seen.stored:
        return Outcome(Fate.REFUSED, f"{tie.source} is not stored") if seen.complete else None
    rows = _of_level(config, known["rows"]["path"])
    rows = known["rows"]["default"] if rows is ABSENT else rows
    if rows is not None and seen.shapes[tie.source][:1] != (rows,):
        return _wrong_shape(tie.source, seen)
    flag, word = _flag(config, known)
    there = tie.target in seen.stored
    if not there and not seen.complete:
        return None
    fate = fates[word]["stored" if there else "missing"]
    if fate == "refused":
        what = "mlx-lm's class has no parameter for a stored head" if there else f"{tie.target} is not stored"
        return Outcome(Fate.REFUSED, f"{flag}, and {what}")
    if fate == "tied":
        return Outcome(Fate.TIED, f"{flag}: shares {tie.source}")
    if fate in ("kept", "unused") and seen.shapes[tie.target] != seen.shapes[tie.source]:
        return _wrong_shape(tie.target, seen)
    if fate == "kept":
        return Outcome(Fate.KEPT, f"{flag}: loaded as stored")
    equal = seen.equal.get(tie)
    if equal is None:
        return None
    if equal or seen.equal_when_cast.get(tie):
        return Outcome(Fate.TIED, f"{flag}: the stored copy is equal")
    return Outcome(Fate.DROPPED, f"{flag}: not used, without a warning")


def _flag(config: Mapping[str, Any], known: Mapping[str, Any]) -> tuple[str, str]:
    """The flag that decides in words, and the key of the rule's fates under it."""
    if known["flag"] is None:
        return "mlx-lm does not read tie_word_embeddings here", "any"
    value = _of_level(config, known["flag"])
    if value is not ABSENT:
        stated = str(bool(value)).lower()
        return f"{known['flag']} is {stated}", stated
    stated = str(bool(known["default"])).lower()
    return f"{known['flag']} is absent (mlx-lm's default {stated})", stated


def _of_level(config: Mapping[str, Any], path: str) -> Any:
    """The value at this path; a config without a text config is read as the text config itself."""
    return lookup(config, path if "text_config" in config else path.removeprefix(TEXT))


def _levels(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield config
    text = config.get("text_config")
    if isinstance(text, Mapping):
        yield text


def _wrong_shape(name: str, seen: StoredFacts) -> Outcome:
    return Outcome(Fate.REFUSED, f"size mismatch: {name} is {list(seen.shapes[name])}")
