"""`bowline explain CODE`"""

from __future__ import annotations

from typing import Annotated

import typer

from bowline.auditing.rules import all_rules
from bowline.errors import UsageError

__all__ = ["explain"]


def explain(
    code: Annotated[str | None, typer.Argument(help="A code such as BW101; without it, all codes are listed.")] = None,
) -> None:
    """Print what a finding means: what, why it hurts, an example, the mend, and who met it."""
    rules = {rule.code: rule for rule in all_rules()}
    if code is None:
        for each in rules.values():
            typer.echo(f"{each.code}  {each.severities:<23} {each.name:<26} {each.summary}")
        return
    rule = rules.get(code.upper())
    if rule is None:
        raise UsageError(
            f"{code!r} is no code, expected such as {next(iter(rules))}", help="`bowline explain` lists them"
        )
    typer.echo(f"{rule.code} {rule.name} ({rule.severities})\n\n{rule.page}")
