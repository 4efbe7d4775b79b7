"""`bowline audit --html`: what the page says is what the audit found, it requests nothing, and no name can run."""

from __future__ import annotations

import base64
import hashlib
import re
import shlex
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from bowline.auditing import audit
from bowline.auditing.report.scope import checked, not_checked
from bowline.auditing.verdict import verdict
from bowline.checkpoint import open_checkpoint
from bowline.page import audit_page
from bowline.page.panels.classes import classes_panel
from bowline.page.row_list import RowClass, RowList
from bowline.page.search_data import packed_search
from bowline.wording import printable
from tests.checkpoints import GPT2, HEAD, OWN, T5, WTE, table, write
from tests.page.checkpoints import HOSTILE_TOKENS, ROWS, broken, clean, hostile
from tests.page.parsed import Node, Search, parsed

MAKERS = {"clean": clean, "broken": broken, "hostile": hostile}


def page_of(path: Path, **options: bool) -> str:
    report = audit(path, **options)  # type: ignore[arg-type]
    with open_checkpoint(path) as checkpoint:
        return audit_page(report, checkpoint, on=date(2026, 1, 2))


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str, Node]]:
    found = {}
    for name, maker in MAKERS.items():
        path = maker(tmp_path_factory.mktemp(name) / name)
        text = page_of(path)
        found[name] = (path, text, parsed(text))
    return found


# --- what it says -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKERS)
def test_the_verdict_comes_first_and_is_that_of_the_audit(pages: dict[str, tuple[Path, str, Node]], name: str) -> None:
    path, _, page = pages[name]
    heading = page.one("main").all("h1")[0]
    said = verdict(audit(path).evidence)
    assert heading.text.lower() == said.lower()
    assert page.one("main").children[0] is not None and page.all("h1") == [heading]


@pytest.mark.parametrize("name", MAKERS)
def test_every_finding_is_listed_with_its_code_message_and_way_out(
    pages: dict[str, tuple[Path, str, Node]], name: str
) -> None:
    path, _, page = pages[name]
    findings = audit(path).findings
    listed = page.one("ol", class_="findings").all("li") if findings else []
    assert len(listed) == len(findings)
    for item, finding in zip(listed, findings, strict=True):
        assert finding.code in item.text and finding.severity.word in item.text
        assert printable(finding.message[:60]) in item.text


def test_commands_that_mend_a_finding_can_be_copied(pages: dict[str, tuple[Path, str, Node]]) -> None:
    path, _, page = pages["broken"]
    finding = next(one for one in audit(path).findings if one.code == "BW101")
    commands = re.findall(r"`(bowline [^`]+)`", finding.help)
    copied = [button.attributes["data-copy"] for button in page.all("button")]
    assert "bowline audit --fix" in commands
    whole = {command.replace("audit --fix", f"audit {path} --fix") for command in commands}
    assert whole <= set(copied)


