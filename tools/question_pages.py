"""Puts a study's results into `docs/questions`: `python -m tools.question_pages STUDY --date DAY --machine WORDS`.

STUDY is the directory of `bowline study --quick --out STUDY`. Its record and its figures are copied beside the pages,
and each page gets the result between its two marks. Without STUDY the pages are written again from the record there.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from pathlib import Path
from typing import Any

from bowline.study.questions.question_list import QUESTIONS

__all__ = ["PAGES", "page_of", "updated"]

PAGES = Path(__file__).parent.parent / "docs" / "questions"
RECORD = PAGES / "study.json"
BEGIN, END = "<!-- measured: generated -->\n", "<!-- end -->"


def page_of(name: str) -> Path:
    """The page of a question."""
    return PAGES / f"{name}.md"


def updated(name: str, page: str, record: dict[str, Any]) -> str:
    """The page with its result as the record has it; the sentences are computed from the numbers again."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page_of(name)}: expected the marks {BEGIN.strip()} and {END}")
    (answer,) = (each for each in record["answers"] if each["name"] == name)
    setting, made = record["setting"], record["made_with"]
    source = (
        f"Source: `bowline study {name} --quick`, {record['date']}, {record['machine']}, {answer['seconds']:.0f} s; "
        f"Bowline {made['bowline']}, torch {made['torch']}, Python {made['python']}. Small models: {setting['layers']} "
        f"layers, width {setting['hidden_size']}, {setting['vocab_size']:,} tokens, up to {setting['steps']} steps of "
        f"{setting['batch'] * setting['length']} tokens, {setting['seeds']} seeds, unless the text says another size. "
        "± is the standard error over seeds. The numbers are in [study.json](study.json)."
    )
    result = wrapped(QUESTIONS[name].conclusion(answer["numbers"]))
    figure = f"[![The figure of the question {name}]({name}.svg)]({name}.svg)"
    return f"{before}{begin}\n{result}\n\n{figure}\n\n{wrapped(source)}\n\n{end}{after}"


def wrapped(text: str) -> str:
    """The text in lines of at most 120 characters."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def compact(figure: str) -> str:
    """The figure with coordinates to a hundredth of a point, which is less than anyone sees."""

    def rounded(found: re.Match[str]) -> str:
        numbers = re.sub(r"-?\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", found[2])
        return f'{found[1]}="{" ".join(numbers.split())}"'

    figure = re.sub(r"\s*<metadata>.*?</metadata>", "", figure, flags=re.DOTALL)
    return re.sub(r'\b(d|x|y)="([^"]*)"', rounded, figure)


def copy(study: Path, date: str, machine: str) -> None:
    """Copy record and figures of a study beside the pages."""
    record = json.loads((study / "study.json").read_text(encoding="utf-8"))
    record = {"date": date, "machine": machine, **record}
    RECORD.write_text(json.dumps(record, separators=(",", ":")) + "\n", encoding="utf-8")
    for answer in record["answers"]:
        figure = (study / answer["figure"]).read_text(encoding="utf-8")
        (PAGES / answer["figure"]).write_text(compact(figure), encoding="utf-8")


def main() -> None:
    """Copy the study that was named, if one was, and write every page."""
    parser = argparse.ArgumentParser(prog="python -m tools.question_pages", description=__doc__)
    parser.add_argument("study", type=Path, nargs="?")
    parser.add_argument("--date", help="the day of the study")
    parser.add_argument("--machine", help="the machine, in words")
    given = parser.parse_args()
    if given.study is not None:
        if given.date is None or given.machine is None:
            parser.error("a study needs --date and --machine")
        copy(given.study, given.date, given.machine)
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    for name in QUESTIONS:
        page = page_of(name)
        page.write_text(updated(name, page.read_text(encoding="utf-8"), record), encoding="utf-8")


if __name__ == "__main__":
    main()
