"""`open_checkpoint(path).edit()`: a chain of steps, planned and committed together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from bowline.auditing.progress import Progress
from bowline.checkpoint import checkpoint as checkpoints
from bowline.checkpoint.checkpoint import Checkpoint
from bowline.checkpoint.formats.gguf import GGUF_SUFFIX
from bowline.checkpoint.places.local_directory import LocalDirectory
from bowline.edit.commit import EditReport, commit, fingerprint
from bowline.edit.draft import begin
from bowline.edit.plan import EditPlan, plan_of
from bowline.edit.steps.cast_step import CastStep
from bowline.edit.steps.dedupe_step import DedupeStep
from bowline.edit.steps.resize_step import ResizeStep
from bowline.edit.steps.step import Step
from bowline.edit.steps.tie_step import TieStep
from bowline.edit.steps.untie_step import UntieStep
from bowline.errors import UsageError

__all__ = ["CheckpointEdit", "EditableCheckpoint", "open_checkpoint"]


class EditableCheckpoint(Checkpoint):
    """An open checkpoint that can be edited."""

    def edit(self) -> CheckpointEdit:
        """An edit of this checkpoint, without steps yet."""
        return CheckpointEdit(self)


def open_checkpoint(place: str | os.PathLike[str]) -> EditableCheckpoint:
    """Open a checkpoint: a directory, one of its files, or a Hub repository (`org/name[@revision]`).

    See `bowline.checkpoint.open_checkpoint`; `edit()` begins an edit of it.

    Example:
        >>> plan = open_checkpoint("gpt2").edit().untie().resize(50304).plan()  # doctest: +SKIP
        >>> [str(step) for step in plan.steps]  # doctest: +SKIP
        ['untie', 'resize --to 50304']
    """
    return checkpoints.open_checkpoint(place, EditableCheckpoint)


class CheckpointEdit:
    """Steps on a checkpoint's files. Nothing is read or written until `plan` or `commit`.

    Each step returns a new edit, so a chain can be continued in two ways.

    Example:
        >>> edit = open_checkpoint("gpt2").edit().untie().cast("bf16")  # doctest: +SKIP
        >>> print(edit.commit("gpt2-untied"))  # doctest: +SKIP
    """

    def __init__(self, source: Checkpoint, steps: Sequence[Step] = ()) -> None:
        self.source = source
        self.steps = tuple(steps)
        self._seen = fingerprint(source.files) if isinstance(source.files, LocalDirectory) else {}

    def tie(self, *, keep: Literal["embedding", "head"] | None = None, keep_both: bool = False) -> CheckpointEdit:
        """Drop the target of each tie whose ends are equal, and set the flag; see `bowline tie`."""
        return self._and(TieStep(keep=keep, keep_both=keep_both))

    def untie(self) -> CheckpointEdit:
        """Store a copy for each tie that ends with the flag, and clear it; see `bowline untie`."""
        return self._and(UntieStep())

    def resize(
        self,
        to: int | None = None,
        *,
        pad_to_multiple_of: int | None = None,
        new_rows: str = "mean",
        add_tokens: Sequence[str] = (),
    ) -> CheckpointEdit:
        """Another number of rows for the vocabulary; see `bowline resize`."""
        step = ResizeStep(to=to, pad_to_multiple_of=pad_to_multiple_of, new_rows=new_rows, add_tokens=tuple(add_tokens))
        return self._and(step)

    def prune(
        self,
        *,
        corpus: Sequence[str | os.PathLike[str]] = (),
        keep_tokens: str | os.PathLike[str] | None = None,
        pattern: str | None = None,
        draft: int | None = None,
    ) -> CheckpointEdit:
        """Only the tokens that a text uses, that a file lists or a pattern finds; see `bowline prune`.

        With `draft`, a head of that many rows for speculative decoding: those of the most frequent tokens.

        Raises:
            UsageError: both `draft` and `pattern` are given.
        """
        from bowline.edit.steps.draft_head_step import DraftHeadStep
        from bowline.edit.steps.prune_step import PruneStep

        listed = None if keep_tokens is None else Path(keep_tokens)
        if draft is not None:
            if pattern is not None:
                raise UsageError("draft and pattern cannot both be given", argument=("draft", "pattern"))
            return self._and(DraftHeadStep(corpus=tuple(map(Path, corpus)), keep_tokens=listed, count=draft))
        return self._and(PruneStep(corpus=tuple(map(Path, corpus)), keep_tokens=listed, pattern=pattern))

    def merge(
        self, adapter: str | os.PathLike[str], *, tied: Literal["untie", "both", "refuse"] = "untie"
    ) -> CheckpointEdit:
        """The base with a PEFT adapter in it; see `bowline merge`."""
        from bowline.edit.steps.merge_step import MergeStep

        if tied not in ("untie", "both", "refuse"):
            raise UsageError(f"tied is {tied!r}, expected 'untie', 'both' or 'refuse'", argument="tied")
        return self._and(MergeStep(adapter=Path(adapter), tied=tied))

    def cast(self, dtype: str, *, only: Literal["vocabulary"] | None = None) -> CheckpointEdit:
        """Another float dtype, `"bf16"`, `"f16"` or `"f32"`; see `bowline cast`."""
        return self._and(CastStep(dtype=dtype, only=only))

    def quantize(self, dtype: Literal["int8", "int4"], *, group_size: int | None = None) -> CheckpointEdit:
        """One quantised table for both ends of the tie; see `bowline quantize`."""
        from bowline.edit.steps.quantize_step import QuantizeStep

        return self._and(QuantizeStep(dtype=dtype, group_size=group_size))

    def dedupe(self) -> CheckpointEdit:
        """Store each tied matrix once, in safetensors; see `bowline dedupe`."""
        return self._and(DedupeStep())

    def plan(self) -> EditPlan:
        """What a commit would do, without writing.

        Raises:
            BowlineError: a step cannot be done; the subclass says why.
        """
        return self._plan(None)

    def _plan(self, single: str | None) -> EditPlan:
        """The plan; with `single`, that of one GGUF file of this name."""
        if not self.steps:
            raise UsageError("the edit has no steps", help="add one, such as .untie()")
        if self.source.gguf is not None:
            from bowline.edit.gguf import gguf_plan  # imported only for GGUF files

            return gguf_plan(self.source, self.steps, single)
        draft = begin(self.source)
        for step in self.steps:
            draft = step.apply(draft)
        return plan_of(draft, self.steps)

    def commit(
        self,
        destination: str | os.PathLike[str] | None = None,
        *,
        in_place: bool = False,
        copy: bool = False,
        progress: Progress | None = None,
    ) -> EditReport:
        """Write the result to a new directory, or in place; see `bowline.edit`.

        The result of a GGUF file can also be a new file, whose name ends in `.gguf`.

        Raises:
            UsageError: not exactly one of `destination` and `in_place` is given.
            BowlineError: a step cannot be done, or the result cannot be written. Nothing is changed then.
        """
        if (destination is None) is not in_place:
            raise UsageError(
                "expected a destination or in_place=True, and not both", argument=("destination", "in_place")
            )
        place = None if destination is None else Path(destination)
        single = place.name if place is not None and self.source.gguf and place.name.endswith(GGUF_SUFFIX) else None
        return commit(self._plan(single), self._seen, place, copy=copy, progress=progress)

    def _and(self, step: Step) -> CheckpointEdit:
        edit = CheckpointEdit.__new__(CheckpointEdit)
        edit.source, edit.steps, edit._seen = self.source, (*self.steps, step), self._seen
        return edit
