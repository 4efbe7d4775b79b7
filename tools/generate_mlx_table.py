"""Writes `src/bowline/families/tables/mlx_lm.json` by building every model of an mlx-lm and trying loads on it.

    PYTHON_WITH_MLX_LM tools/generate_mlx_table.py

Runs in mlx-lm's own environment and imports nothing of Bowline. Each class is built without weights from a made-up
config: mlx evaluates nothing that nobody asks for, so the sizes do not matter. The flag is set at each level of the
config, a head is given to `sanitize` or left out, and what is left is compared with the module's parameters, as
`load_weights(strict=True)` does. A class that cannot be built is listed as not known.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import mlx_lm.models
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm import utils
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

TABLES = Path(__file__).resolve().parent.parent / "src" / "bowline" / "families" / "tables"
FLAG = "tie_word_embeddings"
TEXT = "text_config"
ROWS, TEXT_ROWS = 96, 104
"""Two vocabularies that no other size of a made-up config equals."""
SIZES = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers")
PUBLISHED = {
    f"layers.0.mlp.experts.{at}.{name}.weight": mx.zeros((16, 8))
    for at in range(8)
    for name in ("gate_proj", "up_proj", "down_proj")
} | {
    "layers.0.mamba.conv1d.weight": mx.zeros((4, 1, 4)),
    "layers.0.block_sparse_moe.input_linear.weight": mx.zeros((8, 32, 8)),
    "layers.0.block_sparse_moe.output_linear.weight": mx.zeros((8, 8, 16)),
}
"""Tensors of published checkpoints by which some classes see that names and shapes are not mlx-lm's own."""
RUNNABLE = 1_000_000
"""Parameters up to which a class is run."""
FLAGS = (True, False, None)
"""Values of the flag that are tried; `None` leaves it out."""

Json = dict[str, Any]
Pair = tuple[str, str]
"""The names of a head and of its embedding, as files spell them."""


class NotKnownError(Exception):
    """A class about which the probes say nothing; the message says why."""


class UnfitError(Exception):
    """A load that mlx-lm refuses."""


# --- configs --------------------------------------------------------------------------------------------------------


@cache
def modules() -> dict[str, ModuleType | None]:
    """Each model of mlx-lm by the name of its file; `None` if it cannot be imported without further packages."""
    found: dict[str, ModuleType | None] = {}
    for info in pkgutil.iter_modules(mlx_lm.models.__path__):
        source = Path(mlx_lm.models.__path__[0], f"{info.name}.py").read_text()
        if re.search(r"\bModelArgs\b", source) and re.search(r"\bModel\b", source):
            try:
                module = importlib.import_module(f"mlx_lm.models.{info.name}")
            except (ImportError, SystemExit):
                found[info.name] = None
            else:
                if hasattr(module, "Model") and hasattr(module, "ModelArgs"):
                    found[info.name] = module
    return found


def made_up(layers: int) -> Json:
    """A value for every key that some class of mlx-lm requires, and the sizes."""
    config: Json = dict(SIZES) | dict.fromkeys(LAYERS, layers)
    for module in filter(None, modules().values()):
        for found in vars(module).values():
            if isinstance(found, type) and is_dataclass(found):
                for one in fields(found):
                    if one.default is MISSING and one.default_factory is MISSING and one.name != FLAG:
                        config.setdefault(one.name, _value(one.name, str(one.type), layers))
    return config | {"vocab_size": ROWS}


def _value(name: str, kind: str, layers: int) -> Any:
    if "layer_types" in name or "pattern" in name:
        return ["full_attention"] * layers
    if "List" in kind or "list" in kind:
        return [1] * layers
    if "Dict" in kind or "dict" in kind:
        return {"rope_theta": 1e4, "rope_type": "default"}
    for word, value in (("bool", False), ("int", 8), ("float", 1.0), ("str", "default")):
        if word in kind:
            return value
    return None


def configs_to_try(name: str) -> Iterator[Json]:
    """Configs that may build the class: made up, then transformers' defaults with what they lack made up."""
    for layers in (0, 1, 2, 4):
        for flat in (made_up(layers), made_up(layers) | {"rope_scaling": None}):
            yield flat | {TEXT: dict(flat)}
    types = [name, *(model_type for model_type, to in utils.MODEL_REMAPPING.items() if to == name)]
    for model_type in types:
        if model_type in CONFIG_MAPPING:
            theirs = CONFIG_MAPPING[model_type]().to_dict()
            flat = made_up(2)
            stated = {key: value for key, value in theirs.items() if value is not None} | {"vocab_size": ROWS}
            text = theirs.get(TEXT) or theirs
            text = {key: value for key, value in text.items() if value is not None} | {"vocab_size": ROWS}
            yield flat | stated | {TEXT: flat | text}
            yield flat | theirs | {"vocab_size": ROWS, TEXT: flat | (theirs.get(TEXT) or theirs) | {"vocab_size": ROWS}}


