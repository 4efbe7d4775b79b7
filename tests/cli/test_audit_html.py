"""`bowline audit --html FILE`: which files and options it takes; no failure hides a report or leaves a file."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from bowline.checkpoint.formats.numpy_writer import save_safetensors
from bowline.cli import app
from bowline.errors import UsageError
from tests.checkpoints import GPT2, HEAD, OWN, WTE, table, tied_gpt2, write
from tests.page.parsed import parsed

RUNNER = CliRunner()


def audit(*arguments: str | Path) -> Result:
    return RUNNER.invoke(app, ["audit", *map(str, arguments)])


def refused(*arguments: str | Path) -> UsageError:
    """The error of a run that is refused."""
    error = audit(*arguments).exception
    assert isinstance(error, UsageError), error
    return error


def adapter(directory: Path) -> Path:
    directory.mkdir()
    names = [f"base_model.model.model.layers.0.self_attn.q_proj.lora_{letter}.weight" for letter in "AB"]
    save_safetensors(directory / "adapter_model.safetensors", dict(zip(names, (table(4, 8), table(8, 4)), strict=True)))
    stated = {"peft_type": "LORA", "base_model_name_or_path": "org/name", "r": 4, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(stated))
    return directory


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tied_gpt2(tmp_path / "model")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The place of the page, in a directory that holds nothing else."""
    (tmp_path / "pages").mkdir()
    return tmp_path / "pages" / "report.html"


# --- with other options ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("output_format", ["full", "concise", "json", "sarif"])
def test_the_report_is_printed_in_its_format_and_the_page_written(path: Path, file: Path, output_format: str) -> None:
    alone = audit(path, "--output-format", output_format)
    both = audit(path, "--output-format", output_format, "--html", file)
    assert (both.exit_code, both.stdout) == (alone.exit_code, alone.stdout) and both.stdout
    assert parsed(file.read_text()).all("h1") and list(file.parent.iterdir()) == [file]


def test_the_exit_code_is_that_of_the_findings(tmp_path: Path, file: Path) -> None:
    diverged = write(tmp_path / "diverged", {WTE: table(), HEAD: OWN}, GPT2)
    assert audit(diverged, "--html", file).exit_code == 1 and file.exists()


def test_headers_only_are_said(path: Path, file: Path) -> None:
    audit(path, "--html", file, "--headers-only")
    assert "Only headers were read" in parsed(file.read_text()).one("main").text


def test_chosen_rules_are_said(path: Path, file: Path) -> None:
    audit(path, "--html", file, "--select", "BW1,BW2", "--ignore", "BW101")
    assert "--select BW1,BW2 --ignore BW101" in parsed(file.read_text()).one("main").text


def test_the_page_is_about_the_mended_config(tmp_path: Path, file: Path) -> None:
    path = write(tmp_path / "model", {WTE: table(), HEAD: OWN}, GPT2)
    audit(path, "--fix", "--html", file)
    assert json.loads((path / "config.json").read_text())["tie_word_embeddings"] is False
    assert "BW101" not in parsed(file.read_text()).one("main").text


def test_one_checkpoint_below_a_directory_has_a_page(path: Path, file: Path) -> None:
    assert audit(path.parent, "--recursive", "--html", file).exit_code == 0 and file.exists()


@pytest.mark.parametrize("options", [["--output-format", "jsonl"], ["--card"]])
def test_output_without_a_page_is_refused(path: Path, file: Path, options: list[str]) -> None:
    error = refused(path, "--html", file, *options)
    assert "--html" in error.message and options[0] in error.message and error.help and not file.exists()


# --- of one checkpoint ----------------------------------------------------------------------------------------------


def test_two_paths_are_refused_before_one_is_read(tmp_path: Path, path: Path, file: Path) -> None:
    error = refused(path, tmp_path / "absent", "--html", file)
    assert f"not for 2: {path}, {tmp_path / 'absent'}" in error.message and error.help and not file.exists()


def test_several_checkpoints_below_a_directory_are_refused(tmp_path: Path, path: Path, file: Path) -> None:
    tied_gpt2(path.parent / "other")
    assert "not for 2" in refused(tmp_path, "--recursive", "--html", file).message


def test_an_adapter_is_refused_with_the_way_out(tmp_path: Path, file: Path) -> None:
    error = refused(adapter(tmp_path / "adapter"), "--html", file)
    assert "this is an adapter" in error.message and "bowline merge" in (error.help or "") and not file.exists()


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_a_checkpoint_that_cannot_be_read_is_reported_as_without_a_page(
    tmp_path: Path, file: Path, damage: str
) -> None:
    place = tmp_path / "model"
    if damage == "damaged":
        place.mkdir()
        (place / "model.safetensors").write_bytes(b"xx")
    alone, both = audit(place), audit(place, "--html", file)
    assert (both.exit_code, both.stdout) == (2, alone.stdout) and str(place) in both.stdout
    assert not file.exists()


# --- the file -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["report.HTML", "report.htm", "two words.html", "ü.html", "-x.html", "n" * 250 + ".html"]
)
def test_names_that_a_page_may_have(path: Path, file: Path, name: str) -> None:
    place = file.with_name(name)
    assert audit(path, "--html", place).exit_code == 0
    assert list(file.parent.iterdir()) == [place]


@pytest.mark.parametrize("name", [".", "..", "/", "", "report", "report.txt", ".html", "report.html.gz"])
def test_another_ending_is_refused_before_the_checkpoint_is_read(tmp_path: Path, name: str) -> None:
    error = refused(tmp_path / "absent", "--html", name)
    assert "expected a file name that ends in .html" in error.message and (error.help or "").endswith(".html")


def test_an_existing_page_is_replaced(path: Path, file: Path) -> None:
    file.write_text("old")
    audit(path, "--html", file)
    assert file.read_text().startswith("<!doctype html>")


def test_a_directory_with_the_name_of_a_page_is_refused(path: Path, file: Path) -> None:
    file.mkdir()
    assert "is a directory" in refused(path, "--html", file).message


def test_a_missing_directory_is_refused_and_not_made(path: Path, file: Path) -> None:
    place = file.parent / "none" / "report.html"
    assert "does not exist" in refused(path, "--html", place).message and not place.parent.exists()


def test_a_directory_that_cannot_be_written_is_refused(path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "cannot be written" in refused(path, "--html", file).message


def test_a_name_too_long_for_the_file_system_is_refused_before_the_checkpoint_is_read(
    tmp_path: Path, file: Path
) -> None:
    error = refused(tmp_path / "absent", "--html", file.with_name("n" * 300 + ".html"))
    assert "too long" in error.message and error.help


def test_a_full_disk_leaves_the_old_page_and_report(path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file.write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    result = audit(path, "--html", file)
    assert isinstance(result.exception, UsageError) and "No space left" in result.exception.message
    assert result.stdout == audit(path).stdout
    assert file.read_text() == "old" and list(file.parent.iterdir()) == [file]


def test_an_interrupt_leaves_no_part_of_a_page(path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stop)
    assert audit(path, "--html", file).exit_code != 0
    assert list(file.parent.iterdir()) == []
