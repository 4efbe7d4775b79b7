"""The documentation's site in headless Chromium: axe-core finds no violation, and nothing is wider than a phone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tools.chromium import AXE, SCHEMES, SIZES, chromium

ROOT = Path(__file__).parent.parent
PAGES = (
    "index.html",
    "start.html",
    "guides/audit.html",
    "guides/mend.html",
    "guides/fine-tune.html",
    "guides/shard.html",
    "guides/ship.html",
    "pipelines.html",
    "audit.html",
    "loaders.html",
    "comparison.html",
    "design.html",
    "questions/index.html",
    "questions/flag.html",
    "notes/pages.html",
    "json-report.html",
    "json-comparison.html",
    "rules/BW101.html",
    "commands/audit.html",
    "api/index.html",
    "api/nn.html",
    "benchmarks/index.html",
    "repository/front-page.html",
    "404.html",
)
"""A page of each kind, and every guide."""

pytestmark = pytest.mark.browser


class Quiet(SimpleHTTPRequestHandler):
    """Serves files and writes no log."""

    def log_message(self, *args: object) -> None:
        """Write nothing."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(place)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True, timeout=600)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(place))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("size", SIZES)
def test_axe_core_finds_no_violation_and_every_page_fits(size: str, scheme: str, address: str, browser: Any) -> None:
    width, height = SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
    )
    page, violations, wide = context.new_page(), [], []
    for name in PAGES:
        assert page.goto(f"{address}/{name}").ok, name
        page.evaluate(AXE.read_text())
        for one in page.evaluate("axe.run({ resultTypes: ['violations'] })")["violations"]:
            violations.append((name, one["id"], [node["html"][:160] for node in one["nodes"][:2]]))
        if page.evaluate("document.documentElement.scrollWidth") > width:
            wide.append(name)
    context.close()
    assert violations == [] and wide == []
