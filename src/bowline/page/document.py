"""A page as one file: its style and its script are part of it, and its policy forbids every request."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files

from bowline.page.elements import Child, Html, element, fragment

__all__ = ["document", "section"]

DRAWN_LOGO = (
    "<svg viewBox='0 0 24 24' width='24' height='24' aria-hidden='true'><rect x='3' y='4' width='18' height='9' rx='2' "
    "class='stored'/><path d='M7 13v7M17 13v7M5 18l2 2 2-2M15 18l2 2 2-2' class='knot'/></svg>"
)


def document(title: str, *content: Child, navigation: Child, data: Child = None) -> str:
    """The whole page. `navigation` are the links at its top, `data` the blocks of the search."""
    style, script = _asset("page.css"), _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="referrer", content="no-referrer"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("link", rel="icon", href="data:,"),
        element("style", Html(style)),
    )
    body = element(
        "body",
        element("a", "Skip to the verdict", href="#verdict", class_="skip"),
        element(
            "header",
            element("span", Html(DRAWN_LOGO), " Bowline", class_="brand"),
            element("nav", navigation, aria_label="Sections"),
        ),
        element("main", *content),
        data,
        element("script", Html(script)),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def section(name: str, heading: str, *content: Child) -> Html:
    """A section with a heading, which `#name` leads to."""
    return element("section", element("h2", heading, id=name, tabindex="-1"), fragment(*content), aria_labelledby=name)


@cache
def _asset(name: str) -> str:
    return files("bowline.page").joinpath(name).read_text(encoding="utf-8")
