"""The reference of the public names, from their docstrings: a page for each room, and a list of `bowline`'s names."""

from __future__ import annotations

from functools import cache
from typing import Any

import griffe

from tools.docs_site.site_page import ROOT, SitePage, table

__all__ = ["api_pages"]

ROOMS = {
    "auditing": ("auditing",),
    "checkpoint": ("checkpoint",),
    "edit": ("edit",),
    "nn": ("nn",),
    "functional": ("functional.loss", "functional.tied_lookup", "functional.deferred"),
    "distributed": ("distributed",),
    "export": ("export",),
    "models": ("models",),
    "train": ("train",),
    "recipes": ("recipes",),
    "geometry": ("geometry",),
    "families": ("families",),
    "tie": ("tie",),
    "errors": ("errors",),
}
"""The modules whose names each page has."""
OVERVIEW = """# Python

`import bowline` loads nothing heavy: each name below is imported when it is first used, and the audit and the edits
never import torch. The pages are read from the source's docstrings.

"""


def api_pages() -> list[SitePage]:
    """The list of the names of `bowline`, and a page for each room."""
    pages = [SitePage(uri="api/README.md", content=OVERVIEW + _overview())]
    for room, modules in ROOMS.items():
        lines = [f"# bowline.{room}", ""]
        for module in modules:
            lines += [_docstring(_at(module)), ""] if module == room or len(modules) == 1 else []
            lines += [f"::: {_path(module, name)}\n" for name in _names(module)]
        pages.append(SitePage(uri=f"api/{room}.md", content="\n".join(lines)))
    return pages


def _overview() -> str:
    package, rows = _at(""), []
    for name in package.members:
        path = package.imports.get(name, "")
        if path.startswith("bowline.") and path.count(".") > 1 and path.split(".")[1] in ROOMS:
            docstring = _docstring(_at(path.partition(".")[2]))
            rows.append((f"[`bowline.{name}`][{path}]", docstring.partition("\n")[0]))
    rooms = [(f"[`bowline.{room}`]({room}.md)", _docstring(_at(room)).partition("\n")[0]) for room in ROOMS]
    names = table(("name", "what it is"), sorted(rows, key=lambda row: row[0].lower()))
    return f"## The names of `bowline`\n\n{names}\n\n## The rooms\n\n{table(('room', 'what it has'), rooms)}\n"


@cache
def _package() -> Any:
    return griffe.load("bowline", search_paths=[str(ROOT / "src")], allow_inspection=False)


def _at(module: str) -> Any:
    found = _package()
    for part in module.split(".") if module else ():
        found = found.members[part]
    return _resolved(found)


def _resolved(member: Any) -> Any:
    return member.final_target if member.is_alias else member


def _path(module: str, name: str) -> str:
    """Where a public name is documented: what the module imports, where a submodule has that name too."""
    found = _at(module)
    return str(found.imports[name]) if found.members[name].is_module else f"bowline.{module}.{name}"


def _names(module: str) -> list[str]:
    """The public names: those of `__all__`, or of the stub where names are imported when they are first used."""
    found = _at(module)
    if isinstance(found.exports, list) and found.exports:
        return [str(name) for name in found.exports]
    return [name for name, member in found.members.items() if member.is_alias and _ours(member)]


def _ours(member: Any) -> bool:
    return bool(member.target_path.startswith("bowline."))


def _docstring(found: Any) -> str:
    return str(found.docstring.value) if found.docstring else ""
