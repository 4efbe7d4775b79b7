"""BW401 to BW404, BW408, BW409: unreadable or unknown parts of a model. Every rule has a page, a test, a near miss."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bowline.auditing import Severity
from bowline.auditing.audit_report import select_rules
from bowline.auditing.rules import all_rules
from bowline.auditing.rules.rule import rule
from bowline.errors import UsageError
from tests.checkpoints import BERT, GPT2, HEAD, UNKNOWN, WTE, codes, findings, one, table, tied_gpt2, write

CODES = [one_rule.code for one_rule in all_rules()]
SECTIONS = ("What:", "Why it hurts:", "Example:", "Fix:")
HERE = Path(__file__).parent
THREAD = re.compile(r"[\w.-]+/[\w.-]+#\d+")

# --- BW401 config-malformed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"a": 1,}', "\ufeff{}", '{"a": 1, "a": 2}', "null", "[" * 200, '{"a": 1e999}', '"\\ud800"']
)
def test_bw401_a_config_that_is_no_object(tmp_path: Path, text: str) -> None:
    found = one(write(tmp_path, {WTE: table()}, text or "\n"), "BW401")
    assert (found.severity, found.file, found.fixable) == (Severity.ERROR, "config.json", False)
    assert found.message.startswith("config.json: ")


def test_bw401_a_folder_in_place_of_the_config(tmp_path: Path) -> None:
    (write(tmp_path, {WTE: table()}) / "config.json").mkdir()
    assert codes(tmp_path) == ["BW401"]


def test_bw409_a_config_that_is_a_link_out_of_the_directory_is_read(tmp_path: Path) -> None:
    shared = write(tmp_path / "shared", {}, GPT2) / "config.json"
    (write(tmp_path / "model", {WTE: table()}) / "config.json").symlink_to(shared)
    found = one(tmp_path / "model", "BW409")
    assert found.message == "config.json is a link that leads out of the directory; it was read"
    assert codes(tmp_path / "model") == ["BW409"]
    shared.write_text("{")
    assert codes(tmp_path / "model") == ["BW401", "BW409"]


def test_bw409_is_not_said_of_a_link_within_the_directory(tmp_path: Path) -> None:
    model = write(tmp_path, {WTE: table()}, GPT2)
    (model / "config.json").rename(model / "kept.json")
    (model / "config.json").symlink_to("kept.json")
    assert codes(model) == []


def test_bw401_is_not_said_of_numbers_that_python_writes(tmp_path: Path) -> None:
    assert codes(tied_gpt2(tmp_path, time_step_limit=[0.0, float("inf")], other=float("nan"))) == []


# --- BW402 config-missing -------------------------------------------------------------------------------------------


def test_bw402_a_lone_file(tmp_path: Path) -> None:
    found = one(write(tmp_path, {WTE: table()}), "BW402")
    assert (found.severity, found.tensors, found.file) == (Severity.WARNING, (), None)


def test_bw402_is_not_said_when_the_config_is_there(tmp_path: Path) -> None:
    assert codes(tied_gpt2(tmp_path)) == []


# --- BW403 inferred -------------------------------------------------------------------------------------------------


def test_bw403_a_class_that_nobody_knows(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": table(), HEAD: table(seed=1)}
    found = one(write(tmp_path, tensors, {**UNKNOWN, "tie_word_embeddings": False}), "BW403")
    assert (found.severity, found.file) == (Severity.INFO, "config.json")
    assert "Bowline does not know HomemadeForCausalLM" in found.message
    assert "lm_head.weight <- model.embed_tokens.weight" in found.message


def test_bw403_no_class_but_a_known_family(tmp_path: Path) -> None:
    config = {key: value for key, value in GPT2.items() if key != "architectures"}
    assert codes(write(tmp_path, {WTE: table()}, config)) == ["BW403"]


def test_bw403_is_not_said_of_a_known_class(tmp_path: Path) -> None:
    assert "BW403" not in codes(write(tmp_path, {"bert.embeddings.word_embeddings.weight": table()}, BERT))


def test_bw403_is_not_said_where_there_is_no_config_to_name_a_class(tmp_path: Path) -> None:
    assert codes(write(tmp_path, {WTE: table()})) == ["BW402"]


# --- BW404 tokenizer-malformed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["tokenizer", "added_tokens", "vocab", "special_tokens_map"])
def test_bw404_a_pointer_in_place_of_the_file(tmp_path: Path, file: str) -> None:
    path = write(tmp_path, {WTE: table()}, GPT2, files={file: "version https://git-lfs.github.com/spec/v1\n"})
    found = one(path, "BW404")
    assert (found.severity, found.file, found.fixable) == (Severity.WARNING, f"{file}.json", False)


def test_bw404_a_tokenizer_that_is_a_link_out_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("{}")
    (tied_gpt2(tmp_path / "model") / "tokenizer.json").symlink_to(tmp_path / "secret.json")
    assert one(tmp_path / "model", "BW404").file == "tokenizer.json"


@pytest.mark.parametrize("content", [{}, {"model": []}, {"model": {"vocab": 3}, "added_tokens": {}}, [1, 2]])
def test_bw404_is_not_said_of_json_of_any_kind(tmp_path: Path, content: object) -> None:
    assert codes(write(tmp_path, {WTE: table()}, GPT2, files={"tokenizer": content})) == []


# --- BW408 generation-config-malformed ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"pad_token_id": 0,}', "not JSON at character"),
        ("version https://git-lfs.github.com/spec/v1\n", "not JSON at character"),
        ("[]", "holds a list, expected an object"),
        ("null", "holds null, expected an object"),
    ],
)
def test_bw408_a_generation_config_that_is_no_object(tmp_path: Path, text: str, why: str) -> None:
    (tied_gpt2(tmp_path) / "generation_config.json").write_text(text)
    found = one(tmp_path, "BW408")
    assert (found.severity, found.file, found.fixable) == (Severity.WARNING, "generation_config.json", False)
    assert found.message.startswith("generation_config.json: ")
    assert why in found.message
    assert codes(tmp_path, values=False) == ["BW408"]


def test_bw408_a_generation_config_that_is_a_link_out_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("{}")
    (tied_gpt2(tmp_path / "model") / "generation_config.json").symlink_to(tmp_path / "secret.json")
    assert "leads out of the directory" in one(tmp_path / "model", "BW408").message


def test_bw408_is_not_said_of_an_object_or_of_none(tmp_path: Path) -> None:
    assert codes(tied_gpt2(tmp_path / "a")) == []
    (tied_gpt2(tmp_path / "b") / "generation_config.json").write_text('{"temperature": Infinity}')
    assert codes(tmp_path / "b") == []


# --- all rules ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", CODES)
def test_every_code_has_a_test_and_a_near_miss(code: str) -> None:
    tests = "".join(path.read_text() for path in HERE.glob("test_rules_*.py"))
    named = re.findall(rf"^def test_{code.lower()}_(\w+)", tests, re.MULTILINE)
    misses = [name for name in named if name.startswith("is_not_said")]
    assert misses
    assert len(named) > len(misses)


@pytest.mark.parametrize("code", CODES)
def test_every_page_has_its_sections_in_order_and_names_threads_as_owner_repo_number(code: str) -> None:
    (described,) = select_rules([code])
    positions = [described.page.find(f"\n{section}") for section in SECTIONS]
    assert -1 not in positions
    assert positions == sorted(positions)
    assert described.summary.endswith(".")
    _, _, threads = described.page.partition("\nReported in: ")
    assert all(THREAD.fullmatch(thread.strip()) for thread in threads.split(",") if threads)


def test_codes_and_names_are_unique_and_sorted() -> None:
    assert sorted(set(CODES)) == CODES
    assert len({one_rule.name for one_rule in all_rules()}) == len(CODES)


def test_a_code_is_given_once() -> None:
    with pytest.raises(ValueError, match="BW101 is tied-but-diverged already"):
        rule("BW101", "again", Severity.INFO)(lambda evidence: [])


def test_select_and_ignore_take_beginnings_in_either_case() -> None:
    ignored = ["BW403", "bw404", "BW405", "BW406", "BW407", "BW408", "BW409"]
    assert [chosen.code for chosen in select_rules(["bw40"], ignored)] == ["BW401", "BW402"]
    assert len(select_rules([], ["BW"])) == 0


@pytest.mark.parametrize("wrong", ["BW9", "X", "", "BW1011"])
def test_a_beginning_that_no_code_has_is_an_error(wrong: str) -> None:
    with pytest.raises(UsageError, match="matches no rule, expected a code such as BW101 or a prefix such as BW2"):
        select_rules([wrong])


def test_findings_come_with_errors_first(tmp_path: Path) -> None:
    path = write(
        tmp_path, {WTE: table(63)}, {**GPT2, "vocab_size": 63, "tie_word_embeddings": False, "eos_token_id": 99}
    )
    assert [found.code for found in findings(path)] == ["BW102", "BW203", "BW209"]
