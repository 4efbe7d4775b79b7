"""Predicts what llama.cpp's runtime makes of the head of a GGUF file. The other loaders do not read GGUF themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bowline.auditing.evidence import TieEvidence
from bowline.auditing.loaders import Fate, Outcome
from bowline.auditing.shape_fit import wrong_lengths
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.families.declaration import Declaration
from bowline.families.gguf_names import GGUF_EMBEDDING, GGUF_HEAD, GGUF_LOADER, head_when_missing, head_when_stored

__all__ = ["gguf_outcomes"]


def gguf_outcomes(
    declaration: Declaration, tensors: Mapping[str, StoredTensor], ties: Iterable[TieEvidence]
) -> dict[str, dict[str, Outcome | None]]:
    """The outcome in llama.cpp by target; `None` for an architecture that Bowline's table of it does not have."""
    return {GGUF_LOADER: {tie.tie.target: _outcome(declaration, tensors, tie) for tie in ties}}


def _outcome(declaration: Declaration, tensors: Mapping[str, StoredTensor], tie: TieEvidence) -> Outcome | None:
    missing = head_when_missing(declaration.family)
    if missing is None:
        return None
    if tie.source is None:
        return Outcome(Fate.REFUSED, f"{GGUF_EMBEDDING} is not stored")
    wrong = wrong_lengths(declaration, tensors, GGUF_LOADER)
    if wrong and declaration.vocab_size is not None:
        name, rows = next(iter(wrong.items()))
        stated = f"{declaration.vocab_size.value} tokens"
        return Outcome(Fate.REFUSED, f"{name} has the wrong shape: {rows} rows for {stated}")
    if tie.target is None:
        if missing == "refused":
            return Outcome(Fate.REFUSED, f"this architecture needs {GGUF_HEAD}, which is not stored")
        return Outcome(Fate.TIED, f"{GGUF_HEAD} is not stored: {GGUF_EMBEDDING} serves as the head")
    if tie.target.shape[1:] != tie.source.shape[1:]:
        return Outcome(Fate.REFUSED, f"{GGUF_HEAD} has the wrong shape: rows of {list(tie.target.shape[1:])}")
    return Outcome(Fate.KEPT, "loaded as stored") if head_when_stored(declaration.family) else None
