"""The results of the benchmarks and sweeps as pages, and their list, newest first."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tools.docs_site.site_page import ROOT, SitePage, table

__all__ = ["RESULTS", "result_pages", "result_uri"]

RESULTS = ROOT / "benchmarks" / "results"
OVERVIEW = """# Benchmarks

Each result is a dated page with machine, versions and how to run it again. Times are ratios wherever two things are
compared, and a result is never changed afterwards: a new run is a new page. The [front
page](../repository/front-page.md#speed-and-memory) has the figures that matter most.

"""


def result_uri(path: Path) -> str:
    """Where a file of `benchmarks/results` is in the site."""
    return f"benchmarks/{path.name}"


def result_pages() -> list[SitePage]:
    """The list of the results, and a page for each."""
    found = sorted(RESULTS.glob("*.md"), key=lambda path: (_date(path), path.name), reverse=True)
    rows = []
    for path in found:
        text = path.read_text(encoding="utf-8")
        rows.append((_date(path), f"[{_title(text)}]({path.name})", _rerun(path, text)))
    programs = [(f"`python -m benchmarks {path.stem}`", _summary(path)) for path in _programs()]
    overview = (
        f"{OVERVIEW}## Results, newest first\n\n{table(('date', 'result', 'run again with'), rows)}\n\n"
        f"## Programs\n\n{table(('command', 'what it measures'), programs)}\n"
    )
    pages = [SitePage(uri="benchmarks/README.md", content=overview)]
    return pages + [SitePage(uri=result_uri(path), content=_page(path), origin=path) for path in found]


def _programs() -> list[Path]:
    return [path for path in sorted((ROOT / "benchmarks").glob("*.py")) if _runs(path)]


def _runs(path: Path) -> bool:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body)


def _summary(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n\n")[0]


def _date(path: Path) -> str:
    found = re.search(r"\d{4}-\d\d-\d\d", path.name)
    return found[0] if found else ""


def _title(text: str) -> str:
    found = re.search(r"^# (.*)$", text, re.MULTILINE)
    return found[1] if found else ""


def _rerun(path: Path, text: str) -> str:
    found = re.search(r"[Rr]erun\b[^`]*`([^`]+)`", text)
    if found:
        return f"`{' '.join(found[1].split())}`"
    name = path.stem.rsplit("-", 3)[0]
    return f"`python -m benchmarks {name}`" if (ROOT / "benchmarks" / f"{name}.py").exists() else ""


def _page(path: Path) -> str:
    """The page, with its title first: some begin with their date."""
    text = path.read_text(encoding="utf-8")
    before, _, after = text.partition("# ")
    if not before.strip():
        return text
    title, _, rest = after.partition("\n")
    return f"# {title}\n\n{before.strip()}\n{rest}"
