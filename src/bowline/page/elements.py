"""Builds HTML and SVG from strings that may be hostile: text is always escaped, only `Html` is taken as it is."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import TypeAlias

from bowline.wording import printable

__all__ = ["Child", "Html", "element", "fragment", "number", "with_code"]

VOID = frozenset(("meta", "input", "link", "br", "rect", "line", "path", "circle", "use"))
"""Elements without content here. Those of SVG are closed in their own tag."""
SVG = frozenset(("rect", "line", "path", "circle", "use"))
LONGEST = 2000
"""Characters of one text that are shown: a message can quote names of any length."""


class Html(str):
    """A string that is HTML already."""

    __slots__ = ()


Child: TypeAlias = "str | Iterable[Child] | None"


def element(tag: str, *children: Child, **attributes: str | float | bool | None) -> Html:
    """An element with its children, each escaped unless it is `Html`, and its attributes.

    An underscore in the name of an attribute becomes a hyphen, and one at its end is left out; `None` and False leave
    the attribute out.

    Example:
        >>> element("p", "1 < 2 ", element("b", "&"), class_="note", hidden=True)
        '<p class="note" hidden>1 &lt; 2 <b>&amp;</b></p>'
    """
    words = [tag]
    for name, value in attributes.items():
        key = name.rstrip("_").replace("_", "-") if name not in CAMEL else CAMEL[name]
        if value is True:
            words.append(key)
        elif value is not None and value is not False:
            text = number(value) if isinstance(value, int | float) else _child(value)
            words.append(f'{key}="{text}"')
    start = " ".join(words)
    if tag in VOID:
        return Html(f"<{start}/>" if tag in SVG else f"<{start}>")
    return Html(f"<{start}>{fragment(*children)}</{tag}>")


CAMEL = {"viewBox": "viewBox"}
"""Attributes of SVG that keep their capital letter."""


def fragment(*children: Child) -> Html:
    """The children one after the other.

    Example:
        >>> fragment("a", None, ["<", element("br")])
        'a&lt;<br>'
    """
    return Html("".join(map(_child, children)))


def with_code(text: str) -> list[Child]:
    """A line of Markdown with inline code: its code as elements, and the rest as text.

    Example:
        >>> fragment(with_code("set `a < b` first"))
        'set <code>a &lt; b</code> first'
    """
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a stray backtick
        return [text]
    return [element("code", part) if at % 2 else part for at, part in enumerate(parts)]


def number(value: float) -> str:
    """A coordinate with at most two decimals.

    Example:
        >>> number(3.0), number(1 / 3), number(-0.001)
        ('3', '0.33', '0')
    """
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _child(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Html):
        return child
    if isinstance(child, str):
        return _escaped(child)
    return fragment(*child)


def _escaped(text: str) -> str:
    line = printable(text[:LONGEST]) + ("…" if len(text) > LONGEST else "")
    return html.escape(line)
