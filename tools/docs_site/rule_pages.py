"""A page for each finding of the audit, from the text that `bowline explain` prints."""

from __future__ import annotations

import re
from itertools import groupby

from bowline.auditing.rules import Rule, all_rules
from tools.docs_site.site_page import SitePage, table

__all__ = ["rule_pages", "rule_uri"]

GROUPS = {
    "BW1": "The flag and the stored tensors",
    "BW2": "The rows of the vocabulary",
    "BW3": "The files of the checkpoint",
    "BW4": "What is unknown, and what looks untrained",
    "BW5": "PEFT adapters",
}
"""The title of each hundred of codes."""
NAMES = ("transformers", "vLLM", "llama.cpp", "mlx-lm", "safetensors", "torch")
PARTS = {"What": "What it means", "Why it hurts": "Why it hurts", "Example": "An example", "Fix": "How to fix it"}
"""The parts that every page has, with their headings."""


def rule_uri(code: str) -> str:
    """Where the page of a finding is in the site."""
    return f"rules/{code}.md"


def rule_pages() -> list[SitePage]:
    """The list of the findings, and a page for each."""
    rules = all_rules()
    return [SitePage(uri="rules/README.md", content=_index(rules)), *map(_page, rules)]


def _index(rules: tuple[Rule, ...]) -> str:
    lines = [
        "# Rules",
        "",
        "Each finding of [`bowline audit`](../audit.md) has a code that does not change. `bowline explain CODE` prints "
        "the page of a code, and these pages are made from the same text. Errors and warnings make the exit code 1; "
        "information does not.",
        "",
    ]
    for group, found in groupby(rules, lambda rule: rule.code[:3]):
        rows = [(f"[{rule.code}]({rule.code}.md)", rule.name, rule.severities, rule.summary) for rule in found]
        lines += [f"## {GROUPS[group]}", "", table(("code", "name", "severity", "finding"), rows), ""]
    return "\n".join(lines)


def _page(rule: Rule) -> SitePage:
    lines = [f"# {rule.code} {rule.name}", "", f"**{rule.severities.capitalize()}**: {_first_lower(rule.summary)}", ""]
    for paragraph in rule.page.split("\n\n")[1:]:
        part, _, rest = paragraph.partition(": ")
        if part in PARTS:
            lines += [f"## {PARTS[part]}", "", _first_upper(rest), ""]
        elif part == "Reported in":
            lines += ["## Where it was reported", "", _linked(rest), ""]
        else:
            lines += [paragraph, ""]
    lines += ["## On the command line", "", "```console", f"$ bowline explain {rule.code}"]
    if rule.code < "BW5":
        lines += [f"$ bowline audit path/to/checkpoint --select {rule.code}"]
    return SitePage(uri=rule_uri(rule.code), content="\n".join([*lines, "```", ""]))


def _first_lower(sentence: str) -> str:
    """The sentence after a colon: in lower case, unless its first word is a name."""
    first = sentence.partition(" ")[0]
    return sentence[:1].lower() + sentence[1:] if first in ("The", "A", "An", "Some", "No", "One", "This") else sentence


def _first_upper(text: str) -> str:
    """The text as a paragraph of its own: in upper case, unless its first word is a name."""
    return text if text.startswith(NAMES) else text[:1].upper() + text[1:]


def _linked(references: str) -> str:
    """`owner/repository#12` as links to the issue."""
    return re.sub(r"([\w.-]+/[\w.-]+)#(\d+)", r"[\g<0>](https://github.com/\1/issues/\2)", references)
