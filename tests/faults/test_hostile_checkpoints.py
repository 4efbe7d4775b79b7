"""What a hostile or broken checkpoint, or a broken terminal, does to an audit: never a traceback, never without end."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import bowline
from bowline.auditing import AuditReport
from bowline.auditing.config_fix import fix_config
from bowline.auditing.difference import explain_difference
from bowline.auditing.row_scan import scan_tables
from bowline.checkpoint import open_checkpoint
from bowline.checkpoint.durable.file_replacement import replace_file
from bowline.checkpoint.formats.json_edit import set_values
from bowline.cli import app
from bowline.errors import BowlineError, ConfigError, FormatError
from bowline.tie import TieState
from tests.checkpoints import GPT2, HEAD, OWN, UNKNOWN, WTE, one, shards, snapshot, table, tied_gpt2, write

ERROR = re.compile(r"^error: [^\n]+ \(help: [^\n]+\)$", re.MULTILINE)
FORMS = ("full", "concise", "json", "sarif")
ESCAPE = "\x1b[31m"
SECONDS = 60


def bowline_audit(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(app, ["audit", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "bowline", "audit", *map(str, arguments)]


def sparse(directory: Path, shapes: Mapping[str, tuple[str, tuple[int, ...]]], config: object = GPT2) -> Path:
    """A checkpoint of zeros that take no room on disk."""
    directory.mkdir(parents=True, exist_ok=True)
    header, end = {}, 0
    for name, (dtype, shape) in shapes.items():
        begin, end = end, end + math.prod(shape) * {"F32": 4, "I8": 1, "BF16": 2}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def both(dtype: str, shape: tuple[int, ...]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {WTE: (dtype, shape), HEAD: (dtype, shape)}


# --- shapes that no model has ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["F32", "BF16", "I8"])
@pytest.mark.parametrize("shape", [(1 << 40, 0), (0, 1 << 40), (64, 0), (0, 8), (0,)])
def test_tables_without_a_value_cost_nothing(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    report: AuditReport = bowline.audit(sparse(tmp_path, both(dtype, shape)))
    assert report.evidence.tie(HEAD).state is TieState.EQUAL


@pytest.mark.parametrize("dtype", ["F32", "I8"])
@pytest.mark.parametrize("shape", [(1 << 25, 1), (1 << 25,), (2, 1 << 23)])
def test_tables_beyond_any_vocabulary_are_refused_before_memory_is_taken(
    tmp_path: Path, dtype: str, shape: tuple[int, ...]
) -> None:
    path = sparse(tmp_path, both(dtype, shape))
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=re.escape(str(list(shape)))) as refusal:
            bowline.audit(path)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert "--headers-only" in str(refusal.value.help)
    assert bowline.audit(path, values=False).evidence.tie(HEAD).state is None


def test_wide_rows_are_compared_on_some_columns_alone(tmp_path: Path) -> None:
    path = sparse(tmp_path, both("F32", (64, 1 << 19)))
    with (path / "model.safetensors").open("r+b") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        for row in range(64):
            file.seek(start + row * (4 << 19))
            file.write(np.float32(1 + row / 64).tobytes())
    with open_checkpoint(path) as checkpoint:
        source, target = checkpoint.tensors[WTE], checkpoint.tensors[HEAD]
        scan = scan_tables(checkpoint, source, [target])
        tracemalloc.start()
        try:
            difference = explain_difference(checkpoint, scan.pairs[0], source)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert difference is not None
    assert difference.rows_differing == 64
    assert peak < 64 << 20  # the rows themselves are 256 MiB


def test_an_index_of_more_shards_than_any_model_has_is_refused(tmp_path: Path) -> None:
    weight_map = {f"tensor.{number}": f"{number}.safetensors" for number in range(200_000)}
    result = bowline_audit(shards(tmp_path, {"0.safetensors": {WTE: table()}}, weight_map))
    assert result.exit_code == 2
    assert ERROR.fullmatch(result.stdout.splitlines()[0])
    assert "200000 files" in result.stdout


def test_thousands_of_wrong_ids_and_levels_make_a_short_message(tmp_path: Path) -> None:
    ids = {f"some{number}_token_id": -1 for number in range(5000)}
    levels = {f"level{number}": {"vocab_size": 64, "tie_word_embeddings": False} for number in range(5000)}
    path = write(tmp_path, {WTE: table(), HEAD: OWN}, {**GPT2, **ids, **levels})
    for code in ("BW203", "BW104"):
        finding = one(path, code)
        assert len(finding.message) < 1000
        assert "more" in finding.message


def test_thousands_of_levels_are_fixed_in_one_pass() -> None:
    text = json.dumps({f"level{number}": {"vocab_size": 64, "tie": True} for number in range(20_000)})
    started = time.monotonic()
    fixed = json.loads(set_values(text, {f"level{number}.tie": False for number in range(20_000)}))
    assert time.monotonic() - started < 20  # the square of it took many minutes
    assert not any(level["tie"] for level in fixed.values())


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_an_index_asked_for_by_name_may_have_shards_in_folders(tmp_path: Path, form: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "b.safetensors").write_bytes(b"short")
    files = {WTE: "a.safetensors", HEAD: "folder/b.safetensors"}
    shards(tmp_path, {"a.safetensors": {WTE: table()}}, files)
    result = bowline_audit(tmp_path / "model.safetensors.index.json", "--output-format", form)
    assert result.exit_code == 1
    if form == "concise":
        assert f"{tmp_path}/folder/b.safetensors: BW308" in result.stdout


def test_fix_tells_of_hostile_names_without_obeying_them(tmp_path: Path) -> None:
    level = {"vocab_size": 64, "tie_word_embeddings": True}
    config = {**UNKNOWN, "tie_word_embeddings": True, f"{ESCAPE}one\ntwo\u202e": level}
    path = write(tmp_path / f"a\n{ESCAPE}", {"embed.weight": table(), "lm_head.weight": OWN}, config)
    result = bowline_audit(path, "--fix")
    assert all(line.isprintable() for line in result.stderr.splitlines())
    assert "\\x1b[31mone\\ntwo\\u202e.tie_word_embeddings: true -> false" in result.stderr
    (path / ".bowline").rename(tmp_path / "away")
    (path / ".bowline").write_text("no directory")
    write(path, {"embed.weight": table(), "lm_head.weight": OWN}, config)
    refused = bowline_audit(path, "--fix").stderr
    assert ERROR.fullmatch(refused.strip())
    assert refused.strip().isprintable()


# --- terminals, pipes and disks -------------------------------------------------------------------------------------


def test_output_that_cannot_spell_a_name_writes_it_out(tmp_path: Path) -> None:
    path = tied_gpt2(tmp_path / "\u6f22")
    done = subprocess.run(
        command(path),
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"},
        timeout=SECONDS,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\u6f22: one matrix" in done.stdout


def test_a_locale_that_cannot_spell_a_shard_says_so(tmp_path: Path) -> None:
    path = shards(tmp_path, {"a.safetensors": {WTE: table()}, "\u6f22.safetensors": {HEAD: table()}})
    done = subprocess.run(
        command(path, "--output-format", "sarif"),
        capture_output=True,
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        timeout=SECONDS,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, b"")
    assert b"in this locale" in done.stdout


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")  # noqa: PTH110
def test_a_full_disk_under_the_report_is_one_line_and_2(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            command(tied_gpt2(tmp_path)), stdout=full, stderr=subprocess.PIPE, text=True, timeout=SECONDS, check=False
        )
    assert done.returncode == 2
    assert ERROR.fullmatch(done.stderr.strip())


@pytest.mark.parametrize("form", FORMS)
def test_a_reader_that_has_gone_is_141_and_silence(tmp_path: Path, form: str) -> None:
    read, write_end = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            command(tied_gpt2(tmp_path), "--output-format", form),
            stdout=write_end,
            stderr=subprocess.PIPE,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("closed", [1, 2])
def test_a_closed_stream_does_not_change_the_verdict(tmp_path: Path, closed: int) -> None:
    path = write(tmp_path, {WTE: table(), HEAD: OWN}, GPT2)
    for arguments, expected in (((path,), 1), ((path, "--fix"), 0), ((path,), 0)):
        done = subprocess.run(command(*arguments), preexec_fn=lambda: os.close(closed), timeout=SECONDS, check=False)
        assert done.returncode == expected


def test_an_interrupt_ends_a_long_read_soon(tmp_path: Path) -> None:
    path = sparse(tmp_path, both("F32", (1 << 20, 1 << 16)))  # 512 GiB of zeros: hours

    def heeding() -> None:  # a shell starts what runs in the background deaf to it, the tests perhaps
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command(path), preexec_fn=heeding, **pipes) as process:
        try:
            time.sleep(3)
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=20)
        finally:
            process.kill()
    assert (process.returncode, output) == (130, "")
    assert "Traceback" not in errors


# --- --fix ----------------------------------------------------------------------------------------------------------


def test_a_stranger_under_the_name_of_the_staged_file_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tied_gpt2(tmp_path) / "config.json"
    before = path.read_bytes()
    monkeypatch.setattr(secrets, "token_hex", lambda size: "0" * 2 * size)
    stranger = tmp_path / f".config.json.{os.getpid()}-00000000.tmp"
    stranger.write_text("not ours")
    with pytest.raises(ConfigError, match="cannot be replaced"):
        replace_file(path, b"{}", why="a test")
    assert (stranger.read_text(), path.read_bytes()) == ("not ours", before)


def test_what_a_killed_run_left_does_not_stop_the_next_one_of_its_number(tmp_path: Path) -> None:
    path = write(tmp_path, {WTE: table(), HEAD: OWN}, GPT2)
    left = tmp_path / f".config.json.{os.getpid()}.tmp"
    left.write_text("half")
    assert len(fix_config(bowline.audit(path))) == 2
    assert left.read_text() == "half"


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_disk_that_fills_up_before_the_change_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    path = write(tmp_path, {WTE: table(), HEAD: OWN}, GPT2)
    before, synchronise, calls = snapshot(path), os.fsync, []

    def full_at(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == at:
            raise OSError(errno.ENOSPC, "No space left on device")
        synchronise(descriptor)

    monkeypatch.setattr(os, "fsync", full_at)
    result = bowline_audit(path, "--fix")
    assert (result.exit_code, snapshot(path)) == (1, before)
    assert ERROR.fullmatch(result.stderr.strip())
    assert "No space left on device" in result.stderr


# --- the Python API -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "place", ["", "\0", "a\0b", "x/" * 5000, "~", "a//b", "\n", " ", "../" * 3000 + "x y", None, b"a", 3]
)
def test_places_that_are_none_raise_errors_of_ours(place: Any) -> None:
    with pytest.raises(BowlineError) as error:
        bowline.audit(place)
    assert error.value.help