@pytest.mark.parametrize("name", ["`x`", "-dash", "a b", "it's", "$(id)", '"'])
def test_a_copied_command_names_one_place_to_a_shell(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    broken(tmp_path / name)
    page = parsed(page_of(Path(name)))
    commands = [shlex.split(button.attributes["data-copy"] or "") for button in page.all("button")]
    assert {command[1] for command in commands} >= {"audit", "tie"}
    for command in commands:
        assert command[0] == "bowline" and command[2] in (name, f"./{name}") and not command[2].startswith("-")
    assert len(commands) >= 3


def test_what_was_not_checked_stands_beside_what_was(pages: dict[str, tuple[Path, str, Node]]) -> None:
    path, _, page = pages["broken"]
    evidence = audit(path).evidence
    lists = page.one("div", class_="scope").all("ul")
    for found, expected in zip(lists, (checked(evidence), not_checked(evidence)), strict=True):
        assert [item.text for item in found.all("li")] == [line.replace("`", "") for line in expected]


def test_every_loader_with_a_prediction_has_a_line_with_fate_and_reason(
    pages: dict[str, tuple[Path, str, Node]],
) -> None:
    path, _, page = pages["broken"]
    text = "".join(row.text for row in page.all("tr"))
    for loader, targets in audit(path).evidence.outcomes.items():
        outcome = targets.get(HEAD)
        if outcome is not None:
            assert outcome.fate.value in text and outcome.reason in text, loader


def test_a_tied_model_has_one_box_and_a_diverged_one_two(pages: dict[str, tuple[Path, str, Node]]) -> None:
    assert len(pages["clean"][2].all("div", class_="box")) == 1
    boxes = pages["broken"][2].all("div", class_="box")
    assert [WTE in boxes[0].text, HEAD in boxes[1].text] == [True, True] and len(boxes) == 2
    assert "different values" in pages["broken"][2].one("div", class_="sign").text


def test_a_missing_end_is_drawn_as_missing(tmp_path: Path) -> None:
    page = parsed(page_of(write(tmp_path / "a", {WTE: table()}, {**GPT2, "tie_word_embeddings": False})))
    assert "not stored" in page.one("div", class_="box gone").text


def test_every_tie_of_a_model_with_several_has_its_loaders(tmp_path: Path) -> None:
    path = write(tmp_path / "a", {"shared.weight": table(), HEAD: OWN}, {**T5, "d_model": 8})
    page = parsed(page_of(path))
    for tie in audit(path).evidence.ties:
        assert any(tie.tie.target in heading.text for heading in page.all("h3"))


def test_headers_only_have_no_plots_and_the_page_says_so(tmp_path: Path) -> None:
    page = parsed(page_of(clean(tmp_path / "a"), values=False))
    assert page.all("figure") == [] and page.all("form") == []
    assert "Only headers were read" in page.one("main").text


def test_a_checkpoint_without_a_table_has_a_page(tmp_path: Path) -> None:
    page = parsed(page_of(write(tmp_path / "a", {"x": table()}, GPT2)))
    assert "nothing to plot" in page.one("main").text


# --- its plots --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKERS)
def test_every_plot_has_a_description_and_a_table(pages: dict[str, tuple[Path, str, Node]], name: str) -> None:
    figures = [figure for figure in pages[name][2].all("figure") if figure.all("svg")]
    assert len(figures) >= 5
    for figure in figures:
        (drawing,) = figure.all("svg")
        assert drawing.attributes["role"] == "img" and drawing.attributes["aria-label"]
        assert figure.all("table") and figure.all("caption"), figure.one("h3").text


def test_the_page_has_a_plot_of_each_kind(pages: dict[str, tuple[Path, str, Node]]) -> None:
    titles = " ".join(figure.one("h3").text for figure in pages["broken"][2].all("figure"))
    for part in (
        "stand out",
        "padding row",
        "two ends differ",
        "Row norms",
        "Spectrum",
        "block of E",
        "map of the rows",
    ):
        assert part in titles


def test_classes_of_rows_are_those_of_the_audit(pages: dict[str, tuple[Path, str, Node]]) -> None:
    search = Search.of(pages["broken"][2])
    bits = search.numbers("classes", 3)
    rows = {label: np.flatnonzero(bits >> at & 1).tolist() for at, label in enumerate(search.meta["classes"])}
    assert rows["special"] == [0, 3] and rows["padding"] == [3]
    assert rows["added"] == list(range(ROWS - 10, ROWS - 5))
    assert rows[f"zero in {HEAD}"] == list(range(ROWS - 4, ROWS)) and rows[f"not finite in {HEAD}"] == [7]


@pytest.mark.parametrize("scale", [1e-310, 1e-200, 1e-13, 1e140])
def test_a_table_of_any_size_has_finite_products_and_distinct_ticks(scale: float, tmp_path: Path) -> None:
    values = table().astype(np.float64) * scale
    page = parsed(page_of(write(tmp_path / "a", {WTE: values}, GPT2)))
    figures = {figure.one("h3").text.partition(":")[0]: figure for figure in page.all("figure")}
    cells = [cell.text for cell in figures["A block of E Eᵀ"].all("td", class_="n")]
    rows = table().astype(np.float64)
    chosen = np.linspace(0, len(rows) - 1, 32).astype(int)
    products = rows[chosen] @ rows[chosen].T / np.mean(np.square(rows).sum(axis=1))
    np.testing.assert_allclose([float(cell) for cell in cells], products.reshape(-1), atol=0.0051)
    ticks = [tick.text for tick in figures["Row norms"].all("text", class_="tick") if tick.attributes["x"] == "46"]
    assert len(ticks) >= 3 and len(set(ticks)) == len(ticks)


def test_norms_over_the_range_of_float64_are_in_the_search(tmp_path: Path) -> None:
    values = table().astype(np.float64) * 10.0 ** np.linspace(-310, 140, len(table()))[:, None]
    search = Search.of(parsed(page_of(write(tmp_path / "a", {WTE: values}, GPT2))))
    norms = search.numbers("table0-norms", 2)
    assert norms[0] == 1 and norms[-1] == search.meta["levels"] and np.all(np.diff(norms) >= 0)


def test_more_classes_than_bits_are_plotted_and_the_first_are_in_the_search() -> None:
    ids = np.arange(40)
    classes = tuple(RowClass(label=f"class {at}", meaning="", ids=ids[at : at + 1]) for at in range(40))
    rows = RowList(ids=ids, total=40, texts=[""] * 40, classes=classes)
    data, _ = packed_search(rows, [])
    search = Search.of(parsed(data))
    bits = search.numbers("classes", 3)
    assert search.meta["classes"] == [one.label for one in classes[:24]]
    assert [int(row) for row in bits] == [*(1 << at for at in range(24)), *[0] * 16]
    assert len(parsed(classes_panel(rows)).one("tbody").all("tr")) == 40


# --- its search -------------------------------------------------------------------------------------------------------


def test_norms_in_the_search_are_those_of_the_rows(pages: dict[str, tuple[Path, str, Node]]) -> None:
    path, _, page = pages["broken"]
    search = Search.of(page)
    with open_checkpoint(path) as checkpoint:
        for number, name in enumerate((WTE, HEAD)):
            norms = np.linalg.norm(checkpoint.rows(name).astype(np.float64), axis=1)
            found = search.values(f"table{number}-norms", search.meta["tables"][number])
            np.testing.assert_allclose(found, norms, rtol=2e-3)


def test_neighbours_in_the_search_are_the_nearest_rows(pages: dict[str, tuple[Path, str, Node]]) -> None:
    path, _, page = pages["clean"]
    search = Search.of(page)
    near = search.numbers("table0-near", 3).reshape(ROWS, -1)
    cosines = search.numbers("table0-cosines", 1).reshape(ROWS, -1) / 127.5 - 1
    assert np.cumsum(search.numbers("table0-looked-up", 3)).tolist() == list(range(ROWS))
    with open_checkpoint(path) as checkpoint:
        rows = checkpoint.rows(WTE).astype(np.float64)
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    every = units @ units.T
    np.fill_diagonal(every, -2)
    expected = np.argsort(-every, axis=1)[:, : near.shape[1]]
    np.testing.assert_array_equal(near, expected)
    np.testing.assert_allclose(cosines, np.take_along_axis(every, expected, axis=1), atol=0.005)


def test_differences_of_the_ends_are_in_the_search(pages: dict[str, tuple[Path, str, Node]]) -> None:
    search = Search.of(pages["broken"][2])
    (scale,) = search.meta["changes"]
    found = search.values("changes0", scale)
    np.testing.assert_allclose(found[100:150], 0.25, rtol=2e-3)
    assert np.isnan(found[7]) and found[-4:] == pytest.approx(1.0, rel=2e-3) and not found[150:-4].any()


def test_a_vocabulary_that_does_not_fit_is_sampled_and_the_page_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bowline.page.row_list.MOST_LISTED", 100)
    monkeypatch.setattr("bowline.page.table_view.MOST_LOOKED_UP", 30)
    text = page_of(broken(tmp_path / "a"))
    page = parsed(text)
    search = Search.of(page)
    limits = page.one("p", class_="limits").text
    assert f"The page lists {search.meta['rows']} of the {ROWS} rows." in limits and f"30 of {ROWS} rows" in limits
    ids = np.cumsum(search.numbers("ids", 3))
    assert 90 < ids.size == len(search.texts) <= 100 and {0, 3, 7, ROWS - 1} <= set(ids.tolist())
    assert search.texts[ids.tolist().index(3)] == "\u2581word3"


def test_token_texts_are_cut_where_they_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bowline.page.search_data.ROOM", 0)
    monkeypatch.setattr("bowline.page.search_data.LEAST_ROOM", 600)
    page = parsed(page_of(clean(tmp_path / "a")))
    assert "Token texts are cut to" in page.one("p", class_="limits").text


# --- what it must not do ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKERS)
def test_the_page_names_no_other_place(pages: dict[str, tuple[Path, str, Node]], name: str) -> None:
    for node in pages[name][2].all():
        for attribute, value in node.attributes.items():
            if attribute in ("href", "src", "action", "xlink:href", "formaction", "data", "poster", "srcset"):
                assert value == "data:," or (value or "").startswith("#"), f"{node.tag} {attribute}={value}"
            assert not attribute.startswith("on"), f"{node.tag} {attribute}"
    assert "@import" not in pages[name][1] and "url(" not in pages[name][2].one("style").text


@pytest.mark.parametrize("name", MAKERS)
def test_the_policy_allows_the_one_script_and_no_request(pages: dict[str, tuple[Path, str, Node]], name: str) -> None:
    page = pages[name][2]
    (policy,) = [node.attributes["content"] for node in page.all("meta") if "http-equiv" in node.attributes]
    running = [node for node in page.all("script") if "type" not in node.attributes]
    digest = base64.b64encode(hashlib.sha256(running[0].text.encode()).digest()).decode()
    assert len(running) == 1 and f"script-src 'sha256-{digest}'" in (policy or "")
    assert (policy or "").startswith("default-src 'none'") and "connect-src" not in (policy or "")


def test_hostile_names_are_text_and_nothing_else(pages: dict[str, tuple[Path, str, Node]]) -> None:
    _, text, page = pages["hostile"]
    tags = {node.tag for node in page.all()}
    assert tags.isdisjoint({"img", "iframe", "object", "embed", "base"}) and "<b onmouseover" not in text
    for character in ("\u202e", "\x1b", "\x00", "\u2028"):
        assert character not in text
    search = Search.of(page)
    assert len(search.texts) == ROWS and search.texts[0] == HOSTILE_TOKENS[0]
    assert max(map(len, search.texts)) <= 65 and not any("\n" in one or "\u202e" in one for one in search.texts)
    assert len(text) < 700_000


def test_a_page_is_the_same_each_time(tmp_path: Path) -> None:
    path = broken(tmp_path / "a")
    assert page_of(path) == page_of(path)


@pytest.mark.thorough
def test_a_vocabulary_of_262144_stays_below_3_mb(tmp_path: Path) -> None:
    rows, random = 262_144, np.random.default_rng(0)
    letters = [chr(code) for code in (*range(97, 123), *range(0x430, 0x450), *range(0x4E00, 0x4E40))]
    texts = {
        f"\u2581{''.join(word)}{number:x}": number for number, word in enumerate(random.choice(letters, (rows, 6)))
    }
    tensors = {WTE: table(rows, 32), HEAD: table(rows, 32, seed=1)}
    config = {**GPT2, "vocab_size": rows}
    path = write(tmp_path / "a", tensors, config, files={"tokenizer": {"model": {"type": "BPE", "vocab": texts}}})
    text = page_of(path)
    assert len(text.encode()) < 3_000_000
    assert "Norms in the search have two digits." in parsed(text).one("p", class_="limits").text
