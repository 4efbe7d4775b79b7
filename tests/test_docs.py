"""What README and docs say is what is seen: their Python runs, their tables are printed, their words are documented."""

from __future__ import annotations

import configparser
import contextlib
import json
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from tools.docs_site.anchors import github_anchor
from tools.docs_site.repository_pages import links_of
from typer.main import get_command

from bowline.auditing.loaders import Fate
from bowline.auditing.rules import Rule, all_rules
from bowline.demo import faults, layouts
from bowline.tie import TieState

ROOT = Path(__file__).parent.parent
FRONT = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "README.md"]
PAGES = FRONT + [page for page in sorted((ROOT / "docs").rglob("*.md")) if page not in FRONT]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_run_and_print_the_lists_that_they_show(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "path" / "to" / "checkpoint"
    place.parent.mkdir(parents=True)
    layouts.gpt2().write(place)
    namespace: dict[str, object] = {}  # a page is read from its top
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), namespace)
        printed = capsys.readouterr().out.splitlines()
        assert [shown for shown in re.findall(r"# (\[.*\])$", block, re.MULTILINE) if shown not in printed] == []


def test_readme_shows_the_end_of_the_demo(minilm: Path) -> None:
    demo = subprocess.run(
        [sys.executable, "-m", "bowline", "demo"], capture_output=True, text=True, check=True, encoding="utf-8"
    )
    printed = [line.rstrip() for line in demo.stdout.splitlines()]
    shown = blocks(ROOT / "README.md", "text")[1].splitlines()
    start = printed.index(shown[0])
    assert printed[start : start + len(shown)] == shown


def test_readme_shows_the_audit_of_a_trained_head_without_its_geometry(tmp_path: Path) -> None:
    faults.lora_merged_on_head().write(tmp_path / "fine-tuned")
    audit = subprocess.run(
        [sys.executable, "-m", "bowline", "audit", "fine-tuned"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        encoding="utf-8",
    )
    assert audit.returncode == 1
    printed = [line.rstrip() for line in audit.stdout.splitlines()]
    start = next(at for at, line in enumerate(printed) if line.startswith("  geometry"))
    end = printed.index("", start)
    assert blocks(ROOT / "README.md", "text")[0].splitlines() == printed[:start] + printed[end:]


def test_every_state_and_every_fate_is_documented() -> None:
    guide = (ROOT / "docs" / "audit.md").read_text(encoding="utf-8")
    assert all(f"| `{state.value}` |" in guide for state in TieState)
    assert all(f"| `{fate.value}` |" in guide for fate in Fate)


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.code)
def test_every_rule_has_a_whole_page(rule: Rule) -> None:
    assert all(part in rule.page for part in ("\n\nWhat: ", "\n\nWhy it hurts: ", "\n\nExample: ", "\n\nFix: "))


