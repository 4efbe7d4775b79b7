"""A page for each verb of the command line, from the parameters that the program itself reads."""

from __future__ import annotations

import inspect
from typing import Any

from typer.main import get_command

from bowline.cli import app
from tools.docs_site.site_page import SitePage, table

__all__ = ["command_pages"]

OVERVIEW = """# The command line

Every command, made from the program's own parameters; `bowline COMMAND --help` prints the same. `bowline --version`
also names the loaders whose behaviour was tabled, and `bowline --install-completion` installs completion for the shell.

| exit code | meaning |
|---|---|
| 0 | no findings, or only informational ones; the edit was made |
| 1 | warnings or errors were found, or an edit was refused |
| 2 | the command could not run: bad options, or something that could not be read |
| 130 | interrupted |

"""


def command_pages() -> list[SitePage]:
    """The list of the commands, and a page for each."""
    group: Any = get_command(app)
    context = type(group).context_class(group, info_name="bowline")
    rows = [(f"[`bowline {name}`]({name}.md)", _help(command)[0]) for name, command in group.commands.items()]
    overview = OVERVIEW + table(("command", "what it does"), rows) + "\n"
    pages = [SitePage(uri="commands/README.md", content=overview)]
    for name, command in group.commands.items():
        inner = type(command).context_class(command, info_name=name, parent=context)
        pages.append(SitePage(uri=f"commands/{name}.md", content=_page(name, command, inner)))
    return pages


def _help(command: Any) -> list[str]:
    return inspect.cleandoc(command.help or "").split("\n\n")


def _page(name: str, command: Any, context: Any) -> str:
    summary, *rest = _help(command)
    usage = command.get_usage(context).removeprefix("Usage: ")
    lines = [f"# bowline {name}", "", summary, "", "```text", usage, "```", ""]
    for paragraph in rest:
        lines += [paragraph, ""]
    records = {kind: [] for kind in ("argument", "option")}  # type: dict[str, list[tuple[str, ...]]]
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is not None:
            records[parameter.param_type_name].append((f"`{record[0]}`", _prose(record[1])))
    for kind, rows in records.items():
        if rows:
            lines += [f"## {kind.capitalize()}s", "", table((kind, "effect"), rows), ""]
    return "\n".join(lines)


def _prose(text: str) -> str:
    """Help is plain text: what Markdown would read as markup is escaped; backticks are meant."""
    parts = text.split("`")
    for at in range(0, len(parts), 2):
        for character in "\\*_<[]":
            parts[at] = parts[at].replace(character, "&lt;" if character == "<" else "\\" + character)
    return "`".join(parts)
