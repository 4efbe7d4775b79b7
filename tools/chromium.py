"""Headless Chromium by playwright, both as `make browser` fetches them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["AXE", "SCHEMES", "SIZES", "chromium"]

FETCHED = Path(__file__).parent.parent / ".peers" / "browser"
AXE = FETCHED / "node_modules" / "axe-core" / "axe.min.js"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
SIZES = {"phone": (390, 844), "desktop": (1280, 900)}
"""Width and height of the window in CSS pixels."""
SCHEMES = ("light", "dark")


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser of playwright's synchronous interface, closed at the end."""
    sys.path.insert(0, str(FETCHED))
    try:
        from playwright.sync_api import sync_playwright
    finally:
        sys.path.remove(str(FETCHED))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()
