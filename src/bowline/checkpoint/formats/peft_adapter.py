"""Reads a PEFT adapter directory: its config, and what each of its tensors is. Nothing is executed, no value is read.

An adapter has two files, `adapter_config.json` and `adapter_model.safetensors` (or `adapter_model.bin`, a pickle).
PEFT removes the adapter's own name from tensor names when it saves, so a name is the module's path in the base model
and the part: `base_model.model.lm_head.lora_A.weight`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn

from bowline.checkpoint.formats.other_files import ADAPTER_CONFIG, ADAPTER_FILES, adapter_kind
from bowline.checkpoint.formats.safetensors_header import read_header
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.checkpoint.formats.strict_json import loads, shown
from bowline.checkpoint.places.file_set import FileSet
from bowline.errors import FormatError

__all__ = [
    "Adapter",
    "AdapterConfig",
    "AdapterTensor",
    "LoraSettings",
    "Part",
    "TrainedIds",
    "names_module",
    "read_adapter",
]

LARGEST_CONFIG = 16 << 20
"""The most bytes of `adapter_config.json` that are read; a list of 262,144 token ids has 2 MB."""
MOST_TENSORS = 500_000
MOST_SEGMENTS = 64
"""A tensor's name has no more parts than this; those of the deepest models have about 15."""
MOST_ROWS = 1 << 31
PREFIX = "base_model.model."
LORA, TRAINABLE_TOKENS = "LORA", "TRAINABLE_TOKENS"
# fmt: off
KNOWN_TYPES = frozenset(
    {
        "ADALORA", "ADAMSS", "ADAPTION_PROMPT", "BEFT", "BOFT", "C3A", "CARTRIDGE", "CPT", "DEFT", "DELORA",
        "FOURIERFT", "FROD", "GLORA", "GRALORA", "HIRA", "HRA", "IA3", "LILY", "LN_TUNING", "LOHA", "LOKR",
        "LORA", "MISS", "MULTITASK_PROMPT_TUNING", "OFT", "OSF", "PEANUT", "POLY", "PREFIX_TUNING",
        "PROMPT_TUNING", "PSOFT", "PVERA", "P_TUNING", "RANDLORA", "ROAD", "SHADOW", "SHIRA", "SUPERTUNING",
        "TINYLORA", "TRAINABLE_TOKENS", "UNILORA", "VBLORA", "VERA", "WAVEFT", "XLORA",
    }
)
# fmt: on
"""The values of `peft_type`; PEFT 0.21.2 raises KeyError for any other."""
REGEX_SIGNS = frozenset("\\^$*+?()[]{}|")
_FETCH = "fetch the adapter again, or save it again with PEFT's save_pretrained"


class Part(StrEnum):
    """What a tensor of an adapter is."""

    LORA_A = "lora_A"
    LORA_B = "lora_B"
    LORA_BIAS = "the bias of lora_B"
    EMBEDDING_A = "lora_embedding_A"
    EMBEDDING_B = "lora_embedding_B"
    MAGNITUDE = "DoRA's magnitude vector"
    TOKENS = "trained rows"
    SAVED = "a saved module (modules_to_save)"
    BASE = "a copy of the base's tensor"
    BIAS = "a trained bias"
    METHOD = "a tensor of another PEFT method"
    UNKNOWN = "unknown"


