"""The report on one checkpoint as a passage of Markdown for its model card."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, date, datetime
from urllib.parse import quote

from bowline import __version__
from bowline.auditing.audit_report import AuditReport
from bowline.auditing.evidence import Evidence
from bowline.auditing.report.scope import audit_command, checked, not_checked
from bowline.auditing.rules import Severity
from bowline.auditing.verdict import in_loaders, on_disk
from bowline.markup import code_span
from bowline.tie import TieState
from bowline.wording import joined

__all__ = ["render_card"]

COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow"}
NOUNS = {Severity.INFO: "informational finding"}
STATES = {
    TieState.SHARED: "tied",
    TieState.ALIAS: "tied",
    TieState.TARGET_MISSING: "no head stored",
    TieState.SOURCE_MISSING: "no embedding stored",
    TieState.BOTH_MISSING: "neither end stored",
    None: "not compared",
}
"""The state as the badge has it, where the flag has no part in it."""


def render_card(report: AuditReport, *, on: date | None = None) -> str:
    """A badge, the verdict, the findings, what was checked and what was not, and the command that repeats the audit.

    `on` is the day that the text names; today (UTC) if it is not given. Strings from the checkpoint are inline code, so
    they cannot add a link, a heading or HTML to the card.

    Example:
        >>> print(render_card(audit("fine-tuned")))  # doctest: +SKIP
    """
    evidence = report.evidence
    paragraphs = [
        _badge(report),
        f"**Weight tying**: {_verdict(evidence)}",
        f"**Findings**: {_findings(report)}",
        f"**Checked**: {'; '.join(checked(evidence))}. **Not checked**: {'; '.join(not_checked(evidence))}.",
        f"Bowline {__version__}, {(on or datetime.now(UTC).date()).isoformat()}. To repeat the audit:",
        f"```console\n$ {audit_command(evidence)}\n```",
    ]
    return "\n\n".join(paragraphs)


def _badge(report: AuditReport) -> str:
    """An image of shields.io. Its words are Bowline's own: nothing from the checkpoint is part of the address."""
    counts = _counts(report)
    worst = next((severity for severity in COLOURS if counts[severity]), None)
    state = _state(report.evidence)
    found = ", ".join(_number(counts[severity], severity.word) for severity in COLOURS if counts[severity])
    text = f"{state}, {found}" if found else state
    settled = report.evidence.main_tie is not None and report.evidence.main_tie.state is not None
    colour = COLOURS[worst] if worst else "brightgreen" if settled else "lightgrey"
    words = (quote(part.replace("-", "--").replace("_", "__"), safe="") for part in ("weight tying", text))
    return f"![weight tying: {text}](https://img.shields.io/badge/{'-'.join(words)}-{colour})"


def _state(evidence: Evidence) -> str:
    tie = evidence.main_tie
    if tie is None:
        return "no tie"
    if tie.state in STATES:
        return STATES[tie.state]
    flag = tie.declared.flag.value
    if tie.state is TieState.EQUAL:
        return "tied, stored twice" if flag else "two equal matrices"
    if tie.quantised is not None and tie.quantised.within is not None:
        return "equal within quantisation"
    return "untied" if flag is False or not _has_flag(evidence) else "two matrices"


def _has_flag(evidence: Evidence) -> bool:
    return not evidence.gguf_file and not (evidence.graph_file and evidence.config is None)


def _verdict(evidence: Evidence) -> str:
    """Two or three sentences: the bytes, the flag, and the head after loading."""
    flag = evidence.declaration.flag
    if not _has_flag(evidence):
        stated = "the format has no flag"
    elif flag.path is not None:
        stated = f"the flag {code_span(flag.path)} is {str(flag.value).lower()}"
    else:
        default = "" if flag.value is None else f", and the default is {str(flag.value).lower()}"
        stated = f"the flag `tie_word_embeddings` is absent{default}"
    tie = evidence.main_tie
    if tie is None:
        return f"{on_disk(evidence)}; {stated}."
    ends = f"Head: {code_span(tie.tie.target)}; embedding: {code_span(tie.tie.source)}."
    loaded = in_loaders(evidence)
    after = f" The head after loading: {loaded}." if loaded else ""
    return f"{on_disk(evidence)}; {stated}.{after} {ends}"


def _counts(report: AuditReport) -> Counter[Severity]:
    return Counter(finding.severity for finding in report.findings)


def _findings(report: AuditReport) -> str:
    """The number of findings by severity, each with its codes."""
    parts = []
    for severity in Severity:
        codes = Counter(f"{found.code} {found.name}" for found in report.findings if found.severity is severity)
        if codes:
            named = ", ".join(f"{code} ({times} times)" if times > 1 else code for code, times in codes.items())
            parts.append(f"{_number(codes.total(), NOUNS.get(severity, severity.word))} ({named})")
    return f"{joined(parts) if parts else 'none'}."


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
