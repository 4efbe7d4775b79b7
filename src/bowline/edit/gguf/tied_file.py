"""Ties in a GGUF file: `output.weight` goes, where llama.cpp falls back to `token_embd.weight`."""

from __future__ import annotations

from bowline.edit.gguf.gguf_draft import GGUFDraft
from bowline.edit.gguf.stored_rows import StoredRows
from bowline.edit.steps.tie_step import TieStep
from bowline.errors import TieError, UsageError
from bowline.families.gguf_names import GGUF_EMBEDDING, GGUF_HEAD, head_when_missing
from bowline.tie import Tie

__all__ = ["tied_file"]

TIE = Tie(GGUF_HEAD, GGUF_EMBEDDING)
SCALES = ("output.scale", "output.input_scale")
"""Tensors by which llama.cpp multiplies the logits of a head that is stored (NVFP4)."""


def tied_file(draft: GGUFDraft, step: TieStep) -> GGUFDraft:
    """The draft without `output.weight`, if it has the type and the bytes of `token_embd.weight`.

    Raises:
        TieError: llama.cpp does not fall back for this architecture, the two differ and `keep` says nothing, or
            neither is stored.
        UsageError: both are to be kept.
    """
    if step.keep_both:
        raise UsageError(
            "GGUF has no flag that says that two stored tensors are one", help="leave --keep-both out", argument="keep"
        )
    _refuse_without_fallback(draft)
    head, embedding = draft.tensors.get(GGUF_HEAD), draft.tensors.get(GGUF_EMBEDDING)
    if embedding is None:
        raise TieError(f"{TIE}: {GGUF_EMBEDDING} is not stored", help="fetch the file again")
    if head is None:
        return draft.with_notes("it is tied already: no output.weight is stored")
    scale = next((name for name in SCALES if name in draft.tensors), None)
    if scale is not None:
        raise TieError(f"{scale} belongs to {GGUF_HEAD} alone: tied, the logits would change", help="keep it untied")
    tensors = {name: rows for name, rows in draft.tensors.items() if name != GGUF_HEAD}
    said = _difference(head, embedding)
    if said is not None:
        if step.keep is None or head.shape != embedding.shape:
            fits = head.shape == embedding.shape
            raise TieError(
                f"{TIE}: {said}",
                help="choose whose values serve both: --keep embedding or --keep head" if fits else "keep both",
            )
        if step.keep == "head":
            tensors[GGUF_EMBEDDING] = head
        kept = head if step.keep == "head" else embedding
        draft = draft.with_notes(f"{TIE}: {said}; the {step.keep} was kept, in {kept.dtype}")
    return draft.with_tensors(tensors)


def _refuse_without_fallback(draft: GGUFDraft) -> None:
    missing = head_when_missing(draft.architecture)
    if missing == "tied":
        return
    said = {
        "refused": f"llama.cpp refuses a file of the architecture {draft.architecture} without {GGUF_HEAD}",
        "none": f"a model of the architecture {draft.architecture} has no head",
    }
    raise TieError(
        said.get(missing or "", f"it is not known whether llama.cpp falls back for {draft.architecture!r}"),
        help="`bowline audit` shows what the file declares",
    )


def _difference(head: StoredRows, embedding: StoredRows) -> str | None:
    """How the two differ, or `None` if type, shape and bytes are equal."""
    if head.shape != embedding.shape:
        return f"cannot be one matrix: {list(head.shape)} and {list(embedding.shape)}"
    if head.dtype != embedding.dtype:
        return f"are stored as {head.dtype} and {embedding.dtype}, expected one type"
    differing = sum(
        int((one != other).any(axis=1).sum()) for one, other in zip(head.blocks(), embedding.blocks(), strict=True)
    )
    return f"{differing} of {head.rows} rows differ" if differing else None
