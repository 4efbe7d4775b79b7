"""Copies and aliases of tied tensors go; a pickle becomes safetensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bowline.edit.content import Stored
from bowline.edit.draft import Draft
from bowline.edit.steps.tie_step import equal, made_ties

__all__ = ["DedupeStep"]


@dataclass(frozen=True, slots=True)
class DedupeStep:
    """Drop the target of each tie that the config asks for, where its bytes equal the source's."""

    verb: ClassVar[str] = "dedupe"

    def __str__(self) -> str:
        return "dedupe"

    def apply(self, draft: Draft) -> Draft:
        """The draft with each tied matrix stored once. Ends that differ stay, with a note; the flag stays as it is."""
        dropped = 0
        edited = draft
        for tie in made_ties(draft):
            target, source = draft.tensors.get(tie.target), draft.tensors.get(tie.source)
            if target is None or source is None:
                continue
            if _one_storage(target, source) or equal(target, source):
                edited = edited.without(tie.target)
                dropped += target.nbytes
            else:
                edited = edited.with_notes(f"{tie}: the ends differ and stay; `bowline tie --keep` chooses one")
        freed = f"{dropped:,} bytes of copies go" if dropped else "no tie is stored twice"
        return edited.with_notes(freed)


def _one_storage(one: object, other: object) -> bool:
    return isinstance(one, Stored) and isinstance(other, Stored) and one.tensor.same_storage(other.tensor)