def with_flags(config: Json, top: bool | None, text: bool | None) -> Json:
    """A copy of the config with these flags; `None` leaves the flag out."""
    changed = copy.deepcopy(config)
    for level, flag in ((changed, top), (changed.get(TEXT), text)):
        if level is not None:
            level.pop(FLAG, None)
            if flag is not None:
                level[FLAG] = flag
    return changed


# --- a class --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tables:
    """The parameters of a module that are its embedding and its head; an always tied module has no head."""

    embedding: str
    head: str | None


class Probe:
    """One class of mlx-lm and a config that builds it."""

    def __init__(self, name: str, module: ModuleType) -> None:
        self.name, self._module = name, module
        self._config, self.tables = self._first_that_builds()

    def _first_that_builds(self) -> tuple[Json, Tables]:
        reason = ""
        for config in configs_to_try(self.name):
            try:
                found = [_tables(self._build(with_flags(config, flag, flag))) for flag in (True, False)]
            except UnfitError as error:
                reason = str(error).partition("\n")[0]
                continue
            return config, max(found, key=lambda tables: tables.head is not None)
        raise NotKnownError(reason)

    def _build(self, config: Json) -> nn.Module:
        """The model of this config, without values.

        Raises:
            UnfitError: the class refuses the config.
        """
        try:
            arguments = self._module.ModelArgs.from_dict(copy.deepcopy(config))
            model: nn.Module = self._module.Model(arguments)
        except Exception as error:
            raise UnfitError(f"{type(error).__name__}: {error}") from error
        return model

    @property
    def nested(self) -> bool:
        """Whether the class reads a text config."""
        return TEXT in inspect.signature(self._module.ModelArgs).parameters

    @property
    def flat(self) -> bool:
        """Whether the class also takes a config without a text config."""
        try:
            self._build({key: value for key, value in self._config.items() if key != TEXT} | {FLAG: False})
        except UnfitError:
            return False
        return self.nested

    @property
    def text_types(self) -> list[str]:
        """The `model_type`s of the text config that the class tells apart."""
        source = inspect.getsource(self._module.Model)
        return re.findall(r"text_config\.get\(.model_type.\) == .(\w+)", source)

    def requires(self) -> list[str]:
        """The keys without which the class refuses a config, as dotted paths."""
        parameters = inspect.signature(self._module.ModelArgs).parameters.values()
        required = {one.name for one in parameters if one.default is inspect.Parameter.empty} - {"model_type"}
        if not self.nested:
            return sorted(required)
        found = required - ({TEXT} if self.flat else set())
        config = self._config | {TEXT: {}}
        try:
            self._build(config)
        except UnfitError as error:
            if "required positional argument" in str(error):
                found |= {f"{TEXT}.{key}" for key in re.findall(r"'(\w+)'", str(error)) if key != "model_type"}
        return sorted(found)

    def rows(self) -> Json:
        """The key of the config that sets the embedding's rows, and their number without that key."""
        config = with_flags(self._config, False, False)
        if self.nested:
            config[TEXT]["vocab_size"] = TEXT_ROWS
        levels = {f"{TEXT}.vocab_size": config[TEXT]} if self.nested else {}
        for path, level in (levels | {"vocab_size": config}).items():
            before = self._rows(config)
            if before not in (ROWS, TEXT_ROWS) or level["vocab_size"] != before:
                continue
            del level["vocab_size"]
            try:
                default = self._rows(config)
            except UnfitError:
                default = None
            return {"path": path, "default": default}
        raise NotKnownError("no key sets the rows of the embedding")

    def _rows(self, config: Json) -> int:
        parameters = dict(tree_flatten(self._build(config).parameters()))
        return len(parameters[self.tables.embedding])

    def rules(self, pairs: list[Pair]) -> Json:
        """The rule, and the rules of those text models for which the class has another."""
        rule, others = self._rule(pairs), {}
        before = self._config
        for text_type in self.text_types:
            other = self._rule_of_text(text_type, pairs)
            if other != rule:
                others[text_type] = other
        self._config = before
        return rule | ({"text_model_types": others} if others else {})

    def _rule_of_text(self, text_type: str, pairs: list[Pair]) -> Json | None:
        for config in configs_to_try(text_type):
            self._config = config | {TEXT: config[TEXT] | {"model_type": text_type}}
            try:
                return self._rule(pairs)
            except (NotKnownError, UnfitError):
                continue
        return None

    def _rule(self, pairs: list[Pair]) -> Json:
        """The flag that decides, and what becomes of a head under it, by spelling of the tie."""
        own = (self.tables.head or self._missing_head(), self.tables.embedding)
        by_flags = {
            (top, text): self._try(with_flags(self._config, top, text), own)
            for top in FLAGS
            for text in (FLAGS if self.nested else (None,))
        }
        path, by_value = _governed_by(by_flags, nested=self.nested)
        if path is None:
            flags: Json = {"any": with_flags(self._config, None, None)}
            if by_value[None] is None:
                flags = {"any": with_flags(self._config, False, False)}
            return {"flag": None, "ties": self._by_pair(flags, [own, *pairs])}
        key = f"{TEXT}.{FLAG}" if path == TEXT else FLAG
        flags = {
            str(value).lower(): with_flags(self._config, *((None, value) if path == TEXT else (value, None)))
            for value in (True, False)
        }
        default = None if by_value[None] is None else by_value[None] == by_value[True]
        return {"flag": key, "default": default, "ties": self._by_pair(flags, [own, *pairs])}

    def _missing_head(self) -> str:
        """The name that a head would have beside the embedding's module."""
        above = self.tables.embedding.split(".")
        return (
            ".".join([*above[: above.index("language_model") + 1], "lm_head.weight"])
            if "language_model" in above
            else "lm_head.weight"
        )

    def _by_pair(self, configs: Json, pairs: list[Pair]) -> Json:
        found: Json = {}
        own = [self._try(config, pairs[0]) for config in configs.values()]
        if all(fate is None or set(fate.values()) == {"refused"} for fate in own):
            raise NotKnownError("made-up tensors are refused, whatever the tie")
        for pair in pairs:
            fates = {word: self._try(config, pair) for word, config in configs.items()}
            refused = all(fate is None for fate in fates.values())
            found[" <- ".join(pair)] = "refused" if refused else fates
        return found

    def _try(self, config: Json, pair: Pair) -> Json | None:
        """What becomes of a stored and of a missing head; `None` if the config or the embedding's name is refused."""
        try:
            self._build(config)
            return {word: self._fate(config, pair, stored=word == "stored") for word in ("stored", "missing")}
        except UnfitError:
            return None

    def _fate(self, config: Json, pair: Pair, *, stored: bool) -> str:
        model, own = self._build(config), self.tables
        full = dict(tree_flatten(self._build(with_flags(self._config, False, False)).parameters()))
        weights = {_spelled(key, own, pair): value for key, value in full.items() if key != own.head}
        above = (
            own.embedding.removesuffix(".".join(["", *_ending(own.embedding)])) if own.embedding.count(".") > 1 else ""
        )
        weights |= {_spelled(f"{above}.{key}".removeprefix("."), own, pair): value for key, value in PUBLISHED.items()}
        if stored:
            weights[pair[0]] = mx.ones(full[own.embedding].shape)
        try:
            left = model.sanitize(weights) if hasattr(model, "sanitize") else weights
        except Exception:  # any error of a class refuses the load
            return "refused"
        held = {key for key, _ in tree_flatten(model.parameters())}
        if own.embedding not in left:
            raise UnfitError("the embedding is not found")
        heads = {key for key in left if key not in held and _ending(key) == _ending(pair[0])}
        if heads or (own.head in held and own.head not in left):
            return "refused"
        if not stored:
            return "tied"
        if own.head not in held:
            return "dropped"
        return "kept" if self._uses_head(config) else "unused"

    def _uses_head(self, config: Json) -> bool:
        """Whether the logits follow the head; a class that cannot run from a made-up config is taken to use it."""
        logits = []
        for value in (0.0, 1.0):
            try:
                model = self._build(config | dict.fromkeys(LAYERS, 1))
                parameters = dict(tree_flatten(model.parameters()))
                if sum(one.size for one in parameters.values()) > RUNNABLE:
                    return True
                same = {key: mx.full(one.shape, 0.1) for key, one in parameters.items()}
                model.update(tree_unflatten(list((same | {self.tables.head: mx.full((ROWS, 8), value)}).items())))
                logits.append(model(mx.array([[1, 2, 3]])))
                mx.eval(logits[-1])
            except Exception:  # any error means that nothing was seen
                return True
        return not mx.array_equal(logits[0], logits[1], equal_nan=True)


