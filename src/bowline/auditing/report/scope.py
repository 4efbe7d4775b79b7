"""Lists what an audit checked and did not check, and gives the command that repeats it, for cards and pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bowline.auditing.evidence import Evidence
from bowline.auditing.loaders import loaders_run
from bowline.markup import code_span
from bowline.wording import joined, listed, printable, shell_word

__all__ = ["audit_command", "checked", "not_checked"]


def checked(evidence: Evidence) -> Iterator[str]:
    """The things that the audit checked, in phrases of Markdown."""
    architecture = evidence.declaration.architecture
    if evidence.declaration.inferred:
        named = f" of the class {code_span(architecture)}, which Bowline does not know" if architecture else ""
        yield f"the ties that names and shapes show{named}"
    elif architecture:
        yield f"the ties that the class {code_span(architecture)} declares"
    if evidence.gguf_file:
        yield "the metadata of the GGUF file"
    elif evidence.config is not None:
        yield "`config.json`"
    yield f"the headers of {len(evidence.tensors)} tensor{'s' * (len(evidence.tensors) != 1)}"
    if evidence.tables:
        yield f"the values of {listed([code_span(table.name) for table in evidence.tables], 6)}"
    if evidence.tokenizer is not None and evidence.tokenizer.ids:
        yield "the tokenizer's ids"
    if evidence.base is not None:
        yield f"embedding and head against the original checkpoint {code_span(_shown(evidence.base.location))}"
    tie = evidence.main_tie
    predicted = [
        loaders_run()[loader]
        for loader, targets in evidence.outcomes.items()
        if tie is not None and targets.get(tie.tie.target) is not None
    ]
    if predicted:
        yield f"what {joined(predicted)} would do, by their own rules"


def not_checked(evidence: Evidence) -> Iterator[str]:
    """The things that it did not check, in phrases of Markdown."""
    if not evidence.values_read:
        yield "the values of any tensor, since the audit read headers only"
    elif evidence.main_tie is not None and evidence.main_tie.state is None:
        yield "whether embedding and head hold the same values"
    if not evidence.complete:
        yield "files of the checkpoint that were missing or could not be read"
    if evidence.config is None and not evidence.gguf_file and evidence.graph_file is None:
        yield "`config.json`, which is missing or cannot be read"
    if evidence.tokenizer is None or not evidence.tokenizer.ids:
        yield "a tokenizer, since there is none that Bowline can read"
    tie = evidence.main_tie
    unknown = [
        loaders_run()[loader]
        for loader, targets in evidence.outcomes.items()
        if loader != "vllm-0.28" and tie is not None and targets.get(tie.tie.target, False) is None
    ]
    if unknown:
        yield f"what {joined(unknown)} would do, which stays open"
    if evidence.base is None:
        yield "differences from the checkpoint that the model was trained from"
    yield "a real load: no loader was run on this checkpoint"
    yield "values outside the vocabulary's tables, and what the model generates"


def audit_command(evidence: Evidence) -> str:
    """The command that repeats the audit, without the directories of this machine above the checkpoint."""
    words = ["bowline", "audit", _argument(evidence.location)]
    if not evidence.values_read:
        words.append("--headers-only")
    if evidence.base is not None:
        words += ["--base", _argument(evidence.base.location)]
    return printable(" ".join(words))


def _argument(location: str) -> str:
    return shell_word(_shown(location))


def _shown(location: str) -> str:
    """The place without the directories of this machine above it: a card is public."""
    path = Path(location)
    return path.name or location if path.is_absolute() else location
