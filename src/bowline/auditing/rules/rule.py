"""The type of a rule, and the register of all rules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from bowline.auditing.evidence import Evidence

if TYPE_CHECKING:  # the code for adapters is loaded when one is met
    from bowline.auditing.adapter_evidence import AdapterEvidence

__all__ = ["Finding", "Observation", "Rule", "Severity", "adapter_rule", "registered_rules", "rule"]


class Severity(StrEnum):
    """How much a finding matters. The exit code is 0 if all findings are informational."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"

    @property
    def word(self) -> str:
        """The name in reports for people; machine-readable reports use the value."""
        return "information" if self is Severity.INFO else self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A fault that a rule saw. `message` says what is there and what was expected, `help` how to fix it."""

    message: str
    help: str
    tensors: tuple[str, ...] = ()
    file: str | None = None
    severity: Severity | None = None
    """The severity of this case, if it differs from the rule's."""
    flag_from_bytes: bool | None = None
    """The value of `tie_word_embeddings` that agrees with the stored tensors; `None` if the config is not at fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An observation with the code and severity of its rule."""

    code: str
    name: str
    severity: Severity
    tensors: tuple[str, ...]
    message: str
    help: str
    file: str | None
    flag_from_bytes: bool | None

    @property
    def fixable(self) -> bool:
        """Whether `--fix` can fix this finding."""
        return self.flag_from_bytes is not None


Check = Callable[[Evidence], Iterable[Observation]]
AdapterCheck = Callable[["AdapterEvidence"], Iterable[Observation]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A stable code, a name, and the function that checks. The function's docstring is the rule's page."""

    code: str
    name: str
    severity: Severity
    check: Callable[[Any], Iterable[Observation]]
    also: Severity | None = None
    """The severity that some cases have instead."""
    subject: type[Evidence] | type[AdapterEvidence] = Evidence
    """The evidence that it reads: that of a checkpoint, or that of an adapter."""

    @property
    def severities(self) -> str:
        """The severities that its findings can have, in words."""
        return self.severity.word + (f" or {self.also.word}" if self.also else "")

    @property
    def page(self) -> str:
        """The text that `bowline explain` prints."""
        return inspect.getdoc(self.check) or ""

    @property
    def summary(self) -> str:
        """The first line of the page."""
        return self.page.partition("\n")[0]

    def findings(self, evidence: Evidence | AdapterEvidence) -> Iterable[Finding]:
        """The findings of this rule about one checkpoint or adapter; none if it is about the other kind."""
        for seen in self.check(evidence) if isinstance(evidence, self.subject) else ():
            yield Finding(
                code=self.code,
                name=self.name,
                severity=seen.severity or self.severity,
                tensors=seen.tensors,
                message=seen.message,
                help=seen.help,
                file=seen.file,
                flag_from_bytes=seen.flag_from_bytes,
            )


_RULES: dict[str, Rule] = {}


def rule(code: str, name: str, severity: Severity, also: Severity | None = None) -> Callable[[Check], Check]:
    """Register a function as the rule `code`; some of its cases may have the severity `also`."""

    def register(check: Check) -> Check:
        _add(Rule(code=code, name=name, severity=severity, check=check, also=also))
        return check

    return register


def adapter_rule(
    code: str, name: str, severity: Severity, also: Severity | None = None
) -> Callable[[AdapterCheck], AdapterCheck]:
    """Register a function as the rule `code` about adapters; some of its cases may have the severity `also`."""
    from bowline.auditing.adapter_evidence import AdapterEvidence

    def register(check: AdapterCheck) -> AdapterCheck:
        _add(Rule(code=code, name=name, severity=severity, check=check, also=also, subject=AdapterEvidence))
        return check

    return register


def _add(new: Rule) -> None:
    if new.code in _RULES:
        raise ValueError(f"{new.code} is {_RULES[new.code].name} already")
    _RULES[new.code] = new


def registered_rules() -> tuple[Rule, ...]:
    """The rules of the modules that have been imported, sorted by code."""
    return tuple(_RULES[code] for code in sorted(_RULES))
