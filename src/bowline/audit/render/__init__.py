"""Reports as text: `full` for people, `concise` for grep, `json` and `sarif` for machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bowline.audit.render.json_format import render_json
from bowline.audit.render.run import Failure, Run
from bowline.audit.render.sarif import render_sarif
from bowline.audit.render.text import render_concise, render_full

__all__ = ["FORMATS", "Failure", "Run", "render_full"]

FORMATS: Mapping[str, Callable[[Run], str]] = {
    "full": render_full,
    "concise": render_concise,
    "json": render_json,
    "sarif": render_sarif,
}
