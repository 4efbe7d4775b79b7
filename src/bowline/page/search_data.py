"""Packs what the search box needs into a page: token texts, norms, neighbours and changes, compressed.

Each part is deflated and written in base64 inside a data block, which a browser never runs. Numbers are stored byte by
byte: all lowest bytes first, then all second bytes, which deflate compresses better.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bowline.page.elements import Html
from bowline.page.row_list import RowList
from bowline.page.table_view import TableView

__all__ = ["Changes", "SearchTable", "packed_search"]

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

LEVELS = 4000
"""Steps of the logarithmic scale on which norms and changes are stored: 0.2 % apart over three decades."""
NOT_FINITE = 65535
NO_ROW = 0xFFFFFF
TEXT_BYTES = 1_250_000
"""The most bytes of the compressed token texts."""
SHORTER_TEXTS = (24, 12, 6)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SearchTable:
    """A table of the search: its view, and the place in the list of each of its rows (-1: not listed)."""

    view: TableView
    positions: Ids


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Changes:
    """How far each listed row differs, as ||b - a|| / ||a||: NaN where that is not defined."""

    label: str
    relative: Floats
    cosine: Floats


def packed_search(rows: RowList, tables: Sequence[SearchTable], changes: Changes | None = None) -> tuple[Html, int]:
    """The data blocks, and the number of characters to which token texts had to be cut (0: as they are listed)."""
    texts, cut = _texts(rows.texts)
    blocks = [_block("texts", texts)]
    if rows.total != rows.ids.size:
        blocks.append(_block("ids", _planes(np.diff(rows.ids, prepend=0), 3)))
    classes = np.zeros(rows.ids.size, np.uint32)
    for bit, found in enumerate(rows.classes):
        at = rows.positions(found.ids)
        classes[at[at >= 0]] |= np.uint32(1 << bit)
    blocks.append(_block("classes", _planes(classes, 3)))
    described = []
    for number, table in enumerate(tables):
        view, name = table.view, f"table{number}-"
        here = table.positions >= 0
        norms = np.full(rows.ids.size, np.inf)  # of rows that this table does not have
        norms[table.positions[here]] = np.where(np.isnan(view.norms[here]), np.nan, view.norms[here])
        levels, low, high = _levels(norms)
        listed = np.flatnonzero(table.positions[view.looked_up] >= 0)
        near = view.neighbours[listed]
        near = np.where(near >= 0, table.positions[near], -1)
        blocks.append(_block(name + "norms", _planes(levels, 2)))
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
    meta = {
        "rows": int(rows.ids.size),
        "total": rows.total,
        "levels": LEVELS,
        "classes": [found.label for found in rows.classes],
        "tables": described,
        "change": None,
    }
    if changes is not None:
        levels, low, high = _levels(changes.relative)
        cosines = np.nan_to_num(changes.cosine, nan=-1.0)
        blocks.append(_block("changes", _planes(levels, 2)))
        blocks.append(_block("change-cosines", _planes(np.rint((cosines + 1) * 32767.5).astype(np.uint32), 2)))
        meta["change"] = {"label": changes.label, "low": low, "high": high}
    text = json.dumps(meta, ensure_ascii=True).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    blocks.insert(0, Html(f'<script type="application/json" id="search-data">{text}</script>'))
    return Html("".join(blocks)), cut


def _texts(texts: Sequence[str]) -> tuple[bytes, int]:
    """The token texts, one a line, cut where they would not fit; and to how many characters."""
    cut = 0
    while True:
        lines = [text if not cut or len(text) <= cut else f"{text[:cut]}…" for text in texts]
        data = "\n".join(lines).encode()
        if not SHORTER_TEXTS or cut == SHORTER_TEXTS[-1] or len(zlib.compress(data, 9)) <= TEXT_BYTES:
            return data, cut
        cut = next(length for length in SHORTER_TEXTS if not cut or length < cut)


def _levels(values: Floats) -> tuple[Ids, float, float]:
    """Values of at least 0 on a logarithmic scale: 0 for zero, then 1 to `LEVELS`; and the ends of the scale."""
    usable = values[np.isfinite(values) & (values > 0)]
    low, high = (float(usable.min()), float(usable.max())) if usable.size else (1.0, 1.0)
    span = np.log(high / low) if high > low else 1.0
    with np.errstate(divide="ignore", invalid="ignore"):
        level = 1 + np.rint(np.log(np.maximum(values, low) / low) / span * (LEVELS - 1))
    level = np.where(values == 0, 0, level)
    level = np.where(np.isfinite(level), level, NOT_FINITE)
    return np.where(np.isposinf(values), NOT_FINITE - 1, level).astype(np.int64), low, high


def _planes(values: npt.NDArray[np.integer], width: int) -> bytes:
    """The lowest `width` bytes of each number, all first bytes before all second ones."""
    return np.ascontiguousarray(values.reshape(-1).astype("<u4").view(np.uint8).reshape(-1, 4)[:, :width].T).tobytes()


def _block(name: str, data: bytes) -> Html:
    packed = base64.b64encode(zlib.compress(data, 9)).decode()
    return Html(f'<script type="text/plain" id="data-{name}">{packed}</script>')
