"""Files of the repository outside `docs/` that the site shows: pages, and the code that they link to."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tools.docs_site.result_pages import RESULTS
from tools.docs_site.site_page import ROOT, SitePage

__all__ = ["DOCS", "links_of", "linked_files", "repository_pages"]

DOCS = ROOT / "docs"
PAGES = {
    "README.md": "repository/front-page.md",
    "CONTRIBUTING.md": "repository/contributing.md",
    "CHANGELOG.md": "repository/changelog.md",
    "examples/README.md": "repository/examples.md",
}
FENCE = re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.DOTALL | re.MULTILINE)


def repository_pages() -> list[SitePage]:
    """The pages that people read in the repository itself."""
    return [
        SitePage(uri=uri, content=(ROOT / name).read_text(encoding="utf-8"), origin=ROOT / name)
        for name, uri in PAGES.items()
    ]


def links_of(markdown: str) -> list[str]:
    """The relative links and images of a page, without those in code blocks."""
    text = FENCE.sub("", markdown)
    found = re.findall(r"\]\(\s*((?!https?:|mailto:|#)[^)\s]+)\)", text)
    return found + re.findall(r'(?:src|href)="((?!https?:|data:|#)[^"]+)"', text)


def linked_files(pages: Iterable[tuple[str, Path]]) -> list[SitePage]:
    """The other files of the repository to which pages link, each as a text file; of a folder the names in it."""
    found: dict[Path, SitePage] = {}
    for markdown, origin in pages:
        for link in links_of(markdown):
            target = (origin.parent / link.partition("#")[0]).resolve()
            if target in found or not target.exists() or not target.is_relative_to(ROOT) or _has_a_page(target):
                continue
            uri = "source/" + str(target.relative_to(ROOT)).lstrip(".")  # MkDocs leaves out names that begin with a dot
            if target.is_dir():
                names = sorted(path.name for path in target.iterdir() if path.name != "__pycache__")
                found[target] = SitePage(uri=f"{uri}/list.txt", content="\n".join(names) + "\n", origin=target)
            else:
                found[target] = SitePage(uri=f"{uri}.txt", content=target.read_text(encoding="utf-8"), origin=target)
    return list(found.values())


def _has_a_page(target: Path) -> bool:
    if target == RESULTS or target.is_relative_to(DOCS):
        return True
    return target.suffix == ".md" and (target.parent == RESULTS or str(target.relative_to(ROOT)) in PAGES)
