"""Reports for people: the evidence, what each loader does with it, and the findings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from bowline.auditing.audit_report import AuditReport
from bowline.auditing.evidence import Evidence, TieEvidence
from bowline.auditing.loaders import loaders_run
from bowline.auditing.report.audit_run import Run
from bowline.auditing.report.quantised_text import quantised_ends_of, quantised_state
from bowline.auditing.rules import Finding, Severity
from bowline.auditing.rules.token_texts import tokens_of_difference
from bowline.auditing.verdict import verdict
from bowline.tie import TieState
from bowline.wording import joined, printable

if TYPE_CHECKING:  # the code for adapters is loaded when one is met
    from bowline.auditing.adapter_evidence import AdapterEvidence
    from bowline.auditing.adapter_report import AdapterReport

__all__ = ["render_concise", "render_full"]


def render_full(run: Run) -> str:
    """The full report of each checkpoint, and a count of the findings at the end."""
    lines: list[str] = []
    for report in run.reports:
        lines += [*_checkpoint(report), *_findings(report, verbose=run.verbose), ""]
    for adapter in run.adapters:
        from bowline.auditing.report.adapter_text import adapter_lines

        lines += [*adapter_lines(adapter), *_findings(adapter, verbose=run.verbose), ""]
    return "\n".join(map(printable, [*lines, *_failures(run), _footer(run)]))


def render_concise(run: Run) -> str:
    """One line for each finding: place, code, severity and message."""
    lines = [
        f"{_place(report.evidence, finding)}: {finding.code} {finding.severity.word}: {finding.message}"
        for report in run.all_reports
        for finding in report.findings
    ]
    return "\n".join(map(printable, [*lines, *_failures(run), _footer(run)]))


def _checkpoint(report: AuditReport) -> Iterator[str]:
    evidence = report.evidence
    declaration = evidence.declaration
    graph = evidence.graph_format.name if evidence.graph_format else None
    what = "GGUF" if evidence.gguf_file else graph or declaration.architecture or "unknown class"
    inferred = ", inferred from names and shapes" if declaration.inferred else ""
    yield f"{evidence.location}: {verdict(evidence)}"
    yield f"  {'class':<10} {what} ({declaration.family or 'unknown family'}{inferred})"
    for label, name in (("embedding", declaration.embedding), ("head", declaration.head)):
        tensor, codes = evidence.tensors.get(name or ""), quantised_ends_of(evidence).get(name or "")
        if codes is not None:
            yield f"  {label:<10} {codes}"
        elif tensor is not None:
            yield f"  {label:<10} {tensor.name} {tensor.dtype} {list(tensor.shape)}"
    yield f"  {'flag':<10} {_flag(evidence)}"
    if not evidence.ties:
        yield f"  {'ties':<10} none: {_why_none(evidence)}"
    ties: dict[tuple[str, ...], list[str]] = {}  # ties of one source that share everything else are shown once
    for tie in evidence.ties:
        ties.setdefault((tie.tie.source, _state(tie), *_outcomes(evidence, tie)), []).append(tie.tie.target)
    for (source, state, *outcomes), targets in ties.items():
        yield f"  {'tie':<10} {', '.join(targets)} <- {source}  {state}"
        yield from outcomes
    if evidence.base:
        yield f"  {'base':<10} {evidence.base.location}"
        for table in evidence.base.tables:
            tokens = tokens_of_difference(evidence, table.difference)
            yield f"    {', '.join(table.ends):<15} {table.tensor}: {table}{tokens}"
        if not evidence.base.tables:
            yield f"    {'':<15} no table to compare: the base or this checkpoint stores neither embedding nor head"
    if evidence.padding:
        yield f"  {'padding':<10} row {evidence.padding.id} (pad_token_id) is {evidence.padding.row_class.value}"
    if evidence.geometry:
        yield from _geometry(evidence)


def _findings(report: AuditReport | AdapterReport, *, verbose: bool) -> Iterator[str]:
    """The errors, then the warnings, then the informational findings: only their number unless `verbose`."""
    for finding in report.findings:
        if verbose or finding.severity is not Severity.INFO:
            yield ""
            yield f"{finding.code} {finding.severity.word}: {finding.message}"
            yield f"  --> {_place(report.evidence, finding)}"
            yield f"  help: {finding.help}"
    codes = Counter(f"{found.code} {found.name}" for found in report.findings if found.severity is Severity.INFO)
    if codes and not verbose:
        named = ", ".join(f"{code} ({number} times)" if number > 1 else code for code, number in codes.items())
        pronoun = "them" if codes.total() > 1 else "it"
        yield ""
        yield f"{_number(codes.total(), 'informational finding')} (`bowline audit --verbose` shows {pronoun}): {named}"


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _flag(evidence: Evidence) -> str:
    if evidence.gguf_file:
        return "none: a GGUF file has no flag"
    if evidence.graph_format and evidence.config is None:
        return f"none: {evidence.graph_format.noun} has no flag"
    return str(evidence.declaration.flag)


def _why_none(evidence: Evidence) -> str:
    declaration = evidence.declaration
    if evidence.graph_file:
        missing = "head" if declaration.embedding else "table"
        return f"no {missing} was found: no {'product' if declaration.embedding else 'look-up'} uses one"
    if evidence.gguf_file and declaration.embedding not in evidence.tensors:
        return f"{declaration.embedding} is not stored"
    if evidence.gguf_file or declaration.loaders:
        return "the class has no head to tie"
    if declaration.architecture is None:
        return "the class is unknown, and names and shapes show none"
    return "Bowline does not know the class, and names and shapes show none"


def _outcomes(evidence: Evidence, tie: TieEvidence) -> Iterator[str]:
    declaration = evidence.declaration
    unknown = declaration.inferred and not declaration.loaders and not evidence.gguf_file
    why = "the class is not known" if unknown else "depends on data that was not read"
    ran = loaders_run()
    if tie.quantised is not None:
        why = "depends on how it reads the quantised layout"
    for loader, targets in evidence.outcomes.items():
        outcome = targets.get(tie.tie.target)
        if outcome is None and loader == "vllm-0.28":
            continue  # few classes were run there
        fate, reason = (outcome.fate.value, outcome.reason) if outcome else ("unknown", why)
        yield f"    {ran[loader]:<19} {fate:<8} {reason}"


def _state(tie: TieEvidence) -> str:
    if tie.quantised is not None:
        return quantised_state(tie)
    state = tie.state.value if tie.state else "not compared"
    if tie.state is TieState.DIVERGED and tie.declared.flag.value is False and not tie.tie.target.endswith("bias"):
        state += " (untied, as the flag says)"
    if tie.difference is None or tie.target is None:
        return state
    rows, difference = tie.target.shape[0] if tie.target.shape else 1, tie.difference
    pattern = f"; looks like {difference}" if difference.has_pattern else ""
    return f"{state}: {difference.rows_differing} of {rows} rows differ, {difference.extent}{pattern}"


def _geometry(evidence: Evidence) -> Iterator[str]:
    geometry = evidence.geometry
    assert geometry is not None
    errors = geometry.standard_errors or {}
    parts = [f"{geometry.rows} rows of {geometry.hidden_size}"]
    if geometry.sampled_rows:
        parts.append(f"{geometry.sampled_rows} sampled")
    if "self_decoding_rate" in errors:
        parts.append(f"{geometry.queried_rows} compared with all")
    yield f"  {'geometry':<10} {', '.join(parts)}{' (± one standard error)' if errors else ''}"
    norms = geometry.row_norms
    if norms is not None:
        shown = "/".join(f"{value:.3g}" for value in astuple(norms))
        yield f"    {'row norms':<15} {shown} (min/5%/median/95%/max)"
    for label, name, decimals, unit, meaning in (
        ("mean cosine", "mean_cosine", 3, "", "of two rows"),
        ("isotropy", "isotropy", 3, "", "1 if no direction is preferred"),
        ("effective rank", "effective_rank", 0, "", f"of {min(geometry.rows, geometry.hidden_size)}"),
        ("self-decoding", "self_decoding_rate", 2, "%", "of rows score highest against themselves"),
        ("nearest cosine", "median_nearest_cosine", 3, "", "to the nearest other row (median)"),
    ):
        value = getattr(geometry, name)
        if value is not None:
            yield f"    {label:<15} {_estimate(value, errors.get(name), decimals, unit):<15} {meaning}"


def _estimate(value: float, error: float | None, decimals: int, unit: str) -> str:
    """The value with these decimals; an estimate with those of its standard error's first digit, and the error."""
    scale = 100 if unit == "%" else 1
    if not error:
        return f"{scale * value:.{decimals}f}{unit}"
    shown = min(6, max(0, -math.floor(math.log10(scale * error))))
    return f"{scale * value:.{shown}f}{unit} ± {scale * error:.{shown}f}"


