"""`bowline explain CODE`"""

from __future__ import annotations

from typing import Annotated

import typer

from bowline.errors import UsageError

__all__ = ["explain"]


def explain(
    code: Annotated[str | None, typer.Argument(help="A code such as BW101. If omitted, all codes are listed.")] = None,
) -> None:
    """Explain a finding of the audit.

    Prints what it means, why it hurts, an example, how to fix it, and where it was reported.
    """
    from bowline.auditing.rules import all_rules

    rules = {rule.code: rule for rule in all_rules()}
    if code is None:
        for each in rules.values():
            typer.echo(f"{each.code}  {each.severities:<23} {each.name:<26} {each.summary}")
        return
    rule = rules.get(code.upper())
    if rule is None:
        raise UsageError(
            f"unknown code {code!r}, expected one such as {next(iter(rules))}", help="`bowline explain` lists all codes"
        )
    typer.echo(f"{rule.code} {rule.name} ({rule.severities})\n\n{rule.page}")
