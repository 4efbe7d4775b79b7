"""Turns a page as GitHub shows it into a page of the site: its links lead to the site's pages, codes to their rules."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path

__all__ = ["as_site_page", "bare_pipes", "link_codes"]

APART = re.compile(
    r"^(?:```|~~~).*?^(?:```|~~~)[^\n]*$|^#+ [^\n]*$|<!--.*?-->|`[^`]*`|!?\[[^\]]*\]\([^)]*\)|<[^>]*>",
    re.DOTALL | re.MULTILINE,
)
"""What is left as it is when codes are linked: code, headings, comments, links and HTML."""
FENCE = re.compile(r"(^(?:```|~~~).*?^(?:```|~~~)[^\n]*$)", re.DOTALL | re.MULTILINE)


def as_site_page(markdown: str, *, origin: Path, uri: str, places: Mapping[Path, str]) -> str:
    """The Markdown with each relative link to a file of the repository replaced by one to its place in the site.

    Args:
        markdown: the page.
        origin: the file that it comes from; its links are relative to that.
        uri: where the page is in the site.
        places: where each file of the repository is in the site.
    """

    def moved(found: re.Match[str]) -> str:
        path, mark, anchor = found[2].partition("#")
        place = places.get((origin.parent / path).resolve())
        if place is None:
            return found[0]  # the strict build says so
        return f"{found[1]}{posixpath.relpath(place, posixpath.dirname(uri) or '.')}{mark}{anchor}{found[3]}"

    parts = FENCE.split(markdown)
    for at in range(0, len(parts), 2):
        part = re.sub(r"(\]\(\s*)((?!https?:|mailto:|#)[^)\s]+)(\))", moved, parts[at])
        part = re.sub(r'((?:src|href)=")((?!https?:|data:|#)[^"]+)(")', moved, part)
        parts[at] = re.sub(r"^(<!--.*?-->)\n(?=\S)", r"\1\n\n", part, flags=re.MULTILINE)  # a block of its own
    return "".join(parts)


def bare_pipes(markdown: str) -> str:
    """The Markdown with `\\|` in the code of a table as a pipe: GitHub needs the backslash, MkDocs shows it."""
    rows = re.compile(r"^\|.*$", re.MULTILINE)
    code = re.compile(r"`[^`\n]*`")
    return rows.sub(lambda row: code.sub(lambda found: found[0].replace("\\|", "|"), row[0]), markdown)


def link_codes(markdown: str, *, uri: str, codes: Mapping[str, str]) -> str:
    """The Markdown with each code of a finding in its prose linked to the page in `codes`."""
    kept: list[str] = []

    def linked(found: re.Match[str]) -> str:
        place = codes.get(found[0])
        if place is None or place == uri:
            return found[0]
        return f"[{found[0]}]({posixpath.relpath(place, posixpath.dirname(uri) or '.')})"

    end = 0
    for apart in APART.finditer(markdown):
        kept += [re.sub(r"\bBW\d{3}\b", linked, markdown[end : apart.start()]), apart[0]]
        end = apart.end()
    return "".join([*kept, re.sub(r"\bBW\d{3}\b", linked, markdown[end:])])
