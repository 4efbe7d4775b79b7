"""The evidence of one PEFT adapter: what it trains at the ends of the vocabulary, and what is known of its base."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from bowline.auditing.evidence import Evidence
from bowline.checkpoint.formats.peft_adapter import Adapter, AdapterTensor, names_module
from bowline.wording import joined

__all__ = [
    "AdapterEvidence",
    "BaseModel",
    "AdapterDelta",
    "DeltaKind",
    "End",
    "Holds",
    "Merge",
    "MergedEnd",
    "TiedModule",
]


class End(StrEnum):
    """An end of the vocabulary."""

    EMBEDDING = "embedding"
    HEAD = "head"


class DeltaKind(StrEnum):
    """The ways in which an adapter changes a module."""

    LORA = "LoRA"
    DORA = "DoRA"
    COPY = "a trained copy"
    ROWS = "trained rows"
    OTHER = "another method"


class Holds(StrEnum):
    """The changes that a module can hold after a merge, in addition to the base's values."""

    BASE = "unchanged"
    OWN = "its own change"
    OTHERS = "the change of another module"
    SUM = "the changes of several modules"
    REPEATED = "its change several times"
    ROWS_OF_SEVERAL = "rows of several modules, the last written"
    OPEN = "not known"


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedModule:
    """A module of the base model that holds the embedding or the head: its path in memory, and in the base's files."""

    module: str
    end: End
    stored: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterDelta:
    """One change that the adapter trains in a module of the vocabulary.

    `loaded` is false if PEFT leaves the tensors out when it loads the adapter, because no entry of the config names the
    module; `None` if a regular expression decides it.
    """

    place: TiedModule
    kind: DeltaKind
    rank: int | None = None
    scaling: float | None = None
    rows: tuple[int, ...] | None = None
    loaded: bool | None = True
    tensors: tuple[AdapterTensor, ...] = ()

    @property
    def count(self) -> int:
        """The number of trained rows."""
        return len(self.rows) if self.rows is not None else next(iter(self.tensors[0].stored.shape), 0)

    def __str__(self) -> str:
        if self.kind is DeltaKind.COPY:
            return "a trained copy (modules_to_save)"
        if self.kind is DeltaKind.ROWS:
            return f"{self.count} trained row{'s' * (self.count != 1)}"
        if self.kind is DeltaKind.OTHER:
            return "another PEFT method"
        rank = f" of rank {self.rank}" if self.rank is not None else ""
        scaling = f", scaling {self.scaling:.4g}" if self.scaling is not None else ""
        return f"{self.kind.value}{rank}{scaling}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedEnd:
    """The change that one module holds after a merge."""

    place: TiedModule
    holds: Holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """The result of merging the adapter with one tool, for a base that is tied or for one that is not.

    `tie_stays` is `None` if the base has none, or if it is not known. `exact` says whether the merged checkpoint,
    loaded again, computes what the adapter model computed.
    """

    tool: str
    tied_base: bool
    ends: tuple[MergedEnd, ...]
    tie_stays: bool | None
    exact: bool | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """The base model. If it was not opened, `evidence` is `None`, and `reason` says why.

    `places` are the modules that hold one matrix if the model is tied, the input embedding first. `tied` is the state
    that transformers 5 gives them when it loads the base; `None` if it is not known.
    """

    location: str | None
    given: bool
    reason: str | None
    evidence: Evidence | None
    architecture: str | None
    places: tuple[TiedModule, ...]
    tied: bool | None
    head_bias: bool
    bias_tied: bool
    """True if the flag that ties the head also ties its bias to another bias."""
    headless: str | None = None
    """The task or the class of the model that was adapted, if that has no output head."""
    unused: frozenset[str] = frozenset()
    """Modules of the matrix that the model does not call: others look the tokens up."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    modules: frozenset[str] = frozenset()
    """The paths of all modules that have tensors, as the files spell them."""
    prefix: str = ""
    renamed: bool = False
    """True if the names of the class's parameters differ from the names in its files."""

    @property
    def source(self) -> TiedModule | None:
        """The input embedding, if it is known."""
        return self.places[0] if self.places and self.places[0].end is End.EMBEDDING else None

    def others(self, module: str) -> str:
        """The other modules of the same matrix, in words."""
        return joined([place.module for place in self.places if place.module != module]) or "the other end"

    def find(self, module: str) -> TiedModule | None:
        """The place of the vocabulary that this module is."""
        for place in self.places:
            if _same_module(place.module, module) or _same_module(place.stored, module):
                return place
        return None

    def has(self, module: str) -> bool:
        """True if the base stores this module. An end of a tie counts even if it is not stored."""
        return self.find(module) is not None or any(one in self.modules for one in self._spellings(module))

    def shape(self, module: str, attribute: str = "weight") -> tuple[int, ...] | None:
        """The shape of a parameter; that of the shared matrix for an end that is not stored."""
        for one in self._spellings(module):
            if (shape := self.shapes.get(f"{one}.{attribute}")) is not None:
                return shape
        if self.tied and attribute == "weight" and self.find(module) is not None:
            for place in self.places:
                for one in self._spellings(place.stored):
                    if (shape := self.shapes.get(f"{one}.weight")) is not None:
                        return shape
        return None

    def stored(self, module: str, attribute: str = "weight") -> str | None:
        """The name in the base's files of a parameter, or `None` if they do not hold it."""
        return next((name for one in self._spellings(module) if (name := f"{one}.{attribute}") in self.shapes), None)

    def _spellings(self, module: str) -> Iterator[str]:
        yield module
        if self.prefix:
            yield module.removeprefix(self.prefix) if module.startswith(self.prefix) else self.prefix + module


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterEvidence:
    """Everything that is known about one adapter. The adapter's rules read this and nothing else."""

    location: str
    adapter: Adapter
    base: BaseModel
    deltas: tuple[AdapterDelta, ...]
    """At the ends of the vocabulary, in the order of `base.places`."""
    elsewhere: Mapping[str, int]
    """The last part of the path of each other module that is trained, and the number of such modules."""
    alike: bool | None
    """True if every loaded delta has the same values. `None` if only one is loaded, or values were not read."""
    merges: tuple[Merge, ...]
    values_read: bool
    not_finite: tuple[str, ...] = ()
    """Tensors of deltas that have a NaN or an infinity."""
    zero: tuple[str, ...] = ()
    """Modules whose LoRA is 0 because one of its factors is."""

    @property
    def rows_of_all_ends(self) -> bool:
        """True if the adapter trains only rows of the input embedding, which PEFT trains for every end of the tie."""
        return bool(
            self.base.tied
            and len(self.loaded) == 1
            and self.loaded[0].kind is DeltaKind.ROWS
            and self.loaded[0].place is self.base.source
        )

    @property
    def loaded(self) -> tuple[AdapterDelta, ...]:
        """The deltas that PEFT does not leave out."""
        return tuple(delta for delta in self.deltas if delta.loaded is not False)


def _same_module(one: str, other: str) -> bool:
    """True if both paths name the same module. The model's prefix may be absent from either."""
    return names_module(one, other) or names_module(other, one)
