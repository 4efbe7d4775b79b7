"""`bowline audit --card`: what the card says is what the audit found, and no name can become Markdown or HTML."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token
from typer.testing import CliRunner, Result

from bowline import __version__
from bowline.auditing import AuditReport, audit
from bowline.auditing.report.card import render_card
from bowline.cli import app
from bowline.families.declaration import Flag
from bowline.markup import code_span
from bowline.tie import Tie
from tests.checkpoints import GPT2, HEAD, LLAMA, OWN, UNKNOWN, WTE, Tensors, snapshot, table, tied_gpt2, write

EMBED = "model.embed_tokens.weight"
HOSTILE = {
    "link": "[click](javascript:alert(1))",
    "image": "![x](http://example.com/a.png)",
    "html": "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "end of code": "`</code><b>",
    "ticks": "``` `` ` ````",
    "newline": "a\n\n# Heading\n\n- item\n\n```\nb",
    "carriage return": "a\r\rb",
    "line separator": "a\u2028# b\u2029c",
    "ansi": "\x1b[31mred\x1b[0m\x07",
    "direction": "a\u202eb\u2066c\u200f",
    "surrogate": "a\udcffb",
    "front matter": "---\nlicense: mit\n---",
    "quote": "> '\" $(rm -rf x) `date` \\",
    "mention": "@someone #1 http://example.com",
    "table": "a | b\n|---|---|",
    "spaces": "   ",
    "empty": "",
    "long": "`" * 5000,
    "option": "--fix",
}
MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])


def bowline(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def tokens(text: str) -> list[Token]:
    return [inner for token in MARKDOWN.parse(text) for inner in (token, *(token.children or ()))]


def structure(text: str) -> list[str]:
    """The kinds of blocks and inline parts, in order: what a reader's browser makes of the text."""
    return [token.type for token in tokens(text)]


def hostile(report: AuditReport, name: str) -> AuditReport:
    """The report with `name` wherever a checkpoint can bring in a string of its own."""
    evidence = report.evidence
    (tie,) = evidence.ties
    declared = replace(tie.declared, tie=Tie(name or "x", f"{name}.source"), flag=Flag(value=True, path=name))
    declaration = replace(evidence.declaration, architecture=name or "x", flag=Flag(value=True, path=name))
    return replace(
        report,
        evidence=replace(
            evidence,
            location=f"org/{name}",
            declaration=replace(declaration, head=declared.tie.target),
            ties=(replace(tie, declared=declared),),
            outcomes={loader: {name or "x": None} for loader in evidence.outcomes},
            tables=tuple(replace(rows, name=name) for rows in evidence.tables),
        ),
    )


def check_harmless(report: AuditReport, name: str) -> None:
    card = render_card(hostile(report, name))
    assert structure(card) == structure(render_card(hostile(report, "plain")))
    assert all(line.isprintable() for line in card.split("\n"))
    assert not {"html_block", "html_inline", "link_open", "heading_open"} & set(structure(card))
    (image,) = [token for token in tokens(card) if token.type == "image"]
    assert re.fullmatch(r"https://img\.shields\.io/badge/[\w%-]+", str(image.attrs["src"]))
    card.encode("utf-8")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> AuditReport:
    return audit(write(tmp_path_factory.mktemp("m"), {WTE: table(), HEAD: OWN}, GPT2))


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_name_stays_text(found: AuditReport, name: str) -> None:
    check_harmless(found, name)


def test_any_name_stays_text(found: AuditReport) -> None:
    @given(st.text(alphabet=st.sampled_from("`~*_[]()<>!#|\\-+=&;:@$'\"\n\r\t ab1.\x1b\u202e\u2028"), max_size=30))
    @example("`")
    @example("` ")
    @example("\\`")
    def run(name: str) -> None:
        check_harmless(found, name)

    run()


@given(st.text(max_size=40))
def test_a_code_span_is_one_span_whose_content_is_the_name(name: str) -> None:
    parts = [token for token in tokens(f"a {code_span(name)} b") if token.type != "text"]
    assert [token.type for token in parts if token.type not in ("paragraph_open", "paragraph_close", "inline")] == (
        ["code_inline"]
    )


