"""`bowline compare BEFORE AFTER [--html FILE]`: its places, its exit codes, and the file of its page."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from typer.testing import CliRunner, Result

from bowline.cli import app
from bowline.errors import BowlineError, UsageError
from tests.checkpoint.gguf_files import EMBEDDING, gguf_file, q8_0, vocabulary
from tests.checkpoints import GPT2, LLAMA, WTE, shards, table, tied_gpt2, write
from tests.cli.test_audit_html import adapter
from tests.page.parsed import parsed

RUNNER = CliRunner()
SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "compare.schema.json").read_text())


def compare(*arguments: str | Path) -> Result:
    return RUNNER.invoke(app, ["compare", *map(str, arguments)])


def refused(*arguments: str | Path) -> BowlineError:
    """The error of a run that is refused; every error has a way out."""
    error = compare(*arguments).exception
    assert isinstance(error, BowlineError) and error.help, error
    return error


@pytest.fixture
def before(tmp_path: Path) -> Path:
    return tied_gpt2(tmp_path / "before")


@pytest.fixture
def after(tmp_path: Path) -> Path:
    return write(tmp_path / "after", {WTE: 2 * table()}, GPT2)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The place of the page, in a directory that holds nothing else."""
    (tmp_path / "pages").mkdir()
    return tmp_path / "pages" / "report.html"


# --- places ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path, "no such file or directory"),
        (adapter, "a PEFT adapter"),
        (lambda path: write(path, {}, None, name="other.txt"), "expected"),
    ],
)
def test_a_place_without_a_checkpoint_is_named(
    side: int, make: Callable[[Path], Path], message: str, tmp_path: Path, before: Path
) -> None:
    place = make(tmp_path / "odd")
    error = refused(*((place, before) if side == 0 else (before, place)))
    assert str(place) in error.message and message in error.message


def test_a_damaged_file_is_named(tmp_path: Path, before: Path) -> None:
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "model.safetensors").write_bytes(b"xx")
    assert "odd" in refused(before, tmp_path / "odd").message


def test_files_and_directories_can_be_mixed(before: Path, after: Path) -> None:
    assert compare(before, before / "model.safetensors").exit_code == 0
    assert compare(before / "model.safetensors", after).exit_code == 1


def test_shards_are_compared_with_one_file(tmp_path: Path, before: Path) -> None:
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    split = shards(tmp_path / "split", {names[0]: {WTE: table()}, names[1]: {"x": table(2, 2)}})
    assert compare(before, split).exit_code == 0


def test_the_names_of_two_families_can_differ(tmp_path: Path, before: Path) -> None:
    tied = {**LLAMA, "tie_word_embeddings": True}
    result = compare(before, write(tmp_path / "llama", {"model.embed_tokens.weight": table()}, tied))
    assert result.exit_code == 0 and f"{WTE} and model.embed_tokens.weight" in result.stdout


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_gguf_is_compared_with_what_it_was_converted_from(kind: str, tmp_path: Path) -> None:
    values = table(128, 64)
    before = write(tmp_path / "model", {"model.embed_tokens.weight": values}, {**LLAMA, "tie_word_embeddings": True})
    after = tmp_path / "model.gguf"
    after.write_bytes(gguf_file({EMBEDDING: values if kind == "F32" else q8_0(values)}, vocabulary(128)))
    result = compare(before, after, "--output-format", "json")
    (end,) = json.loads(result.stdout)["ends"]
    assert (end["ends"], end["after"]["dtype"]) == (["embedding", "head"], kind)
    if kind == "F32":
        assert result.exit_code == 0 and end["moved"] == 0
    else:  # each block of 32 values has 255 steps
        assert end["moved"] == 128 and 0.001 < end["median_relative_change"] < 0.02


def test_a_directory_of_several_gguf_files_names_them(tmp_path: Path, before: Path) -> None:
    (tmp_path / "odd").mkdir()
    for name in ("one.gguf", "two.gguf"):
        (tmp_path / "odd" / name).write_bytes(gguf_file({EMBEDDING: table(128, 64)}, vocabulary(128)))
    error = refused(before, tmp_path / "odd")
    assert "one.gguf" in str(error) and "two.gguf" in str(error)


@pytest.mark.parametrize("sides", ["one", "both"])
def test_a_quantised_table_is_not_compared_and_its_rows_are_not_gone(sides: str, tmp_path: Path, file: Path) -> None:
    values = table(64, 32)
    plain = write(tmp_path / "plain", {"model.embed_tokens.weight": values}, {**LLAMA, "tie_word_embeddings": True})
    quantised = tmp_path / "quantised"
    made = RUNNER.invoke(app, ["quantize", str(plain), str(quantised), "--dtype", "int8"])
    assert made.exit_code == 0, made.output
    result = compare(plain if sides == "one" else quantised, quantised, "--html", file)
    assert result.exit_code == 1 and "only before" not in result.stdout and "64 paired by id" in result.stdout
    said = "model.embed_tokens.weight is stored as torchao int8, a scale per row, and only floating-point tables"
    assert f"embedding and head: after, {said} are compared" in result.stdout
    assert result.stdout.endswith("Not all rows were compared.\n")
    page = parsed(file.read_text())
    assert page.one("h1").text == "No row was compared" and said in page.one("main").text
    found = json.loads(compare(plain, quantised, "--output-format", "json").stdout)
    Draft202012Validator(SCHEMA).validate(found)
    assert len(found["quantised"]) == 1 and found["only_before"] == []


# --- output ---------------------------------------------------------------------------------------------------------


def test_the_exit_code_says_whether_rows_differ(before: Path, after: Path) -> None:
    assert compare(before, before).exit_code == 0
    assert compare(before, after).exit_code == 1


@pytest.mark.parametrize("output_format", ["full", "json"])
def test_the_report_is_printed_and_the_page_written(before: Path, after: Path, file: Path, output_format: str) -> None:
    alone = compare(before, after, "--output-format", output_format)
    both = compare(before, after, "--output-format", output_format, "--html", file)
    assert (both.exit_code, both.stdout) == (alone.exit_code, alone.stdout)
    assert parsed(file.read_text()).one("h1").text == "64 of 64 rows moved" and list(file.parent.iterdir()) == [file]
    if output_format == "json":
        assert json.loads(both.stdout)["ends"][0]["moved"] == 64


def test_another_format_is_refused(before: Path) -> None:
    result = compare(before, before, "--output-format", "sarif")
    assert result.exit_code == 2 and "'sarif' is not one of" in result.stderr


# --- the page's file ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [".", "", "report", "report.txt", "none/report.html"])
def test_a_place_for_no_page_is_refused_before_a_checkpoint_is_read(name: str, tmp_path: Path) -> None:
    assert refused(tmp_path / "absent", tmp_path / "absent", "--html", name).message.startswith(str(Path(name)))


def test_a_full_disk_leaves_the_old_page_and_the_report(
    before: Path, after: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file.write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    result = compare(before, after, "--html", file)
    assert isinstance(result.exception, UsageError) and "No space left" in result.exception.message
    assert result.stdout == compare(before, after).stdout
    assert file.read_text() == "old" and list(file.parent.iterdir()) == [file]


def test_an_interrupt_leaves_no_part_of_a_page(
    before: Path, after: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stop)
    assert compare(before, after, "--html", file).exit_code not in (0, 1)
    assert list(file.parent.iterdir()) == []
