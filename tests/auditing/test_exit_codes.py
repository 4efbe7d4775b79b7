"""The command line: 0 clean, 1 findings, 2 could not run; an error is one line with a help, and nothing is written."""

from __future__ import annotations

import errno
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from bowline.auditing.rules import Rule, Severity, all_rules
from bowline.cli import app
from tests.checkpoint.pickled import name, saved
from tests.checkpoints import GPT2, HEAD, OWN, WTE, shards, snapshot, table, tied_gpt2, write

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
ERROR = re.compile(r"^error: [^\n]+ \(help: [^\n]+\)$", re.MULTILINE)
RUNNER = CliRunner()


def bowline(*arguments: str | Path) -> Result:
    result = RUNNER.invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def in_a_process(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bowline", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


# --- 0 and 1 --------------------------------------------------------------------------------------------------------


def test_a_clean_checkpoint_is_0(tmp_path: Path) -> None:
    result = bowline("audit", tied_gpt2(tmp_path))
    assert result.exit_code == 0
    assert result.output.endswith("Nothing found in 1 checkpoint.\n")


def test_information_alone_is_0(tmp_path: Path) -> None:
    untied = {**GPT2, "tie_word_embeddings": False}
    result = bowline("audit", write(tmp_path, {WTE: table(), HEAD: table()}, untied))
    assert result.exit_code == 0
    assert "BW112" in result.output


def test_information_is_shown_with_verbose_and_where_its_code_is_selected(tmp_path: Path) -> None:
    path = write(tmp_path, {WTE: table(), HEAD: table()}, {**GPT2, "tie_word_embeddings": False})
    brief = bowline("audit", path).output
    assert "1 informational finding (`bowline audit --verbose` shows it): BW112 untied-but-equal" in brief
    assert "in every value" not in brief
    assert "BW112 information: lm_head.weight equals" in bowline("audit", path, "--verbose").output
    assert "BW112 information: lm_head.weight equals" in bowline("audit", path, "--select", "BW1").output


def test_a_warning_is_1(tmp_path: Path) -> None:
    assert bowline("audit", write(tmp_path, {WTE: table(), HEAD: table()}, GPT2)).exit_code == 1


def test_findings_that_are_ignored_are_0(tmp_path: Path) -> None:
    path = write(tmp_path, {WTE: table(), HEAD: OWN}, GPT2)
    assert bowline("audit", path, "--ignore", "BW101").exit_code == 0
    assert bowline("audit", path, "--select", "BW2,bw3").exit_code == 0
    assert bowline("audit", path, "--select", "BW1").exit_code == 1


def test_of_several_places_the_worst_counts(tmp_path: Path) -> None:
    clean, broken = tied_gpt2(tmp_path / "a"), write(tmp_path / "b", {WTE: table(), HEAD: OWN}, GPT2)
    assert bowline("audit", clean, broken).exit_code == 1
    result = bowline("audit", clean, tmp_path / "gone", broken)
    assert result.exit_code == 2
    assert "BW101" in result.output  # what could be audited is still said


# --- 2: directories that cannot be audited --------------------------------------------------------------------------


def empty(path: Path) -> None:
    pass


def empty_file(path: Path) -> None:
    (path / "model.safetensors").touch()


def truncated(path: Path) -> None:
    os.truncate(tied_gpt2(path) / "model.safetensors", 500)


def longer(path: Path) -> None:
    with (tied_gpt2(path) / "model.safetensors").open("ab") as file:
        file.write(b"\0")


def git_lfs_pointer(path: Path) -> None:
    (path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")


def html_page(path: Path) -> None:
    (path / "model.safetensors").write_text("<!DOCTYPE html><html>not found</html>")


def unsafe_pickle(path: Path) -> None:
    (path / "pytorch_model.bin").write_bytes(saved(name("os", "system")))


def old_pickle(path: Path) -> None:
    (path / "pytorch_model.bin").write_bytes(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")


def malformed_index(path: Path) -> None:
    (path / INDEX).write_text("{")


def index_of_nonsense(path: Path) -> None:
    (path / INDEX).write_text('{"weight_map": {"a": 1}}')


def every_shard_malformed(path: Path) -> None:
    shards(path, {FIRST: {WTE: table()}, SECOND: {HEAD: OWN}})
    (path / FIRST).write_bytes(b"x")
    (path / SECOND).write_bytes(b"")


def every_shard_missing(path: Path) -> None:
    shards(path, {}, {WTE: FIRST})


def every_shard_outside(path: Path) -> None:
    shards(path, {}, {WTE: "/etc/passwd", HEAD: "../x.safetensors"})


def link_out(path: Path) -> None:
    outside = write(path.parent / "outside", {WTE: table()}) / "model.safetensors"
    (path / "model.safetensors").symlink_to(outside)


def link_loop(path: Path) -> None:
    (path / "model.safetensors").symlink_to("model.safetensors")


def broken_link(path: Path) -> None:
    (path / "model.safetensors").symlink_to("gone")


def fifo(path: Path) -> None:
    os.mkfifo(path / "model.safetensors")


def link_to_a_device(path: Path) -> None:
    (path / "model.safetensors").symlink_to("/dev/zero")


def folder_for_a_file(path: Path) -> None:
    (path / "model.safetensors").mkdir()


def two_candidates(path: Path) -> None:
    write(path, {WTE: table()}, name="a.safetensors")
    write(path, {WTE: table()}, name="b.safetensors")


HOSTILE = [
    empty, empty_file, truncated, longer, git_lfs_pointer, html_page, unsafe_pickle, old_pickle, malformed_index,
    index_of_nonsense, every_shard_malformed, every_shard_missing, every_shard_outside, link_out, link_loop,
    broken_link, fifo, link_to_a_device, folder_for_a_file, two_candidates,
]  # fmt: skip


@pytest.mark.parametrize("make", HOSTILE, ids=lambda make: make.__name__)
@pytest.mark.parametrize("options", [(), ("--fix",)], ids=["read", "fix"])
def test_a_directory_that_cannot_be_audited_is_2_with_one_line_and_untouched(
    tmp_path: Path, make: Callable[[Path], None], options: tuple[str, ...]
) -> None:
    path = tmp_path / "model"
    path.mkdir()
    make(path)
    before = snapshot(tmp_path)
    result = bowline("audit", path, *options, "--output-format", "concise")
    assert result.exit_code == 2
    assert len(ERROR.findall(result.output)) == 1
    assert result.output.count("\n") == 2  # the error and the footer
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    "make", [fifo, link_to_a_device, link_loop, broken_link, folder_for_a_file], ids=lambda m: m.__name__
)
def test_the_file_itself_given_is_2_as_well(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path)
    result = bowline("audit", tmp_path / "model.safetensors", "--output-format", "concise")
    assert result.exit_code == 2
    assert len(ERROR.findall(result.output)) == 1


@pytest.mark.parametrize("inside", ["", "/", "/model.safetensors"], ids=["directory", "slash", "file"])
@pytest.mark.parametrize("make", [empty, truncated, html_page, unsafe_pickle, link_out], ids=lambda m: m.__name__)
def test_an_error_says_once_which_of_several_places_it_is_about(
    tmp_path: Path, make: Callable[[Path], None], inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken").mkdir()
    make(tmp_path / "broken")
    tied_gpt2(tmp_path / "whole")
    monkeypatch.chdir(tmp_path)
    for broken in ("broken", "./broken"):
        audited = ("audit", "whole", f"{broken}{inside}", "--output-format")
        (line,) = ERROR.findall(bowline(*audited, "concise").output)
        record = json.loads(bowline(*audited, "sarif").output)
        (told,) = record["runs"][0]["invocations"][0]["toolExecutionNotifications"]
        for text in (line, told["message"]["text"]):
            assert text.removeprefix("error: ").startswith((broken, "broken"))
            assert text.count("broken") == 1


def test_a_place_is_said_once_where_rows_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tied_gpt2(tmp_path / "broken")
    preadv = os.preadv
    monkeypatch.setattr(
        "bowline.checkpoint.places.byte_source.os.preadv", lambda fd, b, at: preadv(fd, b, at) if at <= 8 else 0
    )
    (line,) = ERROR.findall(bowline("audit", path).output)
    assert line.startswith(f"error: {path}: model.safetensors: ")


def test_a_directory_that_loops_is_2(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert bowline("audit", tmp_path / "loop").exit_code == 2


def test_the_process_itself_says_one_line_and_no_traceback(tmp_path: Path) -> None:
    empty_file(tmp_path)
    done = in_a_process("audit", tmp_path)
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout.startswith(f"error: {tmp_path}: model.safetensors: 0 bytes")
    assert "Traceback" not in done.stdout


def no_permission(*_: object, **__: object) -> int:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_files_without_permission_are_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tied_gpt2(tmp_path)
    monkeypatch.setattr("bowline.checkpoint.places.byte_source.os.open", no_permission)
    result = bowline("audit", tmp_path)
    assert result.exit_code == 2
    assert "cannot be read: Permission denied (help: " in result.output


@pytest.mark.parametrize("failing", [no_permission, lambda *_: 0], ids=["error", "no-bytes"])
def test_a_disk_that_fails_while_rows_are_read_is_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: Callable[..., int]
) -> None:
    tied_gpt2(tmp_path)
    preadv = os.preadv
    reads = []

    def fail_later(fd: int, buffers: list[memoryview], at: int) -> int:
        reads.append(at)
        return preadv(fd, buffers, at) if at <= 8 else failing()  # the header's length, and the header

    monkeypatch.setattr("bowline.checkpoint.places.byte_source.os.preadv", fail_later)
    result = bowline("audit", tmp_path)
    assert result.exit_code == 2
    assert max(reads) > 8
    assert ERROR.search(result.output)


def test_a_file_truncated_between_headers_and_rows_is_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evidence: Any = importlib.import_module("bowline.auditing.evidence_gathering")
    tied_gpt2(tmp_path)
    resolve = evidence.declaration_of

    def cut_then_resolve(*arguments: object) -> object:
        os.truncate(tmp_path / "model.safetensors", 400)
        return resolve(*arguments)

    monkeypatch.setattr(evidence, "declaration_of", cut_then_resolve)
    result = bowline("audit", tmp_path)
    assert result.exit_code == 2
    assert "but the file has 400" in result.output


def test_json_and_sarif_carry_the_failure_and_stay_json(tmp_path: Path) -> None:
    record = json.loads(bowline("audit", tmp_path, "--output-format", "json").output)
    assert [set(failure) for failure in record["failures"]] == [{"path", "message", "help"}]
    record = json.loads(bowline("audit", tmp_path, "--output-format", "sarif").output)
    assert record["runs"][0]["invocations"][0]["executionSuccessful"] is False


# --- 2: words that mean nothing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [("audit",), ("audit", ".", "--output-format", "xml"), ("audit", "--wrong", "."), ("wrong",)],
)
def test_a_wrong_use_is_2(arguments: tuple[str, ...]) -> None:
    assert bowline(*arguments).exit_code == 2


@pytest.mark.parametrize(
    "arguments", [("audit", ".", "--select", "X9"), ("explain", "BW999"), ("audit", ".", "--ignore", "W")]
)
def test_a_wrong_code_is_2_with_one_line(arguments: tuple[str, ...]) -> None:
    done = in_a_process(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert ERROR.fullmatch(done.stderr.strip())


def test_a_reader_that_has_seen_enough_is_no_traceback(tmp_path: Path) -> None:
    script = f"{sys.executable} -m bowline explain | head -c 1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert "Traceback" not in done.stderr


# --- --fix ----------------------------------------------------------------------------------------------------------


def test_a_fix_that_mends_everything_is_0(tmp_path: Path) -> None:
    result = bowline("audit", write(tmp_path, {WTE: table(), HEAD: OWN}, GPT2), "--fix")
    assert result.exit_code == 0
    assert "tie_word_embeddings: true -> false" in result.stderr


def test_a_refused_edit_is_1_and_the_report_is_still_given(tmp_path: Path) -> None:
    path = write(tmp_path, {WTE: table(), HEAD: OWN}, GPT2)
    os.link(path / "config.json", path / "second-name.json")
    before = snapshot(path)
    result = bowline("audit", path, "--fix")
    assert result.exit_code == 1
    assert "BW101" in result.stdout
    assert ERROR.search(result.stderr)
    assert snapshot(path) == before


def test_an_audit_without_fix_writes_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, {WTE: table(), HEAD: OWN}, {**GPT2, "pad_token_id": 3})
    before = snapshot(path)
    for form in ("full", "concise", "json", "sarif"):
        assert bowline("audit", path, "--output-format", form).exit_code == 1
    assert snapshot(path) == before


# --- explain --------------------------------------------------------------------------------------------------------


def test_explain_prints_the_page_of_a_code_in_either_case() -> None:
    result = bowline("explain", "bw101")
    assert result.exit_code == 0
    assert result.output.startswith("BW101 tied-but-diverged (error)\n\n")
    assert "Fix: `bowline audit --fix`" in result.output


def test_explain_without_a_code_lists_all_of_them() -> None:
    lines = bowline("explain").output.splitlines()
    assert [line[:5] for line in lines] == [rule.code for rule in all_rules()]
    words = {line[:5]: line[7:30].strip() for line in lines}
    assert (words["BW101"], words["BW113"], words["BW204"]) == ("error", "information", "information or warning")
    assert bowline("explain", "BW204").output.startswith("BW204 padding-row (information or warning)\n")


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.code)
def test_explain_says_every_severity_that_a_rule_gives(rule: Rule) -> None:
    body = inspect.getsource(rule.check).partition("\ndef ")[2]
    assert {Severity[name] for name in re.findall(r"Severity\.(\w+)", body)} == {rule.also} - {None}


def test_the_version_is_printed() -> None:
    from bowline import __version__

    first, second = bowline("--version").output.splitlines()
    assert first == f"bowline {__version__}"
    assert second.startswith("tables of transformers 4.57.1, transformers 5.23.0, ")


# --- directories of checkpoints -------------------------------------------------------------------------------------


def test_recursive_audits_each_checkpoint_below_a_directory(tmp_path: Path) -> None:
    tied_gpt2(tmp_path / "checkpoint-500")
    write(tmp_path / "checkpoint-1000", {WTE: table(), HEAD: OWN}, GPT2)
    alone = bowline("audit", tmp_path)
    assert alone.exit_code == 2
    assert "2 checkpoints below: checkpoint-500, checkpoint-1000 (help: give one of them; `bowline" in alone.output
    result = bowline("audit", tmp_path, "--recursive", "--output-format", "json")
    assert result.exit_code == 1
    paths = [Path(checkpoint["path"]).name for checkpoint in json.loads(result.output)["checkpoints"]]
    assert paths == ["checkpoint-500", "checkpoint-1000"]


def test_recursive_reports_an_adapter_and_a_place_without_checkpoints_as_failures(tmp_path: Path) -> None:
    tied_gpt2(tmp_path / "model")
    lora = {"base_model.model.lm_head.lora_A.weight": OWN}
    write(tmp_path / "adapter", lora, name="adapter_model.safetensors", files={"adapter_config": {}})
    result = bowline("audit", tmp_path, "--recursive")
    assert result.exit_code == 2
    assert "a PEFT adapter whose base is not stated" in result.output
    assert "Nothing found in 1 checkpoint. 1 path could not be audited." in result.output
    (tmp_path / "empty").mkdir()
    assert bowline("audit", tmp_path / "empty", "--recursive").exit_code == 2
    assert bowline("audit", tmp_path / "model" / "model.safetensors", "--recursive").exit_code == 0