def test_a_real_checkpoint_with_hostile_class_and_directory_stays_text(tmp_path: Path) -> None:
    """Through the command: the names come from a config and a directory on disk."""
    plain = write(tmp_path / "plain", {EMBED: table()}, {**UNKNOWN, "architectures": ["plain"]})
    benign = bowline("audit", "--card", plain).output
    for at, name in enumerate(text for text in HOSTILE.values() if "\udcff" not in text and len(text) < 200):
        place = tmp_path / f"{at}" / (name.replace("/", "%") or "x")
        write(place, {EMBED: table()}, {**UNKNOWN, "architectures": [name or "x"]})
        result = bowline("audit", "--card", place)
        assert structure(result.output) == structure(benign), name


def command_of(card: str) -> list[str]:
    (fence,) = [token for token in tokens(card) if token.type == "fence"]
    assert fence.content.startswith("$ ")
    return shlex.split(fence.content.removeprefix("$ "))


@pytest.mark.parametrize("name", ["a model", "it's", "$(touch x)", "-rf", "`x`", "--fix"])
def test_the_command_repeats_the_audit_in_a_shell(found: AuditReport, name: str) -> None:
    words = command_of(render_card(replace(found, evidence=replace(found.evidence, location=name))))
    assert words == ["bowline", "audit", f"./{name}" if name.startswith("-") else name]


def test_the_directories_above_the_checkpoint_are_not_published(tmp_path: Path) -> None:
    path = tied_gpt2(tmp_path / "secret" / "model")
    card = render_card(audit(path, base=tied_gpt2(tmp_path / "hidden" / "base")))
    assert "secret" not in card
    assert "hidden" not in card
    assert command_of(card) == ["bowline", "audit", "model", "--base", "base"]


# --- what it says ---------------------------------------------------------------------------------------------------


def card(path: Path, tensors: Tensors, config: object, *, values: bool = True) -> str:
    return render_card(audit(write(path, tensors, config), values=values), on=date(2026, 1, 2))


def badge(text: str) -> str:
    (image,) = [token for token in tokens(text) if token.type == "image"]
    return f"{image.content} {str(image.attrs['src']).rpartition('-')[2]}"


@pytest.mark.parametrize(
    ("tensors", "config", "shown", "said"),
    [
        ({WTE: table()}, GPT2, "weight tying: tied brightgreen", "one matrix, stored once"),
        (
            {WTE: table(), HEAD: OWN},
            GPT2,
            "weight tying: two matrices, 1 error red",
            "head and embedding differ, but the flag says tied",
        ),
        ({EMBED: table(), HEAD: OWN}, LLAMA, "weight tying: untied brightgreen", "two matrices"),
        (
            {EMBED: table(), HEAD: table()},
            LLAMA,
            "weight tying: two equal matrices brightgreen",
            "one matrix, stored twice",
        ),
        ({EMBED: table()}, LLAMA, "weight tying: no head stored, 1 error red", "only the embedding is stored"),
    ],
)
def test_badge_and_verdict(tmp_path: Path, tensors: Tensors, config: object, shown: str, said: str) -> None:
    text = card(tmp_path, tensors, config)
    assert badge(text) == shown
    assert f"**Weight tying**: {said}" in text


def test_it_names_flag_loaders_findings_version_and_day(tmp_path: Path) -> None:
    text = card(tmp_path, {WTE: table(), HEAD: OWN}, {**GPT2, "eos_token_id": 99})
    assert "the flag `tie_word_embeddings` is true" in text
    assert "The head after loading: dropped in transformers 4" in text
    assert "**Findings**: 1 error (BW101 tied-but-diverged) and 1 warning (BW203 " in text
    assert f"Bowline {__version__}, 2026-01-02." in text
    assert f"Head: `{HEAD}`; embedding: `{WTE}`." in text


def test_a_clean_checkpoint_has_no_findings(tmp_path: Path) -> None:
    assert "**Findings**: none." in card(tmp_path, {WTE: table()}, GPT2)


def parts(text: str) -> tuple[str, str]:
    (line,) = (line for line in text.split("\n") if line.startswith("**Checked**"))
    checked, _, not_checked = line.partition("**Not checked**")
    return checked, not_checked


