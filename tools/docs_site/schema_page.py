"""The pages of the JSON that audits and comparisons write, from their schemas."""

from __future__ import annotations

import json
from typing import Any

from tools.docs_site.site_page import ROOT, SitePage, table

__all__ = ["schema_pages"]


def schema_pages() -> tuple[SitePage, ...]:
    """A page of each schema."""
    return (
        _page("json-report.md", "The JSON report", "bowline audit --output-format json", "audit.schema.json"),
        _page(
            "json-comparison.md", "The JSON comparison", "bowline compare --output-format json", "compare.schema.json"
        ),
    )


def _page(uri: str, title: str, command: str, file: str) -> SitePage:
    """A table of each kind of object in what the command prints, with every key."""
    schema = json.loads((ROOT / "docs" / file).read_text(encoding="utf-8"))
    lines = [
        f"# {title}",
        "",
        f"What `{command}` prints, as [{file}]({file}) has it. {schema['description']}",
        "",
        f"## {title.removeprefix('The JSON ').capitalize()}",
        "",
        _keys(schema),
        "",
    ]
    for name, part in schema["$defs"].items():
        lines += [f"## {name.replace('_', ' ').capitalize()}", ""]
        lines += [part["description"], ""] if "description" in part else []
        lines += [_keys(part) if "properties" in part else f"Type: {_type(part)}", ""]
    return SitePage(uri=uri, content="\n".join(lines))


def _keys(part: dict[str, Any]) -> str:
    required = part.get("required", ())
    rows = [
        (f"`{key}`" + ("" if key in required else ", optional"), _type(value), value.get("description", ""))
        for key, value in part["properties"].items()
    ]
    return table(("key", "type", "meaning"), rows)


def _type(part: dict[str, Any]) -> str:
    """The type in words, with links to the objects of the page."""
    if "$ref" in part:
        name = part["$ref"].rpartition("/")[2].replace("_", " ")
        return f"[{name}](#{name.replace(' ', '-')})"
    if "const" in part:
        return f"`{json.dumps(part['const'])}`"
    if "enum" in part:
        return ", ".join(f"`{json.dumps(value)}`" for value in part["enum"])
    for key in ("anyOf", "oneOf"):
        if key in part:
            return " or ".join(_type(each) for each in part[key])
    if part.get("type") == "array":
        return f"array of {_type(part['items'])}" if "items" in part else "array"
    if isinstance(part.get("additionalProperties"), dict):
        return f"object of {_type(part['additionalProperties'])}"
    kinds = part.get("type", "any")
    return kinds if isinstance(kinds, str) else " or ".join(kinds)
