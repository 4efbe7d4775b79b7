"""What a rule is, and the register of all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from bowline.auditing.evidence import Evidence

__all__ = ["Finding", "Observation", "Rule", "Severity", "all_rules", "rule"]


class Severity(StrEnum):
    """How much a finding matters. Information alone leaves the exit code at 0."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"

    @property
    def word(self) -> str:
        """As reports for people have it; the value is for machines."""
        return "information" if self is Severity.INFO else self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What a rule saw in one place: the message says what is there and what was expected, `help` how to mend it."""

    message: str
    help: str
    tensors: tuple[str, ...] = ()
    file: str | None = None
    severity: Severity | None = None
    """Where this case differs from the rule's own severity."""
    flag_from_bytes: bool | None = None
    """What `tie_word_embeddings` has to say for the config to agree with the bytes; `None`: not the config's fault."""


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
        """Whether `--fix` mends it."""
        return self.flag_from_bytes is not None


Check = Callable[[Evidence], Iterable[Observation]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A stable code, a name, and the function that looks. The function's docstring is the rule's page."""

    code: str
    name: str
    severity: Severity
    check: Check
    also: Severity | None = None
    """What some cases are instead."""

    @property
    def severities(self) -> str:
        """In words: what it finds is this, or that."""
        return self.severity.word + (f" or {self.also.word}" if self.also else "")

    @property
    def page(self) -> str:
        """What `bowline explain` prints."""
        return inspect.getdoc(self.check) or ""

    @property
    def summary(self) -> str:
        """The page's first line."""
        return self.page.partition("\n")[0]

    def findings(self, evidence: Evidence) -> Iterable[Finding]:
        """Everything that this rule has to say of one checkpoint."""
        for seen in self.check(evidence):
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
        if code in _RULES:
            raise ValueError(f"{code} is {_RULES[code].name} already")
        _RULES[code] = Rule(code=code, name=name, severity=severity, check=check, also=also)
        return check

    return register


def all_rules() -> tuple[Rule, ...]:
    """Every rule, by code."""
    return tuple(_RULES[code] for code in sorted(_RULES))