LORA_PARTS = frozenset({Part.LORA_A, Part.LORA_B, Part.EMBEDDING_A, Part.EMBEDDING_B})
BY_SEGMENT = {
    "lora_A": Part.LORA_A,
    "lora_B": Part.LORA_B,
    "lora_embedding_A": Part.EMBEDDING_A,
    "lora_embedding_B": Part.EMBEDDING_B,
    "lora_magnitude_vector": Part.MAGNITUDE,
    "trainable_tokens_delta": Part.TOKENS,
    "base_layer": Part.BASE,
    "original_module": Part.BASE,
    "modules_to_save": Part.SAVED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterTensor:
    """One tensor: what it is, and the module of the base model that it belongs to, by its path there.

    `attribute` is the parameter of the module that it changes or replaces, mostly `weight`.
    """

    part: Part
    module: str
    attribute: str
    stored: StoredTensor

    @property
    def name(self) -> str:
        """The name in the file."""
        return self.stored.name

    @property
    def rank(self) -> int | None:
        """The rank that its shape shows; `None` unless it is one of LoRA's factors."""
        axis = 0 if self.part in (Part.LORA_A, Part.EMBEDDING_A) else 1
        return self.stored.shape[axis] if self.part in LORA_PARTS and len(self.stored.shape) > axis else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """The rank and the alpha that the config states for one module; `None` where that hangs on a regular expression.

    The regular expressions of an untrusted file are not run.
    """

    rank: int | None
    alpha: float | None
    rank_stabilised: bool

    def scaling(self, rank: int) -> float | None:
        """The factor in front of B A: alpha / rank, or alpha / √rank with `use_rslora`."""
        return None if self.alpha is None else self.alpha / (math.sqrt(rank) if self.rank_stabilised else rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedIds:
    """The ids that `trainable_token_indices` lists, for the modules whose path ends with `module`.

    An empty `module` means the input embedding, whatever its name.
    """

    module: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patterns:
    """`rank_pattern` or `alpha_pattern`: a value for each name of a module; the first name that fits counts."""

    values: Mapping[str, Any]
    order: Mapping[str, int]
    first_regex: int | None
    """The position of the first name that is a regular expression."""

    def of(self, module: str, default: Any) -> Any:
        """The value for this module; `None` where a regular expression that stands before might decide it."""
        found = min((self.order[end] for end in _ends(module) if end in self.order), default=None)
        if self.first_regex is not None and (found is None or self.first_regex < found):
            return None
        return (
            default
            if found is None
            else next(self.values[end] for end in _ends(module) if self.order.get(end) == found)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """The entries of `adapter_config.json` that matter here, checked. `raw` has all of them."""

    peft_type: str
    peft_version: str | None
    base: str | None
    """`base_model_name_or_path`."""
    base_class: str | None
    """`auto_mapping.base_model_class`, which PEFT writes if no task type was given."""
    task: str | None
    """`task_type`, such as `CAUSAL_LM`."""
    rank: int | None
    alpha: float | None
    rank_pattern: Patterns
    alpha_pattern: Patterns
    use_rslora: bool
    use_dora: bool
    lora_bias: bool
    fan_in_fan_out: bool
    ensure_weight_tying: bool
    target_modules: str | frozenset[str] | None
    target_parameters: frozenset[str]
    modules_to_save: frozenset[str]
    saved_lengths: frozenset[int]
    """The numbers of parts that the names in `modules_to_save` have."""
    token_ids: tuple[TrainedIds, ...]
    raw: Mapping[str, Any]

    def settings(self, module: str) -> LoraSettings:
        """The rank and alpha of this module."""
        return LoraSettings(
            rank=self.rank_pattern.of(module, self.rank),
            alpha=self.alpha_pattern.of(module, self.alpha),
            rank_stabilised=self.use_rslora,
        )

    def targets(self, module: str) -> bool | None:
        """Whether `target_modules` names this module; `None` if it is absent, a regular expression or `all-linear`."""
        if self.target_modules is None or isinstance(self.target_modules, str):
            return None
        return any(end in self.target_modules for end in _ends(module))

    def saves(self, module: str) -> bool:
        """Whether `modules_to_save` names this module or one above it."""
        parts = module.split(".")
        return any(
            ".".join(parts[start : start + length]) in self.modules_to_save
            for length in self.saved_lengths
            for start in range(len(parts) - length + 1)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A PEFT adapter: its config, its tensors in the file's order, and the file that holds them.

    `notes` are faults that did not prevent reading it.
    """

    location: str
    file: str
    config: AdapterConfig
    tensors: tuple[AdapterTensor, ...]
    metadata: Mapping[str, str]
    notes: tuple[str, ...] = ()
    other_files: tuple[str, ...] = ()
    """Further files that hold weights of an adapter; PEFT reads the safetensors file alone."""

    @property
    def is_pickle(self) -> bool:
        """Whether the tensors are in a pickle."""
        return not self.file.endswith(".safetensors")

    @property
    def nbytes(self) -> int:
        """The stored size of all tensors."""
        return sum(tensor.stored.nbytes for tensor in self.tensors)

    @property
    def modules(self) -> Mapping[str, Mapping[Part, AdapterTensor]]:
        """By module of the base model, in the file's order: its tensors by what they are (of two alike, the first)."""
        found: dict[str, dict[Part, AdapterTensor]] = {}
        for tensor in self.tensors:
            found.setdefault(tensor.module, {}).setdefault(tensor.part, tensor)
        return found


def names_module(pattern: str, module: str) -> bool:
    """Whether a name in a PEFT config means this module: the whole path, or the end of it.

    Example:
        >>> names_module("q_proj", "model.layers.0.self_attn.q_proj"), names_module("proj", "model.q_proj")
        (True, False)
    """
    return module == pattern or module.endswith("." + pattern)


def read_adapter(files: FileSet) -> Adapter:
    """Read the config of an adapter and the header of its weights.

    Raises:
        FormatError: a file is missing or malformed, or the config contradicts itself or names an unknown PEFT type.
        UnsafePickleError: `adapter_model.bin` asks for more than tensors; it is not executed.
        CheckpointError: a file cannot be read.
    """
    if not files.has(ADAPTER_CONFIG):
        raise FormatError(f"no {ADAPTER_CONFIG} beside the adapter's weights", help=_FETCH)
    config = _read_config(files)
    names = [name for name in ADAPTER_FILES if files.has(name)]
    if not names:
        raise FormatError(
            f"{adapter_kind(files).name}, but neither {' nor '.join(ADAPTER_FILES)} is here",
            help=_FETCH,
        )
    stored, metadata, notes = _read_tensors(files, names[0])
    if len(stored) > MOST_TENSORS:
        raise FormatError(f"{names[0]}: {len(stored)} tensors, expected at most {MOST_TENSORS}", help=_FETCH)
    deep = next((name for name in stored if name.count(".") >= MOST_SEGMENTS), None)
    if deep is not None:
        raise FormatError(
            f"{names[0]}: the name {shown(deep)} has {deep.count('.') + 1} parts, expected at most {MOST_SEGMENTS}",
            help=_FETCH,
        )
    tensors = tuple(_classified(tensor, config) for tensor in stored.values())
    return Adapter(
        location=files.location,
        file=names[0],
        config=config,
        tensors=tensors,
        metadata=metadata,
        notes=notes,
        other_files=tuple(names[1:]),
    )


def _read_tensors(files: FileSet, name: str) -> tuple[Mapping[str, StoredTensor], Mapping[str, str], tuple[str, ...]]:
    with files.open(name) as source:
        if name.endswith(".safetensors"):
            header = read_header(source)
            return header.tensors, header.metadata, tuple(warning.message for warning in header.warnings)
        from bowline.checkpoint.formats.pickle_file import read_pickle  # imported only for pickles

        pickled = read_pickle(source)
        nested = () if pickled.under is None else (f"{name}: the tensors are nested under {pickled.under}",)
        return pickled.tensors, {}, (*nested, *(f"{name}: {note}" for note in pickled.notes))


# --- the config -----------------------------------------------------------------------------------------------------


def _read_config(files: FileSet) -> AdapterConfig:
    with files.open(ADAPTER_CONFIG) as source:
        if source.size > LARGEST_CONFIG:
            _refuse(f"{source.size} bytes, expected at most {LARGEST_CONFIG}")
        data = source.read_at(0, source.size)
    content = loads(data, ADAPTER_CONFIG, allow_nonfinite=True, help=_FETCH)
    if not isinstance(content, dict):
        _refuse(f"{shown(content)}, expected an object")
    kind = content.get("peft_type")
    if kind is None:
        raise FormatError(f"{adapter_kind(files).name}; {ADAPTER_CONFIG}: no peft_type, expected one", help=_FETCH)
    if not isinstance(kind, str) or kind not in KNOWN_TYPES:
        _refuse(
            f"peft_type is {shown(kind)}, expected a method of PEFT such as LORA",
            "if a newer PEFT wrote this adapter, look for a newer Bowline",
        )
    fields = _Fields(content)
    mapping = content.get("auto_mapping")
    base_class = mapping.get("base_model_class") if isinstance(mapping, dict) else None
    target = content.get("target_modules")
    saved = fields.texts("modules_to_save")
    return AdapterConfig(
        peft_type=kind,
        peft_version=fields.text("peft_version"),
        base=fields.text("base_model_name_or_path") or None,
        base_class=base_class if isinstance(base_class, str) else None,
        task=fields.text("task_type"),
        rank=fields.whole("r"),
        alpha=fields.number("lora_alpha"),
        rank_pattern=fields.patterns("rank_pattern", lambda key, value: fields.checked_whole(key, value, 1)),
        alpha_pattern=fields.patterns("alpha_pattern", fields.checked_number),
        use_rslora=fields.truth("use_rslora"),
        use_dora=fields.truth("use_dora"),
        lora_bias=fields.truth("lora_bias"),
        fan_in_fan_out=fields.truth("fan_in_fan_out"),
        ensure_weight_tying=fields.truth("ensure_weight_tying"),
        target_modules=target if target is None or isinstance(target, str) else fields.texts("target_modules"),
        target_parameters=fields.texts("target_parameters"),
        modules_to_save=saved,
        saved_lengths=frozenset(name.count(".") + 1 for name in saved),
        token_ids=fields.token_ids("token_indices" if kind == TRAINABLE_TOKENS else "trainable_token_indices"),
        raw=content,
    )


class _Fields:
    """Entries of the config, each with the type that PEFT gives it, or an error that names the entry."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content

    def text(self, key: str) -> str | None:
        value = self._content.get(key)
        return value if value is None or isinstance(value, str) else _wrong(key, value, "text or null")

    def truth(self, key: str) -> bool:
        value = self._content.get(key)
        return bool(value) if value is None or isinstance(value, bool) else _wrong(key, value, "true or false")

    def whole(self, key: str) -> int | None:
        value = self._content.get(key)
        return None if value is None else self.checked_whole(key, value, 1)

    def number(self, key: str) -> float | None:
        value = self._content.get(key)
        return None if value is None else self.checked_number(key, value)

    def texts(self, key: str) -> frozenset[str]:
        value = self._content.get(key)
        if value is None:
            return frozenset()
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            _wrong(key, value, "a list of names")
        return frozenset(value)

    def patterns(self, key: str, checked: Callable[[str, Any], Any]) -> Patterns:
        value = self._content.get(key)
        if value is not None and not isinstance(value, dict):
            _wrong(key, value, "an object")
        values = {pattern: checked(f"{key}[{shown(pattern)}]", entry) for pattern, entry in (value or {}).items()}
        order = {pattern: at for at, pattern in enumerate(values)}
        first = next((at for pattern, at in order.items() if REGEX_SIGNS & set(pattern)), None)
        return Patterns(values=values, order=order, first_regex=first)

    def token_ids(self, key: str) -> tuple[TrainedIds, ...]:
        value = self._content.get(key)
        if value is None:
            return ()
        by_module = value if isinstance(value, dict) else {"": value}
        return tuple(
            TrainedIds(module=module, ids=self._ids(f"{key}[{shown(module)}]" if module else key, ids))
            for module, ids in by_module.items()
        )

    def _ids(self, key: str, value: Any) -> tuple[int, ...]:
        if not isinstance(value, list):
            _wrong(key, value, "a list of token ids")
        return tuple(self.checked_whole(key, one, 0) for one in value)

    def checked_whole(self, key: str, value: Any, least: int) -> int:
        if type(value) is not int or not least <= value < MOST_ROWS:
            _wrong(key, value, f"a whole number from {least}")
        return value

    def checked_number(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(_as_float(value)):
            _wrong(key, value, "a finite number")
        return float(value)


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _ends(module: str) -> Iterator[str]:
    """The path of a module and every end of it: each name that means this module in a PEFT config."""
    parts = module.split(".")
    return (".".join(parts[start:]) for start in range(len(parts)))


# --- the tensors ----------------------------------------------------------------------------------------------------


def _classified(stored: StoredTensor, config: AdapterConfig) -> AdapterTensor:
    """What a tensor is, by its name and, where the name alone does not tell, by the config."""
    path = stored.name.removeprefix(PREFIX)
    segments = path.split(".")
    at = _part_position(segments)
    if at is not None:
        part, rest = BY_SEGMENT[segments[at]], segments[at + 1 :]
        above = [segment for segment in segments[:at] if segment != "base_layer"]
        if part is Part.TOKENS and above[-1:] == ["token_adapter"]:
            above = above[:-1]
        if part is Part.SAVED and len(rest) > 1 and rest[0] == "default":
            rest = rest[1:]
        attribute = rest[-1] if rest and part in (Part.BASE, Part.SAVED) else "weight"
        if part is Part.BASE and attribute == "bias":
            part = _bias(config)
        if part in (Part.LORA_A, Part.LORA_B) and rest[-1:] == ["bias"]:
            part, attribute = (Part.LORA_BIAS, "bias") if part is Part.LORA_B else (Part.UNKNOWN, "bias")
        within = ".".join(rest[:-1]) if part in (Part.BASE, Part.SAVED, Part.BIAS) else ""
        module = ".".join([*above, within] if within else above)
        if not module or not _fits(part, rest):
            part = Part.UNKNOWN
        return AdapterTensor(part=part, module=module, attribute=attribute, stored=stored)
    module, _, attribute = path.rpartition(".")
    return AdapterTensor(
        part=_plain_part(module, attribute, segments, config), module=module, attribute=attribute, stored=stored
    )


def _part_position(segments: Sequence[str]) -> int | None:
    """Where a name says what the tensor is. A LoRA of a LoRA's base layer, as PEFT nests them, counts as one."""
    found = [at for at, segment in enumerate(segments) if segment in BY_SEGMENT]
    return next((at for at in found if segments[at] != "base_layer"), found[0] if found else None)


def _fits(part: Part, rest: Sequence[str]) -> bool:
    """Whether what follows the part in the name is what PEFT writes there: an adapter's name at most, and `weight`."""
    if part in (Part.LORA_A, Part.LORA_B):
        return rest[-1:] == ["weight"] and len(rest) <= 2
    if part is Part.LORA_BIAS:
        return len(rest) <= 2
    if part in (Part.BASE, Part.SAVED, Part.BIAS):
        return bool(rest)
    return len(rest) <= 1 or (part is Part.MAGNITUDE and len(rest) <= 2)


def _plain_part(module: str, attribute: str, segments: Sequence[str], config: AdapterConfig) -> Part:
    """What a tensor is whose name has no part of LoRA in it: a parameter of the base model, or another method's."""
    if any(segment.startswith("lora_") for segment in segments):
        return Part.METHOD if config.peft_type != LORA else Part.UNKNOWN
    if module and config.saves(module):
        return Part.SAVED
    if config.peft_type not in (LORA, TRAINABLE_TOKENS):
        return Part.METHOD
    if module and attribute == "weight":
        return Part.BASE
    if module and attribute == "bias":
        return _bias(config)
    return Part.UNKNOWN


def _bias(config: AdapterConfig) -> Part:
    """A bias of the base model is trained if the config's `bias` is "all" or "lora_only"."""
    return Part.BASE if config.raw.get("bias") in (None, "none") else Part.BIAS


def _wrong(key: str, value: object, expected: str) -> NoReturn:
    _refuse(f"{key} is {shown(value)}, expected {expected}")


def _refuse(seen: str, remedy: str = _FETCH) -> NoReturn:
    raise FormatError(f"{ADAPTER_CONFIG}: {seen}", help=remedy)
