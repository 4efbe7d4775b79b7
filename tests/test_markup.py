"""HTML of reports in notebooks: it shows what the report says, in colours for light and dark, and names stay text."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

from bowline import audit, check_ties
from bowline.auditing import AuditReport, audit_adapter
from bowline.markup import Tone, html_report
from bowline.nn.ties.tie_report import Remark, TieCheck, TieReport
from bowline.tie import Tie, TieState
from bowline.wording import printable
from tests.checkpoints import GPT2, HEAD, LLAMA, OWN, WTE, table, tied_gpt2, write

HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"><b onclick="x">',
    "' onmouseover='x",
    "</code></td></table></div>",
    "&lt;script&gt;",
    "<!--",
    "]]>",
    "a\nb\r\x1b[31m\x00",
    "a\u202eb\u2066c",
    "a\udcffb",
    "$\\href{javascript:alert(1)}{x}$",
    "",
]
TAGS = {"div", "p", "b", "br", "code", "table", "thead", "tbody", "tr", "th", "td"}


class Seen(HTMLParser):
    """The tags, the attributes and the text of a piece of HTML. Raises if a tag is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")

    def unknown_decl(self, data: str) -> None:
        raise AssertionError(f"a declaration: {data}")


def check_harmless(text: str, same: str, name: str) -> None:
    """`text` has the tags and attributes of `same`, none that runs or fetches something, and shows the name."""
    seen = Seen(text)
    assert seen.tags == Seen(same).tags
    assert seen.attributes == Seen(same).attributes
    assert set(seen.tags) <= TAGS
    assert {attribute for attribute, _ in seen.attributes} <= {"class", "style"}
    assert "url(" not in text
    assert printable(name) in "".join(seen.text)
    assert text.isprintable()
    text.encode("utf-8")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_stays_text_wherever_it_stands(name: str) -> None:
    def shown(word: str) -> str:
        return html_report(word, word, Tone.BAD, [word], [(Tone.BAD, word, (word, (word, word)))])

    check_harmless(shown(name), shown("plain"), name)


@pytest.mark.parametrize("name", HOSTILE)
def test_an_audit_with_hostile_names_stays_text(found: AuditReport, name: str) -> None:
    def shown(word: str) -> str:
        findings = tuple(replace(one, message=word, help=word) for one in found.findings)
        return replace(found, findings=findings, evidence=replace(found.evidence, location=word))._repr_html_()

    check_harmless(shown(name), shown("plain"), name)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_check_of_ties_with_hostile_names_stays_text(name: str) -> None:
    def shown(word: str) -> str:
        remark = Remark(kind="size", message=word, help=word, breaks=True)
        return TieReport(
            checks=(TieCheck(tie=Tie(f"t{word}", word), state=TieState.EQUAL, remarks=(remark,)),)
        )._repr_html_()

    check_harmless(shown(name), shown("plain"), name)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> AuditReport:
    return audit(write(tmp_path_factory.mktemp("m"), {WTE: table(), HEAD: OWN}, {**GPT2, "eos_token_id": 99}))


# --- what it shows --------------------------------------------------------------------------------------------------


def test_an_audit_shows_its_verdict_and_each_finding(found: AuditReport) -> None:
    text = found._repr_html_()
    shown = "".join(Seen(text).text)
    assert "head and embedding differ, but the flag says tied" in shown
    assert len(found.findings) == 2
    for finding in found.findings:
        assert finding.code in shown
        assert finding.message in shown
        assert finding.help in shown
    assert text.count("<tr>") == 3


def colour_of_the_verdict(text: str) -> str:
    return text.partition('<b style="color:')[2].partition('"')[0]


def test_a_clean_audit_has_no_table(tmp_path: Path) -> None:
    text = audit(tied_gpt2(tmp_path))._repr_html_()
    assert "<table>" not in text
    assert colour_of_the_verdict(text) == Tone.GOOD


def test_the_verdict_has_the_colour_of_the_worst_finding(tmp_path: Path, found: AuditReport) -> None:
    assert colour_of_the_verdict(found._repr_html_()) == Tone.BAD
    warned = audit(tied_gpt2(tmp_path / "a", eos_token_id=99))
    assert colour_of_the_verdict(warned._repr_html_()) == Tone.DOUBTFUL
    informed = audit(write(tmp_path / "b", {"model.embed_tokens.weight": table(), HEAD: table()}, LLAMA))
    assert informed.findings
    assert colour_of_the_verdict(informed._repr_html_()) == Tone.GOOD


def test_an_adapter_shows_its_sentence(tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["lm_head"]}
    name = "base_model.model.lm_head.lora_{}.weight"
    tensors = {name.format("A"): table(2), name.format("B"): table(64, 2)}
    report = audit_adapter(write(tmp_path, tensors, name="adapter_model.safetensors", files={"adapter_config": config}))
    shown = "".join(Seen(report._repr_html_()).text)
    assert report.sentence in shown
    assert all(finding.message in shown for finding in report.findings)


def model(*, tied: bool) -> nn.Module:
    made = nn.ModuleDict({"wte": nn.Embedding(9, 4), "lm_head": nn.Linear(4, 9, bias=False)})
    if tied:
        made["lm_head"].weight = made["wte"].weight
    return made


TIES = [("lm_head.weight", "wte.weight")]


def test_ties_that_hold_are_good() -> None:
    text = check_ties(model(tied=True), TIES)._repr_html_()
    assert "1 tie holds" in text
    assert "SHARED" in text
    assert colour_of_the_verdict(text) == Tone.GOOD


def test_a_tie_that_is_broken_shows_where_it_differs() -> None:
    torch.manual_seed(0)
    report = check_ties(model(tied=False), TIES)
    text = report._repr_html_()
    assert "1 of 1 ties broken" in text
    assert "DIVERGED" in text
    assert str(report.checks[0].difference) in "".join(Seen(text).text)
    assert colour_of_the_verdict(text) == Tone.BAD


def test_no_ties_are_neither_good_nor_bad() -> None:
    text = check_ties(nn.Linear(2, 2))._repr_html_()
    assert "no ties" in text
    assert colour_of_the_verdict(text) == Tone.NEUTRAL


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.1)."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("ground", ["#ffffff", "#111111"], ids=["light", "dark"])
@pytest.mark.parametrize("tone", Tone, ids=lambda tone: tone.name)
def test_colours_can_be_read_on_light_and_on_dark(tone: Tone, ground: str) -> None:
    dark, light = sorted((luminance(tone), luminance(ground)))
    assert (light + 0.05) / (dark + 0.05) >= 4
