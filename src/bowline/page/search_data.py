"""Packs what the search box needs into a page: token texts, norms, neighbours and changes, compressed.

Each part is deflated and written in base64 inside a data block, which a browser never runs. Numbers are stored byte by
byte: all lowest bytes first, then all second bytes, which deflate compresses better.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bowline.page.elements import Html
from bowline.page.row_list import LONGEST_TEXT, RowList
from bowline.page.table_view import TableView
from bowline.wording import joined

__all__ = ["Changes", "SearchTable", "packed_search"]

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

FINE, COARSE = 2000, 250
"""Steps of the logarithmic scale on which norms and changes are stored, in two bytes and in one."""
MOST_FINE = 450_000
"""Numbers that are stored in two bytes each; more are stored in one."""
NO_ROW = 0xFFFFFF
MOST_CLASSES = 24
"""Classes of rows in the search: one a bit. Checkpoints with many tables have more."""
ROOM = 2_850_000
"""Characters of plots and search data, so that a page stays below 3 MB."""
LEAST_ROOM = 100_000
"""Characters of a page that token texts may always take."""
SHORTER_TEXTS = (24, 12, 8, 6, 4)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SearchTable:
    """A table of the search: its view, and the place in the list of each of its rows (-1: not listed)."""

    view: TableView
    positions: Ids


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Changes:
    """The distance of each listed row, ||b - a|| / ||a||; NaN if it is not defined."""

    label: str
    relative: Floats


def packed_search(
    rows: RowList,
    tables: Sequence[SearchTable],
    changes: Sequence[Changes] = (),
    *,
    names: Sequence[str] = (),
    beside: int = 0,
) -> tuple[Html, list[str]]:
    """The data blocks, and what they leave out, in sentences, so that with `beside` other characters they fit a page.

    `names` are what the page calls the rows, if not by their ids.
    """
    blocks = []
    fine = rows.ids.size * (len(tables) + len(changes)) <= MOST_FINE
    width = 2 if fine else 1
    if names:
        blocks.append(_block("names", "\n".join(names).encode()))
    elif rows.total != rows.ids.size:
        blocks.append(_block("ids", _planes(np.diff(rows.ids, prepend=0), 3)))
    classes = np.zeros(rows.ids.size, np.uint32)
    held = rows.classes[:MOST_CLASSES]
    for bit, found in enumerate(held):
        at = rows.positions(found.ids)
        classes[at[at >= 0]] |= np.uint32(1 << bit)
    blocks.append(_block("classes", _planes(classes, 3)))
    described = []
    for number, table in enumerate(tables):
        view, name = table.view, f"table{number}-"
        here = table.positions >= 0
        norms = np.full(rows.ids.size, np.inf)  # of rows that this table does not have
        norms[table.positions[here]] = np.where(np.isnan(view.norms[here]), np.nan, view.norms[here])
        levels, low, high = _levels(norms, fine=fine)
        listed = np.flatnonzero(table.positions[view.looked_up] >= 0)
        near = view.neighbours[listed]
        near = np.where(near >= 0, table.positions[near], -1)
        blocks.append(_block(name + "norms", _planes(levels, width)))
        blocks.append(
            _block(name + "looked-up", _planes(np.diff(table.positions[view.looked_up[listed]], prepend=0), 3))
        )
        blocks.append(_block(name + "near", _planes(np.where(near >= 0, near, NO_ROW), 3)))
        cosines = np.nan_to_num(view.cosines[listed], nan=-1.0)
        blocks.append(_block(name + "cosines", _planes(np.rint((cosines + 1) * 127.5).astype(np.uint32), 1)))
        described.append(
            {
                "label": view.label,
                "tensor": view.tensor,
                "low": low,
                "high": high,
                "lookedUp": int(listed.size),
                "near": int(near.shape[1]),
            }
        )
    moved = []
    for number, change in enumerate(changes):
        levels, low, high = _levels(change.relative, fine=fine)
        blocks.append(_block(f"changes{number}", _planes(levels, width)))
        moved.append({"label": change.label, "low": low, "high": high})
    meta = {
        "rows": int(rows.ids.size),
        "total": rows.total,
        "levels": FINE if fine else COARSE,
        "classes": [found.label for found in held],
        "tables": described,
        "changes": moved,
    }
    text = json.dumps(meta, ensure_ascii=True).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    kept = np.zeros(rows.ids.size, np.bool_)
    kept[classes > 0] = True
    for table in tables:
        at = table.positions[table.view.looked_up]
        kept[at[at >= 0]] = True
    texts, cut = _texts(rows.texts, kept.tolist(), max(LEAST_ROOM, ROOM - beside - sum(map(len, blocks))))
    blocks.append(_block("texts", texts))
    limits = [*_limits(rows, tables, fine=fine), *([cut] if cut else [])]
    blocks.insert(0, Html(f'<script type="application/json" id="search-data">{text}</script>'))
    return Html("".join(blocks)), limits


def _limits(rows: RowList, tables: Sequence[SearchTable], *, fine: bool) -> Iterator[str]:
    if rows.ids.size < rows.total:
        yield f"The page lists {rows.ids.size:,} of the {rows.total:,} rows."
    sampled = [table.view for table in tables if table.view.looked_up.size < (table.view.norms > 0).sum()]
    if sampled:
        counts: dict[str, list[str]] = {}
        for view in sampled:
            counts.setdefault(f"{view.looked_up.size:,} of {view.shape[0]:,} rows", []).append(view.label)
        where = [f"{count} ({joined(labels)})" if len(counts) > 1 else count for count, labels in counts.items()]
        yield (
            f"Neighbours are given for {joined(where)}: those that stand out, and others spread over the ids. They are "
            "the nearest of all rows."
        )
    if not fine:
        yield "Norms in the search have two digits."


def _texts(texts: Sequence[str], kept: Sequence[bool], room: int) -> tuple[bytes, str]:
    """The token texts, one a line, and what was left out so that they fit: their ends, then those of most rows."""
    for cut in (LONGEST_TEXT + 1, *SHORTER_TEXTS):
        data = "\n".join([text[:cut] for text in texts]).encode()
        if len(zlib.compress(data, 9)) * 4 // 3 <= room:
            return data, f"Token texts are cut to {cut} characters." if cut <= LONGEST_TEXT else ""
    some = "\n".join([text if keep else "" for text, keep in zip(texts, kept, strict=True)]).encode()
    return some, f"Only {sum(kept):,} rows have their token: those that stand out or have neighbours."


def _levels(values: Floats, *, fine: bool) -> tuple[Ids, float, float]:
    """Values of at least 0 on a logarithmic scale, from 1 on, and 0 for zero; and the ends of the scale.

    The largest number of their width stands for a row that is not finite, the one below for a row without a value.
    """
    levels, none = (FINE, 0xFFFF) if fine else (COARSE, 0xFF)
    usable = values[np.isfinite(values) & (values > 0)]
    low, high = (float(usable.min()), float(usable.max())) if usable.size else (1.0, 1.0)
    span = np.log(high) - np.log(low) if high > low else 1.0
    with np.errstate(divide="ignore", invalid="ignore"):
        level = 1 + np.rint((np.log(np.maximum(values, low)) - np.log(low)) / span * (levels - 1))
    level = np.where(values == 0, 0, level)
    level = np.where(np.isfinite(level), level, none)
    return np.where(np.isposinf(values), none - 1, level).astype(np.int64), low, high


def _planes(values: npt.NDArray[np.integer], width: int) -> bytes:
    """The lowest `width` bytes of each number, all first bytes before all second ones."""
    return np.ascontiguousarray(values.reshape(-1).astype("<u4").view(np.uint8).reshape(-1, 4)[:, :width].T).tobytes()


def _block(name: str, data: bytes) -> Html:
    packed = base64.b64encode(zlib.compress(data, 9)).decode()
    return Html(f'<script type="text/plain" id="data-{name}">{packed}</script>')
