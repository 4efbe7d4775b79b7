"""The findings of an audit, each with the command that mends it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bowline.auditing.rules import Finding, Severity
from bowline.page.elements import Child, Html, element
from bowline.wording import joined

__all__ = ["findings_list", "findings_summary"]

COMMAND = re.compile(r"`(bowline [^`]+)`")
TONES = {Severity.ERROR: "bad", Severity.WARNING: "doubtful", Severity.INFO: "neutral"}


def findings_list(findings: Sequence[Finding]) -> Html:
    """Each finding: severity, code, what was seen and expected, and the way out, commands apart for copying."""
    if not findings:
        return element("p", "Nothing was found.")
    return element("ol", [_finding(one) for one in findings], class_="findings")


def findings_summary(findings: Sequence[Finding]) -> str:
    """How many findings of each severity there are.

    Example:
        >>> findings_summary([])
        'no findings'
    """
    counts = {severity: sum(one.severity is severity for one in findings) for severity in Severity}
    nouns = {Severity.INFO: "informational finding"}
    words = [
        f"{count} {nouns.get(severity, severity.word)}{'s' * (count != 1)}"
        for severity, count in counts.items()
        if count
    ]
    return joined(words) if words else "no findings"


def _finding(finding: Finding) -> Html:
    commands: list[Child] = [copyable(command) for command in dict.fromkeys(COMMAND.findall(finding.help))]
    where = f" in {finding.file}" if finding.file else ""
    return element(
        "li",
        element(
            "p",
            element("b", finding.severity.word, class_="severity"),
            " ",
            element("code", finding.code),
            f" {finding.name}{where}",
        ),
        element("p", finding.message),
        element("p", element("b", "Way out: "), _with_code(finding.help)),
        commands,
        class_=TONES[finding.severity],
    )


def copyable(command: str) -> Html:
    """A command line with a button that copies it."""
    return element(
        "div",
        element("code", command, tabindex="0"),
        element("button", "Copy", type="button", data_copy=command, aria_label=f"Copy: {command}"),
        class_="command",
    )


def _with_code(text: str) -> list[Html | str]:
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a stray backtick
        return [text]
    return [element("code", part) if at % 2 else part for at, part in enumerate(parts)]
