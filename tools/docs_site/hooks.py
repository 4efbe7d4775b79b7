"""The hook of MkDocs: adds the pages that are made, and turns links between files of the repository into the site's.

MkDocs calls these functions by their names. Nothing here imports torch.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from bowline.auditing.rules import all_rules
from tools.docs_site.api_pages import api_pages
from tools.docs_site.command_pages import command_pages
from tools.docs_site.page_links import as_site_page, bare_pipes, link_codes
from tools.docs_site.repository_pages import DOCS, linked_files, repository_pages
from tools.docs_site.result_pages import RESULTS, result_pages
from tools.docs_site.rule_pages import rule_pages, rule_uri
from tools.docs_site.schema_page import schema_pages
from tools.docs_site.site_page import SitePage

__all__ = ["on_config", "on_files", "on_page_markdown"]


@cache
def _added() -> tuple[SitePage, ...]:
    """The pages and files that are not in `docs/`."""
    pages = [*rule_pages(), *schema_pages(), *command_pages(), *api_pages(), *result_pages(), *repository_pages()]
    read = [(path.read_text(encoding="utf-8"), path) for path in sorted(DOCS.rglob("*.md"))]
    read += [(page.content, page.origin) for page in pages if page.origin is not None]
    return (*pages, *linked_files(read))


@cache
def _places() -> dict[Path, str]:
    """Where each file of the repository is in the site."""
    places = {path: path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*") if path.is_file()}
    places |= {page.origin: page.uri for page in _added() if page.origin is not None}
    return places | {RESULTS: "benchmarks/README.md"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace each entry of the navigation that ends in / by the pages of that folder."""
    written = [path.relative_to(DOCS).as_posix() for path in sorted(DOCS.rglob("*.md"))]
    uris = dict.fromkeys([*written, *(page.uri for page in _added() if page.uri.endswith(".md"))])

    def expanded(entry: Any) -> list[Any]:
        if isinstance(entry, dict):
            return [{title: _listed(below) for title, below in entry.items()}]
        if isinstance(entry, str) and entry.endswith("/"):
            inside = [uri for uri in uris if uri.startswith(entry) and "/" not in uri.removeprefix(entry)]
            return sorted(inside, key=lambda uri: not uri.endswith("/README.md"))
        return [entry]

    def _listed(below: Any) -> Any:
        if isinstance(below, list):
            return [each for entry in below for each in expanded(entry)]
        if isinstance(below, str) and below.endswith("/"):
            return expanded(below)
        return below

    config.nav = _listed(config.nav)
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are not in `docs/`."""
    for page in _added():
        files.append(File.generated(config, page.uri, content=page.content))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the links of a page into the site's. A page outside any section has no list of pages beside it."""
    uri = page.file.src_uri
    if page.parent is None:
        page.meta["hide"] = ["navigation"]
    origins = {place: path for path, place in _places().items()}
    origin = origins.get(uri)
    if origin is not None and origin != RESULTS:
        markdown = as_site_page(markdown, origin=origin, uri=uri, places=_places())
    markdown = bare_pipes(markdown)
    if uri.startswith("repository/changelog"):
        return markdown
    return link_codes(markdown, uri=uri, codes={rule.code: rule_uri(rule.code) for rule in all_rules()})
