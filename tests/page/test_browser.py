"""Pages in headless Chromium: they load fast and alone, all is reached by keyboard, and axe-core finds no violation."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from bowline.cli import app
from tests.checkpoints import GPT2, HEAD, WTE, table, write
from tests.page.checkpoints import HOSTILE_TOKENS, broken, clean, hostile

BROWSER = Path(__file__).parents[2] / ".peers" / "browser"
AXE = BROWSER / "node_modules" / "axe-core" / "axe.min.js"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
SIZES = {"phone": (390, 844), "desktop": (1280, 900)}
SCHEMES = ("light", "dark")

pytestmark = pytest.mark.browser


def large(directory: Path) -> Path:
    """A vocabulary of 262,144 rows whose head differs."""
    rows, random = 262_144, np.random.default_rng(0)
    letters = [chr(code) for code in (*range(97, 123), *range(0x430, 0x450))]
    words = random.choice(letters, (rows, 5))
    texts = {f"\u2581{''.join(word)}{number:x}": number for number, word in enumerate(words)}
    embedding = table(rows, 64)
    tensors = {WTE: embedding, HEAD: embedding + np.float32(0.01)}
    config = {**GPT2, "vocab_size": rows, "eos_token_id": 0}
    return write(directory, tensors, config, files={"tokenizer": {"model": {"type": "BPE", "vocab": texts}}})


MAKERS = {"clean": clean, "broken": broken, "hostile": hostile, "large": large}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each page by name, also those of a comparison."""
    root = tmp_path_factory.mktemp("pages")
    found = {}
    for name, maker in MAKERS.items():
        found[name] = root / f"{name}.html"
        arguments = ["audit", str(maker(root / name)), "--html", str(found[name])]
        assert CliRunner().invoke(app, arguments).exit_code in (0, 1)
    found["comparison"] = root / "comparison.html"
    arguments = ["compare", str(root / "clean"), str(root / "broken"), "--html", str(found["comparison"])]
    assert CliRunner().invoke(app, arguments).exit_code == 1
    return found


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    sys.path.insert(0, str(BROWSER))
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        yield browser
        browser.close()
    sys.path.remove(str(BROWSER))


class Opened:
    """A page in a browser, with what it wrote to the console, raised and requested."""

    def __init__(self, chromium: Any, file: Path, *, size: str = "desktop", scheme: str = "light", policy: bool = True):
        width, height = SIZES[size]
        self.context = chromium.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, bypass_csp=not policy
        )
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.requested: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", self.refuse)
        self.page.on("request", lambda request: self.requested.append(request.url))
        began = time.perf_counter()
        self.page.goto(f"file://{file}")
        self.seconds = time.perf_counter() - began

    def refuse(self, dialog: Any) -> None:
        self.said.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def look_up(self, text: str) -> None:
        self.page.fill("#query", text)
        self.page.wait_for_selector("#matches-note:not(:empty)")

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *error: object) -> None:
        self.context.close()


NAMES = [*MAKERS, "comparison"]


@pytest.mark.parametrize("name", NAMES)
def test_it_loads_within_a_second_and_requests_nothing(name: str, pages: dict[str, Path], chromium: Any) -> None:
    with Opened(chromium, pages[name]):
        pass  # the browser's own first page takes longer
    with Opened(chromium, pages[name]) as opened:
        assert opened.seconds < 1.0 and pages[name].stat().st_size < 3_000_000
        opened.look_up("word1" if name != "large" else "a")
        opened.page.wait_for_timeout(300)
        assert opened.said == []
        assert [url for url in opened.requested if url != f"file://{pages[name]}"] == []


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_axe_core_finds_no_violation(name: str, size: str, scheme: str, pages: dict[str, Path], chromium: Any) -> None:
    with Opened(chromium, pages[name], size=size, scheme=scheme, policy=False) as opened:
        opened.page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        opened.look_up("word12" if name != "large" else "1f3")
        opened.page.locator("#matches a").first.click()
        opened.page.wait_for_selector("#entry h3")
        opened.page.evaluate(AXE.read_text())
        found = opened.page.evaluate("axe.run({ resultTypes: ['violations'] })")
        assert [(one["id"], [node["html"][:200] for node in one["nodes"][:3]]) for one in found["violations"]] == []


@pytest.mark.parametrize("name", NAMES)
def test_it_fits_the_width_of_a_phone(name: str, pages: dict[str, Path], chromium: Any) -> None:
    with Opened(chromium, pages[name], size="phone") as opened:
        opened.look_up("word12" if name != "large" else "1f3")
        opened.page.locator("#matches a").first.click()
        opened.page.wait_for_selector("#entry h3")
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= SIZES["phone"][0]