def _tables(model: nn.Module) -> Tables:
    parameters = {key: value for key, value in tree_flatten(model.parameters()) if ".layers." not in key}
    lookups = [f"{path}.weight" for path, one in model.named_modules() if isinstance(one, nn.Embedding)]
    lookups = [key for key in lookups if key in parameters and not re.search(r"wpe|position|per_layer|vision", key)]
    if not lookups:
        raise UnfitError("no embedding")
    embedding = min(lookups, key=len)
    heads = [
        key for key, value in parameters.items() if key not in lookups and value.shape == parameters[embedding].shape
    ]
    if len(heads) > 1:
        raise UnfitError(f"several heads: {heads}")
    return Tables(embedding, heads[0] if heads else None)


def _ending(name: str) -> list[str]:
    return name.split(".")[-2:]


def _spelled(name: str, own: Tables, pair: Pair) -> str:
    """A parameter's name in files that spell the tie so: what the embedding's parents are called, its siblings' are."""
    mine, theirs = own.embedding.split("."), pair[1].split(".")
    if name == own.embedding:
        return pair[1]
    parent = "".join(f"{part}." for part in mine[:-2])
    if parent and name.startswith(parent):
        return "".join(f"{part}." for part in theirs[:-2]) + name.removeprefix(parent)
    return name


