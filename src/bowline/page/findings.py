"""The findings of an audit, each with the command that mends it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bowline.auditing.rules import Finding, Severity
from bowline.page.elements import Child, Html, element, with_code
from bowline.wording import joined, shell_word

__all__ = ["findings_list", "findings_summary"]

COMMAND = re.compile(r"""`(bowline (?:'[^']*'|"[^"]*"|[^`'"])+)`""")
"""A command in a text; a quoted path in it may hold backticks."""
FIX = "bowline audit --fix"
"""The command as a finding names it, without the place."""
TONES = {Severity.ERROR: "bad", Severity.WARNING: "doubtful", Severity.INFO: "neutral"}


def findings_list(findings: Sequence[Finding], location: str) -> Html:
    """Each finding: severity, code, what was seen and expected, and the way out, commands apart for copying.

    `location` is the checkpoint's place, which a command that mends it names.
    """
    if not findings:
        return element("p", "Nothing was found.")
    return element("ol", [_finding(one, location) for one in findings], class_="findings")


def findings_summary(findings: Sequence[Finding]) -> str:
    """The number of findings by severity.

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


def _finding(finding: Finding, location: str) -> Html:
    fix = f"bowline audit {shell_word(location)} --fix"
    said = dict.fromkeys(COMMAND.findall(finding.help))
    commands: list[Child] = [copyable(fix if command == FIX else command) for command in said]
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
        element("p", element("b", "Way out: "), with_code(finding.help)),
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