def test_readme_shows_what_check_ties_says(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (block for block in blocks(ROOT / "README.md", "python") if "keep_tied" in block)
    exec(compile(block, "README.md", "exec"), {})
    shown = re.findall(r"^print\(bowline\.check_ties\(model, ties\)\)  # (.*)$", block, re.MULTILINE)
    assert len(shown) == 2
    assert capsys.readouterr().out.splitlines() == shown


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {github_anchor(heading) for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for link in links_of(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES[len(FRONT) :], ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_says_at_its_top_whether_it_is_guide_reference_or_notes(page: Path) -> None:
    title, _, kind, *_ = page.read_text(encoding="utf-8").splitlines()
    assert title.startswith("# ")
    assert re.match(r"\*\*(Guide|Reference|Notes)\*\*: ", kind)


def test_readme_names_only_targets_that_the_makefile_has() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"(?:`|\$ )make (\w+)", (ROOT / "README.md").read_text(encoding="utf-8"))):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_contributing_names_only_places_that_the_tree_has() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Where a change goes")[2]
    rows = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    house = ROOT / "src" / "bowline"
    assert len(rows) > 20
    for row in rows[1:]:
        cell = row.strip("| ").rpartition(" | ")[2]
        places = re.findall(r"`([\w./]+(?:/|\.py|\.json))`", cell.replace("NAME", "gpt2"))
        assert places, row
        nearby = [ROOT, house, *(house / place for place in places if place.endswith("/"))]
        nearby += [(house / place).parent for place in places]
        for place in places:
            assert any((base / place).exists() for base in nearby), place


def test_the_predictions_for_t5_are_those_that_init_loss_prints() -> None:
    from bowline.study.initial_loss import compare

    page = (ROOT / "docs" / "notes" / "t5-first-loss.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| `(\S+)` \| (\w+) \| ([\d.]+) \| .*? \| (.*)\. \|$", page, re.MULTILINE)
    rows = list(compare("t5", draws=0))
    ends = ["tied" if row.tied else "untied" for row in rows]
    assert [(recipe, head) for recipe, head, *_ in shown] == [
        (row.recipe.name, end) for row, end in zip(rows, ends, strict=True)
    ]
    assert [float(loss) for *_, loss, _ in shown] == pytest.approx([row.expected.loss for row in rows], rel=0, abs=6e-4)
    assert [said for *_, said in shown] == [row.expected.conclusion for row in rows]


def test_every_option_and_every_key_of_training_is_on_its_page() -> None:
    from bowline.cli import app
    from bowline.train.train_config import TrainConfig

    page = (ROOT / "docs" / "train-options.md").read_text(encoding="utf-8")
    verb = get_command(app).commands["train"]  # type: ignore[attr-defined]
    options = [option for param in verb.params for option in (*param.opts, *param.secondary_opts)]
    assert len(options) > 30
    assert [option for option in options if not re.search(rf"{option}(?![\w-])", page)] == []
    keys = [field.name for field in fields(TrainConfig) if f"--{field.name.replace('_', '-')}" not in options]
    assert [key for key in keys if f"`{key}`" not in page] == []


def test_the_table_of_recipes_is_the_data() -> None:
    from tools.recipes_page import PAGE, updated

    page = PAGE.read_text(encoding="utf-8")
    assert updated(page) == page, "python -m tools.recipes_page"


def test_the_pages_of_the_study_say_what_its_record_says() -> None:
    from tools.question_pages import RECORD, page_of, updated

    from bowline.study.questions.question_list import QUESTIONS

    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert [answer["name"] for answer in record["answers"]] == list(QUESTIONS)
    for name, question in QUESTIONS.items():
        page = page_of(name).read_text(encoding="utf-8")
        assert updated(name, page, record) == page, "python -m tools.question_pages"
        assert question.thread in " ".join(page.split()), name
        assert page_of(name).with_suffix(".svg").exists()


GUIDES = [ROOT / "docs" / "start.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_commands_of_the_guides_print_what_they_show(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the order of the page, in one directory; `...` stands for any lines. Words in capitals are placeholders."""
    from bowline.cli import main

    monkeypatch.chdir(tmp_path)
    for case in faults.CASES:
        case.build().write(tmp_path / "checkpoints" / case.name)
    layouts.gpt2().write(tmp_path / "path" / "to" / "checkpoint")
    for command, shown in commands(page):
        if not command.startswith("bowline ") or " demo " in command or re.search(r" [A-Z]+\b", command):
            continue
        monkeypatch.setattr(sys, "argv", shlex.split(command))
        with contextlib.suppress(SystemExit):
            main()
        printed = [line.rstrip() for line in capfd.readouterr().out.splitlines()]
        assert follows(shown, printed), f"{command} printed\n" + "\n".join(printed)


def commands(page: Path) -> list[tuple[str, list[str]]]:
    """The commands of a page's console blocks, each with the lines that are shown below it."""
    found: list[tuple[str, list[str]]] = []
    for line in "".join(blocks(page, "console")).splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


def follows(shown: list[str], printed: list[str]) -> bool:
    """True if `printed` is `shown`, with any lines in the place of `...`; nothing shown says nothing."""
    if not shown:
        return True
    pattern = "".join("(?:.*\n)*?" if line == "..." else re.escape(line) + "\n" for line in shown)
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in printed)) is not None


def test_the_table_of_loaders_is_what_the_audit_predicts() -> None:
    from tools.loader_table import PAGE, updated

    page = PAGE.read_text(encoding="utf-8")
    assert updated(page) == page, "python -m tools.loader_table"


def test_the_design_lists_the_rooms_in_the_order_of_the_contract() -> None:
    contract = configparser.ConfigParser()
    contract.read(ROOT / ".importlinter", encoding="utf-8")
    layers = contract["importlinter:contract:rooms"]["layers"].split("\n")
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    rows = page.partition("| rooms |")[2].partition("\n\n")[0].splitlines()[2:]
    listed = [room for row in rows for room in re.findall(r"`(\w+)`", row.split("|")[1])]
    order = [room.strip() for layer in reversed(layers) for room in layer.split("|") if room.strip()]
    assert sorted(listed) == sorted(order)
    place = {room: at for at, layer in enumerate(reversed(layers)) for room in map(str.strip, layer.split("|"))}
    assert [place[room] for room in listed] == sorted(place[room] for room in listed)


def test_every_page_is_listed_on_the_first_page_of_the_documentation() -> None:
    """Or on a page that this one lists, in the same folder."""
    first = ROOT / "docs" / "README.md"
    indexes = [first, *(ROOT / "docs").glob("*/README.md")]
    linked = {(index.parent / link.partition("#")[0]).resolve() for index in indexes for link in links_of(text(index))}
    assert [page for page in (ROOT / "docs").rglob("*.md") if page not in linked and page != first] == []


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def test_the_first_verdict_is_that_of_the_commands_on_the_pages() -> None:
    from tools.first_verdict import PAGES, shown_commands

    for page in PAGES:
        install, *rest = shown_commands(page)
        assert install == "pip install ."
        assert [command.split()[:2] for command in rest] == [["bowline", "demo"], ["bowline", "audit"]]


def test_every_picture_of_a_page_is_small_and_shown() -> None:
    pictures = sorted((ROOT / "docs" / "images").glob("*.png"))
    shown = set(re.findall(r"images/([\w-]+\.png)", text(ROOT / "docs" / "notes" / "pages.md")))
    assert {picture.name for picture in pictures} == shown
    sizes = [picture.stat().st_size for picture in pictures]
    assert max(sizes) < 150_000 and sum(sizes) < 1_000_000
