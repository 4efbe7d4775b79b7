"""The state of a tie of which an end is stored quantised: by headers, and by dequantised values where they are read."""

from __future__ import annotations

from dataclasses import replace

from bowline.auditing.evidence import TieEvidence
from bowline.auditing.quantised_ends import QuantisedEnds, quantised_ends
from bowline.checkpoint.checkpoint import Checkpoint
from bowline.checkpoint.formats.gguf import GGUF_SUFFIX
from bowline.checkpoint.formats.graphs import GRAPH_SUFFIXES
from bowline.tie import TieState

__all__ = ["with_quantised_ends"]

OTHER_FILES = (GGUF_SUFFIX, *GRAPH_SUFFIXES)
"""Formats that say themselves how a tensor is quantised."""


def with_quantised_ends(checkpoint: Checkpoint, tie: TieEvidence, *, values: bool) -> TieEvidence:
    """The evidence of the tie with how its ends are quantised; unchanged if neither is. `unseen` stays true for it.

    Without `values` only headers are read, and two stored ends are not compared.
    """
    if any(file.endswith(OTHER_FILES) for file in checkpoint.weight_files):
        return tie
    if values:
        from bowline.auditing.quantised_comparison import stored_bytes  # imports numpy, unlike an audit of headers

        stored = stored_bytes(checkpoint)
    else:
        stored = None
    ends = quantised_ends(tie.tie, checkpoint.tensors, checkpoint.config, checkpoint.metadata, stored)
    if ends is None:
        return tie
    seen = replace(tie, quantised=ends, unseen=True)
    has_target = ends.target is not None or tie.target is not None
    has_source = ends.source is not None or tie.source is not None
    if ends.source is not None and ends.source.serves_both and not has_target:
        return replace(seen, state=TieState.SHARED)
    if not (has_target and has_source):
        if not checkpoint.complete:
            return replace(seen, state=None)
        if has_target:
            return replace(seen, state=TieState.SOURCE_MISSING if ends.reason is None else None)
        return replace(seen, state=TieState.SHARED if tie.declared.flag.value else TieState.TARGET_MISSING)
    if ends.reason is not None:
        return replace(seen, state=None)
    return _of_two(checkpoint, seen, ends, values=values)


def _of_two(checkpoint: Checkpoint, tie: TieEvidence, ends: QuantisedEnds, *, values: bool) -> TieEvidence:
    """The state of two stored ends whose layouts are known."""
    shapes = [
        quantised.shape if quantised is not None else None if plain is None else plain.shape
        for quantised, plain in ((ends.target, tie.target), (ends.source, tie.source))
    ]
    if None not in shapes and shapes[0] != shapes[1]:
        return replace(tie, state=TieState.INCOMPATIBLE)
    if ends.target is not None and ends.source is not None:
        mine, theirs = ends.target.parts, ends.source.parts
        if mine.keys() == theirs.keys() and all(part.same_storage(theirs[role]) for role, part in mine.items()):
            return replace(tie, state=TieState.ALIAS)
    if not values:
        return replace(tie, state=None)
    from bowline.auditing.quantised_comparison import compare_quantised

    found = compare_quantised(checkpoint, ends, tie.target, tie.source)
    return replace(tie, state=found.state, quantised=found.ends, difference=found.difference, has_nan=found.has_nan)
