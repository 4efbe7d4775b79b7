"""The plan of an edit of a GGUF file: what becomes of it and of the files beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bowline.checkpoint.checkpoint import Checkpoint
from bowline.checkpoint.formats.gguf import GGUF_SUFFIX
from bowline.checkpoint.formats.gguf.header import read_gguf_header
from bowline.edit.draft import Draft
from bowline.edit.gguf.fewer_rows import pruned_file, resized_file
from bowline.edit.gguf.gguf_draft import GGUFDraft, begin_gguf
from bowline.edit.gguf.tied_file import tied_file
from bowline.edit.plan import Action, EditPlan, FileParts, FilePlan
from bowline.edit.steps.prune_step import PruneStep
from bowline.edit.steps.resize_step import ResizeStep
from bowline.edit.steps.step import Step
from bowline.edit.steps.tie_step import TieStep
from bowline.errors import UsageError

__all__ = ["gguf_plan"]

TOKEN_MAP = ".token_map.json"
"""The end of the name of a token map, which begins as the file's does: a directory can hold several GGUF files."""


def gguf_plan(source: Checkpoint, steps: Sequence[Step], name: str | None = None) -> EditPlan:
    """What becomes of a GGUF file and of those beside it; with `name`, the file of that name and its token map alone.

    Raises:
        UsageError: a step cannot be made on GGUF, or the file is split in several.
        BowlineError: a step cannot be done; the subclass says why.
    """
    draft = begin_gguf(source)
    for step in steps:
        draft = _applied(draft, step)
    files = tuple(_files(draft, name))
    whole = Draft(source=source, tensors={}, homes={}, notes=draft.notes, checks=draft.checks)
    return EditPlan(
        location=source.location,
        steps=tuple(steps),
        files=files,
        notes=draft.notes,
        draft=whole,
        audited=name or draft.header.file,
        single=name is not None,
    )


def _applied(draft: GGUFDraft, step: Step) -> GGUFDraft:
    if isinstance(step, TieStep):
        return tied_file(draft, step)
    if isinstance(step, PruneStep):
        return pruned_file(draft, step)
    if isinstance(step, ResizeStep):
        return resized_file(draft, step)
    raise UsageError(
        f"{step.verb}: {draft.source.location} is a GGUF file, which can be tied, pruned and resized",
        help="edit the checkpoint that it was converted from, and convert again",
    )


def _files(draft: GGUFDraft, name: str | None) -> Iterator[FilePlan]:
    source, old = draft.source, draft.header.file
    sizes = source.files.sizes()
    file = name or old
    if draft.changed or name is not None:
        copied = sum(rows.nbytes for rows in draft.tensors.values())
        parts = FileParts(parts=draft.parts, sources=draft.sources, copied=copied, check=read_gguf_header)
        yield FilePlan(name=file, action=Action.WRITE, nbytes=draft.nbytes(), parts=parts)
    else:
        yield FilePlan(name=file, action=Action.KEEP, nbytes=sizes[old])
    texts: dict[str, bytes | None] = dict(draft.texts) if name is None else {}
    if draft.token_map is not None:
        texts[file.removesuffix(GGUF_SUFFIX) + TOKEN_MAP] = draft.token_map
    for place, text in texts.items():
        if text is None:
            yield FilePlan(name=place, action=Action.REMOVE, nbytes=sizes[place])
        else:
            is_new = name is not None or place not in sizes
            yield FilePlan(name=place, action=Action.WRITE, nbytes=len(text), text=text, is_new=is_new)
    named = {file, *texts}
    if name is None and source.only is None:
        yield from (
            FilePlan(name=other, action=Action.KEEP, nbytes=nbytes)
            for other, nbytes in sizes.items()
            if other not in named and not other.startswith(".bowline")
        )
