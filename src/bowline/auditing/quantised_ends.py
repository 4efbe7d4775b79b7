"""The two ends of a tie of which at least one is stored quantised: how each is stored, and how far they are apart."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bowline.auditing.quantised_names import in_other_form
from bowline.checkpoint.formats.gguf import GGUF_SUFFIX
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.tie import Tie

if TYPE_CHECKING:  # the layouts are loaded when a tensor stands beside a weight
    from bowline.checkpoint.formats.quantised import QuantisedWeight, StoredBytes

__all__ = ["UNKNOWN", "QuantisedEnds", "quantised_ends"]

UNKNOWN = "an unknown layout"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedEnds:
    """How the ends of a tie are stored; an end that is not quantised is `None` here.

    `reason` says why the ends were not compared. `within` is the largest difference of a value as a multiple of the
    quantisation's step, if quantisation explains the difference of the two.
    """

    target: QuantisedWeight | None
    source: QuantisedWeight | None
    reason: str | None = None
    within: float | None = None

    @property
    def tables(self) -> tuple[QuantisedWeight, ...]:
        """The ends that are quantised, the target first."""
        return tuple(end for end in (self.target, self.source) if end is not None)

    @property
    def layouts(self) -> str:
        """The layouts in words, each once."""
        return " and ".join(dict.fromkeys(table.layout for table in self.tables))

    @property
    def shape(self) -> tuple[int, int] | None:
        """The shape of the first quantised end whose shape is known."""
        return next((table.shape for table in self.tables if table.shape is not None), None)

    @property
    def alike(self) -> bool:
        """Whether both ends have one layout: a single quantiser would have made equal codes of one table."""
        return self.target is not None and self.source is not None and self.target.layout == self.source.layout

    def as_dict(self) -> dict[str, Any]:
        """The record of the JSON report."""
        ends = {"target": self.target, "source": self.source}
        return {
            **{end: {"layout": table.layout, "bytes": table.nbytes} if table else None for end, table in ends.items()},
            "within_steps": self.within,
            "reason": self.reason,
        }


def quantised_ends(
    tie: Tie,
    tensors: Mapping[str, StoredTensor],
    config: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
    stored: StoredBytes | None = None,
) -> QuantisedEnds | None:
    """How the ends of a tie are stored, or `None` if neither is quantised. Without `stored` only headers are read."""
    ends: list[QuantisedWeight | None] = []
    for name in (tie.target, tie.source):
        plain = tensors.get(name)
        if not _has_parts(name, tensors) or (plain is not None and plain.file.endswith(GGUF_SUFFIX)):
            ends.append(None)
            continue
        from bowline.checkpoint.formats.quantised import QuantisedWeight, recognise

        end = recognise(name, tensors, config, metadata, stored)
        if end is None and in_other_form(name, tensors):
            parts = {} if plain is None else {"codes": plain}
            end = QuantisedWeight(name=name, layout=UNKNOWN, parts=parts, problem="its quantised layout is not known")
        ends.append(end)
    target, source = ends
    if target is None and source is None:
        return None
    problem = next((f"{end.name}: {end.problem}" for end in ends if end is not None and end.problem), None)
    return QuantisedEnds(target=target, source=source, reason=problem)


def _has_parts(name: str, stored: Collection[str]) -> bool:
    """Whether a tensor other than the bias stands beside a weight: every quantised layout has one, such as its scales.

    Example:
        >>> _has_parts("lm_head.weight", {"lm_head.weight", "lm_head.bias"})
        False
    """
    stem = name.removesuffix("weight")
    return any(other.startswith(stem) and other not in (name, f"{stem}bias") for other in stored)