def test_headers_only_says_that_no_values_were_read(tmp_path: Path) -> None:
    text = card(tmp_path, {WTE: table(), HEAD: table()}, GPT2, values=False)
    checked, not_checked = parts(text)
    assert "the values of" not in checked
    assert "the values of any tensor, since the audit read headers only" in not_checked
    assert badge(text) == "weight tying: not compared lightgrey"
    assert command_of(text)[-1] == "--headers-only"


def test_with_values_it_names_the_tables_that_were_read(tmp_path: Path) -> None:
    checked, not_checked = parts(card(tmp_path, {WTE: table(), HEAD: OWN}, GPT2))
    assert f"the values of `{WTE}`, `{HEAD}`" in checked
    assert "headers only" not in not_checked


def test_loaders_that_were_not_run_are_said_to_be_predicted(tmp_path: Path) -> None:
    checked, not_checked = parts(card(tmp_path, {WTE: table()}, GPT2))
    assert "transformers 5.23.0" in checked
    assert "no loader was run on this checkpoint" in not_checked


def test_an_unknown_class_leaves_every_loader_open(tmp_path: Path) -> None:
    text = card(tmp_path, {EMBED: table(), HEAD: OWN}, UNKNOWN)
    checked, not_checked = parts(text)
    assert "which Bowline does not know" in checked
    assert "would do" not in checked
    assert "transformers 5.23.0" in not_checked
    assert "The head after loading" not in text


def test_a_missing_shard_is_not_checked(tmp_path: Path) -> None:
    write(tmp_path, {WTE: table()}, GPT2, name="model-00001-of-00002.safetensors")
    text = render_card(audit(tmp_path / "model-00001-of-00002.safetensors"))
    assert "files of the checkpoint that were missing" in parts(text)[1]


def test_the_original_is_checked_if_it_was_given(tmp_path: Path) -> None:
    base = tied_gpt2(tmp_path / "base")
    checked, not_checked = parts(render_card(audit(tied_gpt2(tmp_path / "m"), base=base)))
    assert "against the original checkpoint `base`" in checked
    assert "trained from" not in not_checked


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_prints_the_card_and_exits_as_the_audit(tmp_path: Path) -> None:
    clean, faulty = tied_gpt2(tmp_path / "a"), write(tmp_path / "b", {WTE: table(), HEAD: OWN}, GPT2)
    before = snapshot(tmp_path)
    for path, code in ((clean, 0), (faulty, 1)):
        result = bowline("audit", path, "--card")
        assert result.exit_code == code
        assert result.output == render_card(audit(path)) + "\n"
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    "options",
    [
        ["--output-format", "json"],
        ["--output-format", "jsonl"],
        ["--output-format", "concise"],
        ["--select", "BW1"],
        ["--ignore", "BW101"],
        ["--fix"],
        ["--verbose"],
        ["--plot", "x.svg"],
        ["--jobs", "2"],
    ],
    ids=" ".join,
)
def test_an_option_that_does_not_go_with_a_card_is_refused(tmp_path: Path, options: list[str]) -> None:
    path = tied_gpt2(tmp_path)
    before = snapshot(path)
    result = bowline("audit", path, "--card", *options)
    assert result.exception is not None
    assert options[0] in str(result.exception)
    assert result.stdout == ""
    assert snapshot(path) == before


def test_several_checkpoints_are_refused_before_any_is_read(tmp_path: Path) -> None:
    result = bowline("audit", tmp_path / "missing-a", tmp_path / "missing-b", "--card")
    assert "--card is for one checkpoint, not for 2" in str(result.exception)
    tied_gpt2(tmp_path / "c")
    tied_gpt2(tmp_path / "d")
    assert "not for 2" in str(bowline("audit", tmp_path, "--recursive", "--card").exception)


def test_an_adapter_is_refused(tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["lm_head"]}
    name = "base_model.model.lm_head.lora_{}.weight"
    tensors = {name.format("A"): table(2), name.format("B"): table(64, 2)}
    write(tmp_path, tensors, name="adapter_model.safetensors", files={"adapter_config": config})
    result = bowline("audit", tmp_path, "--card")
    assert "this is an adapter" in str(result.exception)


def test_a_place_that_cannot_be_read_is_an_error_and_no_card(tmp_path: Path) -> None:
    result = bowline("audit", tmp_path, "--card")
    assert result.exception is not None
    assert result.stdout == ""