def _governed_by(
    by_flags: dict[tuple[bool | None, bool | None], Json | None], *, nested: bool
) -> tuple[str | None, dict[bool | None, Json | None]]:
    """The level whose flag decides ("" is the top), and what it decides, by value; `None` if neither does."""
    tops = {flag: [by_flags[flag, text] for text in (FLAGS if nested else (None,))] for flag in FLAGS}
    texts = {flag: [by_flags[top, flag] for top in FLAGS] for flag in FLAGS} if nested else {}
    for path, levels in (("", tops), (TEXT, texts)):
        if levels and all(all(fate == fates[0] for fate in fates) for fates in levels.values()):
            by_value = {flag: fates[0] for flag, fates in levels.items()}
            if by_value[True] != by_value[False]:
                return path, by_value
    if by_flags[True, True if nested else None] == by_flags[False, False if nested else None]:
        return None, {None: by_flags[None, None]}
    raise NotKnownError("the flags of two levels decide together")


# --- the table ------------------------------------------------------------------------------------------------------


def spellings(name: str) -> list[Pair]:
    """How files of transformers' classes that mlx-lm loads with this module spell the head's tie."""
    table = json.loads((TABLES / "transformers.json").read_text())
    types = {name, *(model_type for model_type, to in utils.MODEL_REMAPPING.items() if to == name)}
    found: dict[Pair, None] = {}
    for facts in table["classes"].values():
        if facts["family"] not in types:
            continue
        for version in ("5", "4"):
            declared = facts["5"] if facts[version] == "=" else facts[version]
            for tie in declared["ties"] if declared else ():
                if tie["target"] == declared["head"]:
                    live = declared.get("module_names", {})
                    for pair in (
                        (tie["target"], tie["source"]),
                        tuple(live.get(tie[end], tie[end]) for end in ("target", "source")),
                    ):
                        found[pair] = None
                        prefix = f"{facts['prefix']}."
                        if facts["prefix"] and pair[1].startswith(prefix):
                            found[pair[0], pair[1].removeprefix(prefix)] = None
    return list(found)


def entry(name: str, module: ModuleType | None) -> Json | None:
    """What is known of one module; `None` if nothing is."""
    if module is None:
        return None
    try:
        probe = Probe(name, module)
        known = {"requires": probe.requires(), "rows": probe.rows()} | probe.rules(spellings(name))
    except NotKnownError as error:
        print(f"{name}: not known: {error}")
        return None
    return known


def main() -> None:
    """Write the table."""
    mx.set_default_device(mx.cpu)
    models = {name: entry(name, module) for name, module in modules().items()}
    table = {
        "as_of": f"mlx-lm {mlx_lm.__version__}",
        "source": ["ml-explore/mlx-lm:mlx_lm/utils.py", "ml-explore/mlx-lm:mlx_lm/models/"],
        "remapping": utils.MODEL_REMAPPING,
        "architecture_remapping": {
            f"{model_type}/{architecture}": to
            for (model_type, architecture), to in utils.MODEL_ARCHITECTURE_REMAPPING.items()
        },
        "models": models,
    }
    (TABLES / "mlx_lm.json").write_text(json.dumps(table, indent=1, sort_keys=False) + "\n")
    print(f"{len(models)} models, {sum(known is None for known in models.values())} not known")


if __name__ == "__main__":
    main()
