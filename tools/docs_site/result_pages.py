"""The results of the benchmarks and sweeps as pages, and their list, newest first."""

from __future__ import annotations

import ast
import re
from itertools import groupby
from pathlib import Path

from tools.docs_site.site_page import ROOT, SitePage, table

__all__ = ["RESULTS", "result_pages", "result_uri"]

RESULTS = ROOT / "benchmarks" / "results"
SWEEPS = {
    "llama_cpp": "make sweep-llama-cpp",
    "mlx_lm": "make sweep-mlx",
    "sweep": "make sweep",
    "vllm": "make sweep-vllm",
}
"""By the name of a result whose page names no command: the command."""
OVERVIEW = """# Benchmarks

Each result is a page of one day's runs. The [front page](../repository/front-page.md#speed-and-memory) has the figures
that matter most, and `python -m benchmarks` lists the programs below.

"""


def result_uri(path: Path) -> str:
    """Where a file of `benchmarks/results` is in the site."""
    return f"benchmarks/{path.name}"


def result_pages() -> list[SitePage]:
    """The list of the results, and a page for each."""
    found = sorted(RESULTS.glob("*.md"), key=lambda path: (_date(path), path.name), reverse=True)
    lines = []
    for date, results in groupby(found, _date):
        rows = [(f"[{_title(text)}]({path.name})", _rerun(path, text)) for path, text in map(_read, results)]
        lines += [f"## {date}", "", table(("result", "run again with"), rows), ""]
    programs = [(f"`python -m benchmarks {path.stem}`", _summary(path)) for path in _programs()]
    lines += ["## Programs", "", table(("command", "what it measures"), programs), ""]
    overview = OVERVIEW + "\n".join(lines)
    pages = [SitePage(uri="benchmarks/README.md", content=overview)]
    return pages + [SitePage(uri=result_uri(path), content=_page(path), origin=path) for path in found]


def _read(path: Path) -> tuple[Path, str]:
    return path, path.read_text(encoding="utf-8")


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
    """The command that the page names, or that of the program that has its name."""
    name = path.stem.rsplit("-", 3)[0].replace("-", "_")
    found = re.search(r"[Rr]erun\b[^`]*?`((?:\w+=\S+ )?(?:make|python -m) [^`]+)`", text)
    if found:
        return f"`{' '.join(found[1].split())}`"
    if name in SWEEPS:
        return f"`{SWEEPS[name]}`"
    return f"`python -m benchmarks {name}`" if (ROOT / "benchmarks" / f"{name}.py").exists() else ""


def _page(path: Path) -> str:
    """The page, with its title first: some begin with their date."""
    text = path.read_text(encoding="utf-8")
    before, _, after = text.partition("# ")
    if not before.strip():
        return text
    title, _, rest = after.partition("\n")
    return f"# {title}\n\n{before.strip()}\n{rest}"