def test_the_search_shows_norm_classes_difference_and_neighbours(pages: dict[str, Path], chromium: Any) -> None:
    with Opened(chromium, pages["broken"]) as opened:
        opened.look_up("word120")
        opened.page.locator("#matches a").first.click()
        opened.page.wait_for_selector("#entry h3")
        entry = opened.page.inner_text("#entry")
        assert "Row 120 \u2581word120" in entry and "25 % of the norm" in entry
        embedding = table(400, 32).astype(np.float64)
        norms = np.linalg.norm(embedding, axis=1)
        assert f"input embedding: norm {norms[120]:.3g}" in entry and f"head: norm {1.25 * norms[120]:.3g}" in entry
        cosines = (embedding @ embedding[120]) / norms / norms[120]
        cosines[120] = -2
        nearest = opened.page.locator("#entry table").first.locator("td a").all_inner_texts()
        assert [int(text.split()[0]) for text in nearest] == np.argsort(-cosines)[:8].tolist()


def test_a_row_is_found_by_its_id_and_an_unknown_text_is_said(pages: dict[str, Path], chromium: Any) -> None:
    with Opened(chromium, pages["clean"]) as opened:
        opened.look_up("#395")
        assert opened.page.locator("#matches a").first.inner_text().split()[0] == "395"
        opened.look_up("nothing like it")
        opened.page.locator("#matches-note", has_text="No row").wait_for()


def test_a_comparison_shows_both_sides_of_a_row(pages: dict[str, Path], chromium: Any) -> None:
    with Opened(chromium, pages["comparison"]) as opened:
        opened.look_up("word120")
        opened.page.locator("#matches a").first.click()
        opened.page.wait_for_selector("#entry h3")
        entry = opened.page.inner_text("#entry")
        assert (
            "embedding and head before" in entry
            and "embedding after" in entry
            and "head after" in entry
            and "25 % of the norm" in entry
        )


def test_a_pair_by_token_is_found_by_each_of_its_ids(tmp_path: Path, chromium: Any) -> None:
    values, names = table(), [f"word{number}" for number in range(64)]
    values[5] = 0
    for name, order in (("a", range(64)), ("b", range(63, -1, -1))):
        ids = {names[row]: place for place, row in enumerate(order)}
        rows = (table() if name == "b" else values)[list(order)]
        write(tmp_path / name, {WTE: rows}, GPT2, files={"tokenizer": {"model": {"type": "BPE", "vocab": ids}}})
    file = tmp_path / "page.html"
    CliRunner().invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--html", str(file)])
    with Opened(chromium, file) as opened:
        opened.look_up("#5")
        found = opened.page.locator("#matches a").all_inner_texts()
        assert [text.strip() for text in found] == ["5 (after: 58) word5", "58 (after: 5) word58"]
        opened.page.locator("#matches a").first.click()
        opened.page.wait_for_selector("#entry h3")
        assert "embedding and head moved by: from a row of zeros" in opened.page.inner_text("#entry")
        assert opened.said == []


def test_the_keyboard_alone_reaches_every_control(pages: dict[str, Path], chromium: Any) -> None:
    with Opened(chromium, pages["broken"]) as opened:
        page = opened.page
        controls = "a[href], button, input, summary, [tabindex='0']"
        page.evaluate(f'[...document.querySelectorAll("{controls}")].forEach((one, at) => one.dataset.at = at)')
        visible = f'[...document.querySelectorAll("{controls}")].filter((one) => one.checkVisibility())'
        wanted = set(page.evaluate(f"{visible}.map((one) => one.dataset.at)"))
        reached: set[str] = set()
        for _ in range(3 * len(wanted)):
            page.keyboard.press("Tab")
            at = page.evaluate("document.activeElement.dataset.at")
            if at is not None:
                reached.add(at)
                outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
                assert outline not in ("none", "hidden"), page.evaluate("document.activeElement.outerHTML")[:200]
        assert reached >= wanted


def test_a_token_is_looked_up_by_keyboard_alone(pages: dict[str, Path], chromium: Any) -> None:
    with Opened(chromium, pages["broken"]) as opened:
        page = opened.page
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.id") == "query":
                break
        page.keyboard.type("word17")
        page.wait_for_selector("#matches a")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.wait_for_selector("#entry h3")
        assert page.evaluate("document.activeElement.id") == "entry" and "word17" in page.inner_text("#entry h3")


def test_hostile_tokens_stay_text_when_they_are_looked_up(pages: dict[str, Path], chromium: Any) -> None:
    with Opened(chromium, pages["hostile"]) as opened:
        title = opened.page.title()
        for row in range(len(HOSTILE_TOKENS)):
            opened.page.evaluate(f"location.hash = '#row={row}'")
            opened.page.locator("#entry h3", has_text=f"Row {row} ").wait_for()
        opened.page.wait_for_timeout(200)
        assert opened.said == [] and opened.page.title() == title
        assert opened.page.locator("img, iframe").count() == 0


def test_a_command_is_copied(pages: dict[str, Path], chromium: Any) -> None:
    with Opened(chromium, pages["broken"]) as opened:
        button = opened.page.locator("[data-copy]").first
        button.click()
        opened.page.locator("[data-copy]", has_text="Copied").first.wait_for()


def test_all_but_the_search_is_there_without_javascript(pages: dict[str, Path], chromium: Any) -> None:
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"file://{pages['broken']}")
    assert page.locator("figure svg").count() >= 8 and page.locator(".findings li").count() >= 3
    assert "The search needs JavaScript." in page.inner_text("#search")
    context.close()
