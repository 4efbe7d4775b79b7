"""The result of an audit: evidence and findings of one checkpoint, and the record that the JSON report holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bowline.auditing.evidence import Evidence, TieEvidence
from bowline.auditing.loaders import LOADERS
from bowline.auditing.rules import Finding, Rule, Severity, all_rules, checkpoint_rules
from bowline.auditing.verdict import verdict
from bowline.errors import UsageError
from bowline.markup import Tone, html_report
from bowline.tie import TieState

if TYPE_CHECKING:  # the code for adapters is loaded when one is met
    from bowline.auditing.adapter_evidence import AdapterEvidence

__all__ = ["REPORT_VERSION", "AuditReport", "finding_record", "findings_html", "findings_of", "select_rules"]

REPORT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """The evidence of one checkpoint and the findings about it."""

    evidence: Evidence
    findings: tuple[Finding, ...]

    @property
    def clean(self) -> bool:
        """Whether there are no findings, or only informational ones."""
        return all(finding.severity is Severity.INFO for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """The entry of this checkpoint in the JSON report; the schema is in `docs/audit.schema.json`."""
        evidence = self.evidence
        declaration = evidence.declaration
        outcomes = {loader: evidence.outcomes.get(loader, {}) for loader in LOADERS}
        return {
            "path": evidence.location,
            "verdict": verdict(evidence),
            "architecture": declaration.architecture,
            "family": declaration.family,
            "inferred": declaration.inferred,
            "values_read": evidence.values_read,
            "flag": {"value": declaration.flag.value, "path": declaration.flag.path},
            "ties": [_tie(tie) for tie in evidence.ties],
            "outcomes": {
                loader: {target: outcome.fate.value if outcome else None for target, outcome in targets.items()}
                for loader, targets in outcomes.items()
            },
            "reasons": {
                loader: {target: outcome.reason if outcome else None for target, outcome in targets.items()}
                for loader, targets in outcomes.items()
            },
            "findings": [finding_record(finding) for finding in self.findings],
            "padding_row": (
                {"id": evidence.padding.id, "class": evidence.padding.row_class.value} if evidence.padding else None
            ),
            "geometry": evidence.geometry.as_dict() if evidence.geometry else None,
            "base": evidence.base.as_dict() if evidence.base else None,
        }

    def _repr_html_(self) -> str:
        """The verdict and a table of the findings, as a notebook shows it."""
        return findings_html(self.evidence.location, verdict(self.evidence), self.findings)


def findings_of(evidence: Evidence | AdapterEvidence, rules: Iterable[Rule]) -> tuple[Finding, ...]:
    """The findings of these rules, errors first."""
    order = list(Severity)
    found = [finding for rule in rules for finding in rule.findings(evidence)]
    return tuple(sorted(found, key=lambda finding: (order.index(finding.severity), finding.code)))


def select_rules(select: Sequence[str] = (), ignore: Sequence[str] = (), *, adapters: bool = True) -> tuple[Rule, ...]:
    """The rules whose codes begin with one of `select` (all, when empty) and with none of `ignore`.

    Without `adapters`, the rules about adapters are left out. Raises `UsageError` for a prefix that matches no code.

    Example:
        >>> [rule.code for rule in select_rules(["BW40"], ["BW402"])]
        ['BW401', 'BW403', 'BW404', 'BW405', 'BW406', 'BW407', 'BW408', 'BW409']
    """
    rules = all_rules() if adapters or select or ignore else checkpoint_rules()
    for prefix in (*select, *ignore):
        if not prefix or not any(rule.code.startswith(prefix.upper()) for rule in rules):
            raise UsageError(
                f"{prefix!r} matches no rule, expected a code such as {rules[0].code} or a prefix such as BW2",
                help="`bowline explain` lists the codes",
            )
    chosen = tuple(prefix.upper() for prefix in select) or ("",)
    refused = tuple(prefix.upper() for prefix in ignore)
    return tuple(
        rule
        for rule in rules
        if (adapters or rule.subject is Evidence)
        and rule.code.startswith(chosen)
        and not (refused and rule.code.startswith(refused))
    )


def _tie(tie: TieEvidence) -> dict[str, Any]:
    difference = tie.difference
    same = tie.state in (TieState.EQUAL, TieState.ALIAS)
    compared = same or (tie.state is TieState.INCOMPATIBLE and (tie.equal_when_cast or tie.has_nan))
    return {
        "target": tie.tie.target,
        "source": tie.tie.source,
        "state": tie.state.value if tie.state else None,
        "flag": {"value": tie.declared.flag.value, "path": tie.declared.flag.path},
        "rows_differing": difference.rows_differing if difference else 0 if compared else None,
        "max_abs_difference": difference.max_abs_difference if difference else 0.0 if compared else None,
        "looks_like": str(difference) if difference else None,
        "quantised": tie.quantised.as_dict() if tie.quantised else None,
    }


def findings_html(location: str, verdict: str, findings: Sequence[Finding]) -> str:
    """A report in HTML: the verdict, coloured by the worst finding, and a row for each finding."""
    tones = {Severity.ERROR: Tone.BAD, Severity.WARNING: Tone.DOUBTFUL, Severity.INFO: Tone.NEUTRAL}
    found = {finding.severity for finding in findings}
    tone = next((tones[severity] for severity in (Severity.ERROR, Severity.WARNING) if severity in found), Tone.GOOD)
    rows = [(tones[one.severity], one.severity.word, (one.code, one.message, one.help)) for one in findings]
    return html_report(location, verdict, tone, ("severity", "code", "finding", "help"), rows)


def finding_record(finding: Finding) -> dict[str, Any]:
    """The entry of one finding in the JSON report."""
    return {
        "code": finding.code,
        "name": finding.name,
        "severity": finding.severity.value,
        "tensors": list(finding.tensors),
        "file": finding.file,
        "message": finding.message,
        "help": finding.help,
        "fixable": finding.fixable,
    }
