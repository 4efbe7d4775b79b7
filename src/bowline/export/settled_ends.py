"""Reads a checkpoint's two ends in floats, and whether they are one matrix, before an export."""

from __future__ import annotations

from typing import NamedTuple

from bowline.auditing.adapter_gathering import known_base
from bowline.checkpoint.places.local_directory import LocalDirectory
from bowline.edit.checkpoint_edit import EditableCheckpoint
from bowline.edit.commit import Fingerprint, fingerprint
from bowline.edit.dequantised_table import with_float_tables
from bowline.edit.draft import Draft, begin
from bowline.errors import TieError, UsageError

__all__ = ["SettledEnds", "settled_ends"]


class SettledEnds(NamedTuple):
    """A checkpoint in floats, whether both ends are one matrix, and the state of its files when they were read."""

    draft: Draft
    tied: bool
    seen: Fingerprint


def settled_ends(checkpoint: EditableCheckpoint) -> SettledEnds:
    """The checkpoint in floats, and whether transformers 5 computes both ends with one matrix.

    A table of `bowline quantize` serves both ends by its layout, and is dequantised.

    Raises:
        TieError: it is not known whether the ends are one matrix.
        UsageError: the checkpoint is not on this machine.
        CheckpointError: it cannot be read.
    """
    if not isinstance(checkpoint.files, LocalDirectory):
        raise UsageError(f"{checkpoint.location}: is not on this machine", help="download it first")
    seen = fingerprint(checkpoint.files)
    stored = begin(checkpoint)
    draft = with_float_tables(stored)
    if draft is not stored:
        head = draft.declaration.head
        if head in draft.tensors:
            raise TieError(
                f"{head} is stored beside a quantised table that serves both ends",
                help="remove one of them; `bowline audit` says which of them the loaders use",
            )
        return SettledEnds(draft, True, seen)
    base = known_base(checkpoint, values=True, given=True)
    if base.tied is None:
        raise TieError(
            f"it is not known whether the two ends are one matrix: {base.reason}",
            help="`bowline audit` says what is wrong; mend it with `bowline tie` or `bowline untie`",
        )
    return SettledEnds(draft, base.tied, seen)
