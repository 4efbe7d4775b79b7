"""Ties on disk: the redundant head goes, the flag says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from bowline.auditing.evidence_gathering import gather
from bowline.checkpoint.checkpoint import CONFIG
from bowline.edit.content import Content
from bowline.edit.draft import Draft
from bowline.edit.head_scale import scale_when_tied, scaled_source
from bowline.edit.row_selection import refuse_quantised
from bowline.errors import TieError
from bowline.families.flag_paths import flag_paths
from bowline.families.quirks import quirks_of
from bowline.families.transformers_table import lookup
from bowline.tie import Tie

__all__ = ["TieStep", "equal", "made_ties"]


@dataclass(frozen=True, slots=True)
class TieStep:
    """Drop the target of each tie whose two ends hold equal bytes, and set the flag.

    Ends that differ are refused, unless `keep` says whose values serve both. `keep_both` stores both ends.
    """

    keep: Literal["embedding", "head"] | None = None
    keep_both: bool = False
    verb: ClassVar[str] = "tie"

    def __str__(self) -> str:
        return "tie" + (f" --keep {self.keep}" if self.keep else "") + (" --keep-both" if self.keep_both else "")

    def apply(self, draft: Draft) -> Draft:
        """The draft with one stored matrix for each tie of its class.

        Raises:
            TieError: the class declares no tie, the ends differ, neither end is stored, or one is quantised.
        """
        declaration, config = draft.declaration, draft.config
        if not declaration.ties:
            raise TieError(
                f"{declaration.architecture or 'this model'} declares no tie: no loader would fill a missing head",
                help="`bowline audit` shows what it declares",
            )
        refuse_quantised(draft, ())
        paths = flag_paths(declaration, config, {declared.tie.target for declared in declaration.ties})
        edited = draft.with_values(
            CONFIG, {tuple(path.split(".")): True for path in paths if lookup(config, path) is not True}
        )
        carried = False
        for tie in sorted(made_ties(edited), key=lambda tie: tie.target != declaration.head):
            if tie.target == declaration.head and self._carries_scale(draft, tie):
                carried, edited = True, edited.without(tie.target)
            else:
                edited = self._tied(draft, edited, tie, declaration.head)
        for target, source in quirks_of(declaration.family).ties_beside.items():
            edited = self._tied(draft, edited, Tie(target, source), declaration.head)
        return scale_when_tied(draft, edited, carried=carried)

    def _carries_scale(self, draft: Draft, tie: Tie) -> bool:
        """Whether the head is the embedding times the scale that the flag stands for (T5, untied by `UntieStep`)."""
        if tie.target not in draft.tensors or tie.source not in draft.tensors or self.keep_both:
            return False
        scaled = scaled_source(draft, tie.source)
        return scaled is not None and equal(draft.tensors[tie.target], scaled)

    def _tied(self, draft: Draft, edited: Draft, tie: Tie, head: str | None) -> Draft:
        target, source = draft.tensors.get(tie.target), draft.tensors.get(tie.source)
        is_head = tie.target == head
        if target is None and source is None:
            if is_head:
                raise TieError(f"{tie}: neither is stored", help="fetch the checkpoint again: it has no embedding")
            return edited
        if target is None:
            return edited
        if source is None:  # only the target holds the matrix: it goes on under the source's name
            if tie.source not in edited.tensors:
                edited = edited.with_tensor(tie.source, target, draft.homes[tie.target])
            return edited if self.keep_both else edited.without(tie.target)
        if not equal(target, source):
            if self.keep is None or (self.keep == "head" and not is_head and len(target.shape) > 1):
                raise _differ(draft, tie, target, source)
            kept = target if self.keep == "head" else source
            edited = edited.with_tensor(tie.source, kept, draft.homes[tie.source])
            if self.keep_both:
                edited = edited.with_tensor(tie.target, kept, draft.homes[tie.target])
            edited = edited.with_notes(f"{tie}: differed; {'the head' if kept is target else 'the embedding'} was kept")
        return edited if self.keep_both else edited.without(tie.target)


def made_ties(draft: Draft) -> Sequence[Tie]:
    """The ties that the newest version of transformers makes under the draft's config."""
    made = draft.declaration.made
    return made[max(made)] if made else ()


def equal(one: Content, other: Content) -> bool:
    """Whether two tensors have the same dtype, shape and bytes."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return all(np.array_equal(one.bits(*block), other.bits(*block)) for block in one.blocks())


def _differ(draft: Draft, tie: Tie, target: Content, source: Content) -> TieError:
    help_text = "choose whose values serve both: --keep embedding or --keep head; or keep both, and `bowline untie`"
    if target.shape != source.shape or target.dtype != source.dtype:
        seen = f"{target.dtype} {list(target.shape)} and {source.dtype} {list(source.shape)}"
        if target.shape != source.shape:
            return TieError(f"{tie}: cannot be one matrix: {seen}", help="keep both: `bowline untie`")
        return TieError(f"{tie}: are stored as {seen}, expected one dtype", help=help_text)
    found = next((one.difference for one in gather(draft.source).ties if one.tie == tie), None)
    rows = f"{found.rows_differing} of {target.rows}" if found else "some"
    extent = f" {found.extent}" if found else ""
    like = f"; the difference looks like {found}" if found and found.has_pattern else ""
    return TieError(f"{tie}: {rows} rows differ{extent}{like}", help=help_text)
