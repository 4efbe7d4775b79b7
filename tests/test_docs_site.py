"""The documentation's site is built strictly, has every page that it should, and asks no other host for anything."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tools.docs_site.anchors import github_anchor
from tools.docs_site.page_links import as_site_page, bare_pipes, link_codes
from tools.docs_site.repository_pages import DOCS
from tools.docs_site.result_pages import RESULTS
from typer.main import get_command

import bowline
from bowline.auditing.rules import all_rules
from bowline.cli import app

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(place)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return place


def html(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def test_every_written_page_and_every_result_is_in_the_site(site: Path) -> None:
    written = [path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")]
    results = [Path("benchmarks", path.with_suffix(".html").name) for path in RESULTS.glob("*.md")]
    pages = [path.with_name("index.html") if path.name == "README.html" else path for path in written + results]
    assert [page for page in pages if not (site / page).exists()] == []


def test_every_finding_has_a_page_with_its_text(site: Path) -> None:
    rules = all_rules()
    assert len(rules) > 50
    for rule in rules:
        text = re.sub(r"<[^>]+>", "", html(site / "rules" / f"{rule.code}.html")).lower()
        words = re.findall(r"[a-z]{4,}", rule.page.partition("What: ")[2])
        assert [word for word in words if word not in text] == [], rule.code


def test_every_command_has_a_page_with_its_options(site: Path) -> None:
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        text = html(site / "commands" / f"{name}.html")
        options = [option for param in command.params for option in param.opts + param.secondary_opts]
        assert [option for option in options if option.startswith("-") and option not in text] == [], name


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    reference = "".join(html(page) for page in (site / "api").glob("*.html"))
    rooms = {"auditing", "checkpoint", "distributed", "edit", "errors", "families", "functional", "geometry", "models"}
    rooms |= {"nn", "plots", "recipes", "study", "tie", "train"}
    names = {name for name in dir(bowline) if not name.startswith("_")} - rooms
    assert len(names) > 30
    overview = html(site / "api" / "index.html")
    assert [name for name in sorted(names) if f">bowline.{name}<" not in overview] == []
    assert [name for name in sorted(names) if not re.search(rf'id="bowline\.[\w.]*{name}"', reference)] == []


def test_no_page_asks_another_host_for_anything(site: Path) -> None:
    """Links that a person follows may lead anywhere; what a browser loads by itself comes from the site."""
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:link|script|img|iframe|source)\b[^>]*?\b(?:href|src)=[\"']?([^\"'\s>]+)", html(page))
        others = [each for each in loaded if re.match(r"(?:https?:)?//", each)]
        assert others == [], page.relative_to(site)
    for sheet in site.rglob("*.css"):
        assert re.findall(r"url\([\"']?(?:https?:)?//[^)]*", html(sheet)) == [], sheet.relative_to(site)


def test_search_finds_a_rule_a_command_and_a_function(site: Path) -> None:
    index = json.loads(html(site / "search" / "search_index.json"))
    titles = {entry["title"] for entry in index["docs"]}
    assert {"BW101 tied-but-diverged", "bowline audit"} <= titles
    assert any("tie_weights" in title for title in titles)


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("Is E Eᵀ = I?", "is-e-eᵀ--i"),
        ("From Python", "from-python"),
        ("`--fix`, and what it does", "--fix-and-what-it-does"),
    ],
)
def test_an_anchor_is_that_of_github(heading: str, anchor: str) -> None:
    assert github_anchor(heading) == anchor


def test_links_are_turned_into_the_sites_but_not_those_in_code() -> None:
    markdown = "[a](../README.md#x) [b](https://x.y)\n```text\n[a](../README.md)\n```\n"
    places = {ROOT / "README.md": "repository/front-page.md"}
    turned = as_site_page(markdown, origin=DOCS / "audit.md", uri="notes/audit.md", places=places)
    assert turned == "[a](../repository/front-page.md#x) [b](https://x.y)\n```text\n[a](../README.md)\n```\n"


def test_codes_are_linked_in_prose_only() -> None:
    markdown = "# BW101\nBW101, `BW101`, [BW101](x.md), BW999\n```text\nBW101\n```\n"
    linked = link_codes(markdown, uri="guides/audit.md", codes={"BW101": "rules/BW101.md"})
    assert linked == "# BW101\n[BW101](../rules/BW101.md), `BW101`, [BW101](x.md), BW999\n```text\nBW101\n```\n"


def test_a_pipe_in_the_code_of_a_table_is_shown_as_one() -> None:
    assert bare_pipes("| `a\\|b` | c\\|d |\n`a\\|b`\n") == "| `a|b` | c\\|d |\n`a\\|b`\n"
