"""A checkpoint in the layout that transformers and mlx-lm read, with its tie settled in flag and bytes.

mlx-lm reads the same files as transformers, by rules of its own: an absent flag has another default, and a stored head
beside a true flag is dropped or refused. So the flag is written, a redundant head is left out, and the loader's own
rule is asked about the result before it gets its name.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from bowline.auditing.evidence_gathering import gather
from bowline.auditing.loaders import Fate
from bowline.auditing.progress import Progress
from bowline.checkpoint import open_checkpoint as open_plain
from bowline.checkpoint.places.file_set import FileSet
from bowline.edit import EditReport, open_checkpoint
from bowline.edit.commit import commit
from bowline.edit.draft import Draft
from bowline.edit.plan import plan_of
from bowline.edit.steps.tie_step import TieStep
from bowline.edit.steps.untie_step import UntieStep
from bowline.errors import CheckpointError
from bowline.export.settled_ends import settled_ends

__all__ = ["export_layout"]

LOADERS = {"hf": "transformers-5", "mlx": "mlx-lm"}


def export_layout(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    to: Literal["hf", "mlx"],
    progress: Progress | None = None,
) -> EditReport:
    """Write a checkpoint to a new directory such that the loader makes one matrix or two, as the model has.

    A redundant head is left out and the flag set; for two matrices both are stored and the flag is false. The table of
    `bowline quantize` is written as a float matrix.

    Arguments:
        source: a checkpoint's directory.
        destination: a new directory.
        to: whose rules decide: transformers 5's (`"hf"`) or mlx-lm's (`"mlx"`).
        progress: receives the bytes written and compared.

    Raises:
        TieError: it is not known whether the ends are one matrix, or the loader cannot hold what the model has.
        UsageError: the loader does not know the class.
        CheckpointError: the source cannot be read, or the result cannot be written. Nothing is left then.
    """
    step = _ExportStep(to)
    with open_checkpoint(source) as checkpoint:
        draft, tied, seen = settled_ends(checkpoint)
        if draft.declaration.ties:
            draft = (TieStep() if tied else UntieStep()).apply(draft)
        expected = Fate.TIED if tied else Fate.KEPT
        draft = replace(draft, checks=(*draft.checks, lambda files: _outcome(files, to, expected)))
        return commit(plan_of(draft, (step,)), seen, Path(destination), progress=progress)


@dataclass(frozen=True, slots=True)
class _ExportStep:
    """The line of the plan."""

    to: str
    verb: ClassVar[str] = "export"

    def __str__(self) -> str:
        return f"export --to {self.to}"

    def apply(self, draft: Draft) -> Draft:
        return draft


def _outcome(files: FileSet, to: str, expected: Fate) -> str:
    """What the loader makes of the result's head, in a sentence.

    Raises:
        CheckpointError: it is not what the model has, or the loader does not know the class.
    """
    with open_plain(os.path.join(files.location, "")) as checkpoint:  # noqa: PTH118 - with a slash it is no Hub name
        evidence = gather(checkpoint, values=False)
    loader = LOADERS[to]
    outcomes = evidence.outcomes.get(loader, {})
    head = evidence.declaration.head
    found = outcomes.get(head) if head is not None else None
    if found is None:
        if not evidence.declaration.ties and to == "hf":
            return f"{loader}: the class declares no tie"
        raise CheckpointError(
            f"{loader}: what it makes of {evidence.declaration.architecture or 'this class'} is not known",
            help="`bowline audit` lists the loaders whose outcome is known",
        )
    if found.fate is not expected:
        raise CheckpointError(
            f"{loader}: {head} would be {found.fate.value}, expected {expected.value}: {found.reason}",
            help="`bowline audit` says what each loader makes of the source",
        )
    return f"{loader}: {head} is {found.fate.value} ({found.reason})"
