"""The search box: a token's norm, classes, change and nearest neighbours."""

from __future__ import annotations

from collections.abc import Sequence

from bowline.page.elements import Html, element

__all__ = ["search_box"]


def search_box(limits: Sequence[str]) -> Html:
    """The box and the places of its results; `limits` say what it does not hold."""
    return element(
        "form",
        element("label", "Find a token or a row id", for_="query"),
        element("input", type="search", id="query", autocomplete="off", spellcheck="false", placeholder="the, or 1996"),
        element("p", "The search needs JavaScript.", id="matches-note", role="status"),
        element("ul", id="matches"),
        element("div", id="entry", tabindex="-1", aria_live="polite"),
        element("p", " ".join(limits), class_="limits") if limits else None,
        role="search",
        id="search",
    )