def _place(evidence: Evidence | AdapterEvidence, finding: Finding) -> str:
    where = evidence.location
    if finding.file is None or PurePath(where).name == finding.file:
        return where
    return str((Path(where).parent if Path(where).is_file() else PurePath(where)) / finding.file)


def _failures(run: Run) -> Iterator[str]:
    for failure in run.failures:
        yield f"error: {failure.text}" + (f" (help: {failure.help})" if failure.help else "")


def _footer(run: Run) -> str:
    places = [_number(len(run.reports), "checkpoint")] if run.reports or not run.adapters else []
    checkpoints = joined([*places, *([_number(len(run.adapters), "adapter")] if run.adapters else [])])
    unread = f" {_number(len(run.failures), 'path')} could not be audited." if run.failures else ""
    counts = Counter(finding.severity for finding in run.findings)
    if not run.all_reports:
        return unread.strip() or "Nothing was audited."
    if not counts:
        return f"Nothing found in {checkpoints}.{unread}"
    nouns = {Severity.INFO: "informational finding"}
    kinds = ", ".join(
        _number(counts[severity], nouns.get(severity, severity.word)) for severity in Severity if counts[severity]
    )
    fixable = sum(finding.fixable for finding in run.findings)
    with_fix = f"; {fixable} fixable with --fix" if fixable else ""
    return f"Found {kinds} in {checkpoints}{with_fix}.{unread}"
