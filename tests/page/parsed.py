"""A page as an HTML parser sees it: its elements, its texts and its data, apart from the code that wrote it."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

import numpy as np

VOID = {"meta", "input", "link", "br", "rect", "line", "path", "circle"}


@dataclass
class Node:
    tag: str
    attributes: dict[str, str | None]
    children: list[Node | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    def all(self, tag: str | None = None, **attributes: str) -> list[Node]:
        found: list[Node] = []
        for child in self.children:
            if isinstance(child, Node):
                wanted = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
                if (tag is None or child.tag == tag) and wanted.items() <= child.attributes.items():
                    found.append(child)
                found += child.all(tag, **attributes)
        return found

    def one(self, tag: str | None = None, **attributes: str) -> Node:
        (found,) = self.all(tag, **attributes)
        return found


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Node("root", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, dict(attrs))
        assert len(node.attributes) == len(attrs), f"an attribute stands twice in {tag}"
        self.open[-1].children.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open[-1].tag == tag, f"</{tag}> ends <{self.open[-1].tag}>"
            self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def parsed(page: str) -> Node:
    """The tree of a page whose every element is closed."""
    parser = _Parser()
    parser.feed(page)
    parser.close()
    assert parser.open == [parser.root], f"{parser.open[-1].tag} is never closed"
    return parser.root


@dataclass
class Search:
    """The data of the search, unpacked as the script does it."""

    meta: dict[str, Any]
    texts: list[str]
    page: Node

    def numbers(self, name: str, width: int) -> np.ndarray:
        raw = np.frombuffer(self._unpacked(name), np.uint8).reshape(width, -1).astype(np.int64)
        found: np.ndarray = (raw << (8 * np.arange(width))[:, None]).sum(axis=0)
        return found

    def values(self, name: str, scale: dict[str, float]) -> np.ndarray:
        """Norms or changes; NaN where a row has none."""
        fine = self.meta["levels"] > 255
        levels = self.numbers(name, 2 if fine else 1)
        step = np.log(scale["high"] / scale["low"]) / (self.meta["levels"] - 1)
        values = np.where(levels == 0, 0.0, scale["low"] * np.exp((levels - 1) * step))
        return np.where(levels >= (0xFFFE if fine else 0xFE), np.nan, values)

    def _unpacked(self, name: str) -> bytes:
        return zlib.decompress(base64.b64decode(self.page.one("script", id=f"data-{name}").text))

    @classmethod
    def of(cls, page: Node) -> Search:
        search = cls(json.loads(page.one("script", id="search-data").text), [], page)
        search.texts = search._unpacked("texts").decode().split("\n")
        return search
