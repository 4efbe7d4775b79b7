"""Reports: JSON follows its published schema, code hosts accept the SARIF, and hostile names cannot break the text."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from bowline.auditing import AuditReport, Severity, audit
from bowline.auditing.loaders import LOADERS, Fate, loaders_run
from bowline.auditing.report import FORMATS, AuditFailure, Run
from bowline.auditing.row_statistics import PaddingClass
from bowline.auditing.rules import all_rules
from bowline.checkpoint.formats.numpy_writer import Bits
from bowline.geometry import GeometryReport, Quantiles
from bowline.tie import TieState
from tests.checkpoints import (
    BART,
    BERT,
    GPT2,
    HEAD,
    LLAMA,
    OWN,
    T5,
    UNKNOWN,
    WTE,
    bf16,
    shards,
    table,
    tied_gpt2,
    write,
)

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "audit.schema.json").read_text())
VALIDATOR = Draft202012Validator(SCHEMA)
EMBED = "model.embed_tokens.weight"
NAN, INFINITE = table(), table()
NAN[3, 3] = np.nan
INFINITE[4, 4] = np.inf
DELTA = (table(256, 128) + np.outer(np.arange(256), np.ones(128))).astype(np.float32)

EVIDENCE: dict[str, tuple[Any, Any]] = {
    "shared": ({WTE: table()}, GPT2),
    "equal": ({WTE: table(), HEAD: table()}, GPT2),
    "diverged": ({WTE: table(), HEAD: OWN}, GPT2),
    "two shapes": ({WTE: table(), HEAD: table(72)}, GPT2),
    "two dtypes": ({WTE: table(), HEAD: bf16(table())}, GPT2),
    "target missing": ({EMBED: table()}, LLAMA),
    "source missing": ({HEAD: table()}, GPT2),
    "both missing": ({"other": table()}, GPT2),
    "no tensors": ({}, GPT2),
    "no config": ({EMBED: table(), HEAD: OWN}, None),
    "a malformed config": ({EMBED: table()}, "["),
    "an unknown class": ({EMBED: table()}, UNKNOWN),
    "no tie": ({"embeddings.word_embeddings.weight": table()}, {**BERT, "architectures": ["BertModel"]}),
    "several ties": ({"shared.weight": table(), HEAD: OWN}, T5),
    "another axis": ({"model.shared.weight": table(), "final_logits_bias": np.zeros((1, 64), np.float32)}, BART),
    "nan": ({WTE: NAN, HEAD: NAN}, {**GPT2, "pad_token_id": 3}),
    "infinite": ({WTE: table(), HEAD: INFINITE}, GPT2),
    "zeros": ({WTE: np.zeros((64, 8), np.float32)}, {**GPT2, "pad_token_id": 3}),
    "one row": ({WTE: table(1)}, {**GPT2, "vocab_size": 1}),
    "no rows": ({WTE: table(0)}, {**GPT2, "vocab_size": 0}),
    "no columns": ({WTE: table(64, 0), HEAD: table(64, 0)}, GPT2),
    "a scalar": ({WTE: np.float32(1) * np.ones(()), HEAD: np.zeros(())}, GPT2),
    "a vector": ({WTE: np.ones(64), HEAD: np.zeros(64)}, GPT2),
    "codes": ({WTE: np.ones((64, 8), np.int8), HEAD: np.zeros((64, 8), np.int8)}, GPT2),
    "equal codes": ({WTE: np.ones((64, 8), np.int8), HEAD: np.ones((64, 8), np.int8)}, GPT2),
    "a delta": ({WTE: table(256, 128), HEAD: DELTA}, {**GPT2, "vocab_size": 256}),
    "padding": ({WTE: table()}, {**GPT2, "pad_token_id": 3, "initializer_range": 1.0}),
    "hostile names": (
        {"\x1b[2J\n": table(), "lm_head\r.weight": OWN, "": OWN},
        {**GPT2, "architectures": ["\x1b[31m\n"]},
    ),
}


def report(path: Path, name: str, **options: Any) -> AuditReport:
    tensors, config = EVIDENCE[name]
    return audit(write(path, tensors, config), **options)


def render(form: str, *reports: AuditReport, failures: tuple[AuditFailure, ...] = ()) -> str:
    return FORMATS[form](Run(reports=reports, failures=failures))


# --- JSON -----------------------------------------------------------------------------------------------------------


def strict_json(text: str) -> Any:
    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("values", [True, False], ids=["values", "headers"])
@pytest.mark.parametrize("name", EVIDENCE)
def test_the_json_report_is_as_its_schema_says(tmp_path: Path, name: str, values: bool) -> None:
    record = strict_json(render("json", report(tmp_path, name, values=values)))
    VALIDATOR.validate(record)
    assert record["checkpoints"][0]["values_read"] is values


def test_a_report_of_shards_and_a_failure_is_as_its_schema_says(tmp_path: Path) -> None:
    path = shards(
        tmp_path / "a",
        {"model-00001-of-00001.safetensors": {WTE: table()}},
        {WTE: "gone"} | {HEAD: "model-00001-of-00001.safetensors"},
    )
    failures = (
        AuditFailure(path="b", message="no model here", help=None),
        AuditFailure(path="c", message="x", help="y"),
    )
    record = strict_json(render("json", audit(path), failures=failures))
    VALIDATOR.validate(record)
    assert [failure["path"] for failure in record["failures"]] == ["b", "c"]


def test_the_schema_is_a_schema_and_strict_at_every_level() -> None:
    Draft202012Validator.check_schema(SCHEMA)

    def objects(node: Any) -> Any:
        if isinstance(node, dict):
            if "properties" in node:
                yield node
            for inner in node.values():
                yield from objects(inner)
        elif isinstance(node, list):
            for inner in node:
                yield from objects(inner)

    for node in objects(SCHEMA):
        assert node["additionalProperties"] is False
        in_lines_only = {"path"} if node is SCHEMA else set()
        assert set(node["required"]) == set(node["properties"]) - in_lines_only


def enumerated(*path: str) -> set[str | None]:
    node = SCHEMA["$defs"]
    for key in path:
        node = node[key]
    return set(node)


def test_the_schemas_words_are_those_of_the_code() -> None:
    definitions = SCHEMA["$defs"]
    assert enumerated("tie", "properties", "state", "enum") == {*(state.value for state in TieState), None}
    assert enumerated("finding", "properties", "severity", "enum") == {severity.value for severity in Severity}
    assert set(definitions["by_loader_fate"]["properties"]) == set(LOADERS)
    for fates in definitions["by_loader_fate"]["properties"].values():
        assert set(fates["additionalProperties"]["enum"]) == {*(fate.value for fate in Fate), None}
    padding = definitions["checkpoint"]["properties"]["padding_row"]["oneOf"][1]
    assert set(padding["properties"]["class"]["enum"]) == {row_class.value for row_class in PaddingClass}
    assert set(definitions["geometry"]["properties"]) == set(GeometryReport.__dataclass_fields__)
    norms = definitions["geometry"]["properties"]["row_norms"]["oneOf"][1]
    assert set(norms["properties"]) == set(Quantiles.__dataclass_fields__)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"extra": 1}, ()),
        ({"state": "TIED"}, ("checkpoints", 0, "ties", 0)),
        ({"severity": "fatal"}, ("checkpoints", 0, "findings", 0)),
        ({"version": 2}, ()),
        ({"extra": 1}, ("checkpoints", 0, "geometry")),
        ({"vllm": {HEAD: "lost"}}, ("checkpoints", 0, "outcomes")),
    ],
)
def test_the_schema_refuses_what_no_report_has(tmp_path: Path, change: dict[str, Any], where: tuple[Any, ...]) -> None:
    record = json.loads(render("json", report(tmp_path, "diverged")))
    node = record
    for key in where:
        node = node[key]
    node.update(change)
    assert not VALIDATOR.is_valid(record)


@pytest.mark.parametrize(
    ("name", "rows", "largest"),
    [
        ("shared", None, None),
        ("equal", 0, 0.0),
        ("two shapes", None, None),
        ("source missing", None, None),
        ("codes", 64, None),
        ("equal codes", 0, 0.0),
    ],
)
def test_what_was_not_compared_is_null_and_not_zero(
    tmp_path: Path, name: str, rows: int | None, largest: float | None
) -> None:
    (tie,) = json.loads(render("json", report(tmp_path, name)))["checkpoints"][0]["ties"]
    assert (tie["rows_differing"], tie["max_abs_difference"]) == (rows, largest)


def test_without_values_a_tie_of_two_dtypes_was_not_compared(tmp_path: Path) -> None:
    (tie,) = json.loads(render("json", report(tmp_path, "two dtypes", values=False)))["checkpoints"][0]["ties"]
    assert (tie["state"], tie["rows_differing"]) == ("INCOMPATIBLE", None)


# --- SARIF ----------------------------------------------------------------------------------------------------------


def of(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


TEXT = of({"text": {"type": "string", "minLength": 1}}, "text")
LEVEL = {"enum": ["none", "note", "warning", "error"]}
URI = {"type": "string", "pattern": r"^(file:///)?([A-Za-z0-9._~%-][A-Za-z0-9._~/%-]*)?$"}
LOCATION = of(
    {
        "physicalLocation": of(
            {
                "artifactLocation": of({"uri": URI}, "uri"),
                "region": of({"startLine": {"type": "integer", "minimum": 1}}, "startLine"),
            },
            "artifactLocation",
            "region",
        ),
        "logicalLocations": {
            "type": "array",
            "items": of({"name": {"type": "string"}, "kind": {"const": "member"}}, "name"),
        },
    }
)
RESULT = of(
    {
        "ruleId": {"type": "string"},
        "ruleIndex": {"type": "integer", "minimum": 0},
        "level": LEVEL,
        "message": TEXT,
        "locations": {"type": "array", "items": LOCATION, "minItems": 1},
    },
    "message",
)
RULE = of(
    {
        "id": {"type": "string"},
        "name": {"type": "string"},
        "shortDescription": TEXT,
        "fullDescription": TEXT,
        "help": TEXT,
        "defaultConfiguration": of({"level": LEVEL}, "level"),
    },
    "id",
)
NOTIFICATION = of({"level": LEVEL, "message": TEXT}, "message")
INVOCATION = of(
    {
        "executionSuccessful": {"type": "boolean"},
        "toolExecutionNotifications": {"type": "array", "items": NOTIFICATION},
    },
    "executionSuccessful",
)
DRIVER = of(
    {"name": {"type": "string"}, "version": {"type": "string"}, "rules": {"type": "array", "items": RULE}}, "name"
)
SARIF = Draft202012Validator(
    of(
        {
            "$schema": {"type": "string"},
            "version": {"const": "2.1.0"},
            "runs": {
                "type": "array",
                "items": of(
                    {
                        "tool": of({"driver": DRIVER}, "driver"),
                        "invocations": {"type": "array", "items": INVOCATION},
                        "results": {"type": "array", "items": RESULT},
                    },
                    "tool",
                ),
            },
        },
        "version",
        "runs",
    )
)
"""What the standard (OASIS, 2020) says of the objects that are written here."""


@pytest.mark.parametrize("name", EVIDENCE)
def test_sarif_is_as_the_standard_says(tmp_path: Path, name: str) -> None:
    found = report(tmp_path, name)
    record = strict_json(render("sarif", found))
    SARIF.validate(record)
    (run,) = record["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == [rule.code for rule in all_rules()]
    assert [result["ruleId"] for result in run["results"]] == [finding.code for finding in found.findings]
    assert all(rules[result["ruleIndex"]]["id"] == result["ruleId"] for result in run["results"])


def uris(*reports: AuditReport) -> list[str]:
    results = json.loads(render("sarif", *reports))["runs"][0]["results"]
    return [result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for result in results]


@pytest.mark.parametrize("inside", ["", "model.safetensors", "config.json"])
def test_sarif_points_at_the_file_that_the_finding_is_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    write(tmp_path / "a model", {WTE: table(), HEAD: OWN}, GPT2)
    monkeypatch.chdir(tmp_path)
    assert uris(audit(Path("a model") / inside)) == ["a%20model/config.json"]


def test_an_absolute_path_below_the_working_directory_is_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a", {WTE: table(), HEAD: OWN}, GPT2)
    assert uris(audit(path)) == [f"file://{path}/config.json"]
    monkeypatch.chdir(tmp_path)
    assert uris(audit(path)) == ["a/config.json"]


def test_a_name_that_is_no_utf8_is_still_an_address(tmp_path: Path) -> None:
    path = write(tmp_path / os.fsdecode(b"\xff"), {WTE: table(), HEAD: OWN}, GPT2)
    assert uris(audit(path))[0].endswith("/%FF/config.json")
    for form in ("full", "concise", "json"):
        render(form, audit(path)).encode("utf-8")


def test_a_failure_is_a_notification_and_the_run_did_not_succeed(tmp_path: Path) -> None:
    failure = AuditFailure(path="a", message="no model here", help="look elsewhere")
    record = json.loads(render("sarif", failures=(failure,)))
    SARIF.validate(record)
    (invocation,) = record["runs"][0]["invocations"]
    assert invocation["executionSuccessful"] is False
    assert invocation["toolExecutionNotifications"][0]["message"]["text"] == "a: no model here (help: look elsewhere)"


# --- text -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["full", "concise"])
@pytest.mark.parametrize("name", EVIDENCE)
def test_text_is_printable_whatever_the_names_are(tmp_path: Path, name: str, form: str) -> None:
    for line in render(form, report(tmp_path, name)).split("\n"):
        assert line.isprintable()


def test_full_says_every_witness_in_order(tmp_path: Path) -> None:
    text = render("full", report(tmp_path, "diverged"))
    words = [
        "head and embedding differ, but the flag says tied: ",
        "class      GPT2LMHeadModel (gpt2)",
        "\n  embedding",
        "\n  head",
        "\n  flag",
        "\n  tie ",
        "DIVERGED",
        *loaders_run().values(),
        "geometry",
        "BW101 error: ",
        "--> ",
        "help: ",
        "Found 1 error in 1 checkpoint; 1 fixable with --fix.",
    ]
    positions = [text.index(word) for word in words]
    assert positions == sorted(positions)


def informed(path: Path) -> AuditReport:
    """An error, a warning and three informational findings, of two codes."""
    values = table(63)
    values[5:8], values[62] = 1.5, 0
    return audit(write(path, {EMBED: values, HEAD: values[::-1].copy()}, {**LLAMA, "vocab_size": 64}))


def test_full_has_errors_first_and_of_information_only_the_number(tmp_path: Path) -> None:
    found = informed(tmp_path)
    text = render("full", found)
    shown = [line for line in text.split("\n") if line.startswith("BW")]
    assert [line.split(":")[0] for line in shown] == ["BW201 error", "BW206 warning"]
    assert (
        "\n\n4 informational findings (`bowline audit --verbose` shows them): BW205 duplicate-rows (2 times), "
        "BW206 zero-rows, BW209 uneven-rows\n\n"
    ) in text
    assert text.endswith("Found 1 error, 1 warning, 4 informational findings in 1 checkpoint.")


def test_verbose_shows_every_finding_and_no_number_of_those_left_out(tmp_path: Path) -> None:
    found = informed(tmp_path)
    text = FORMATS["full"](Run(reports=(found,), verbose=True))
    shown = [line for line in text.split("\n") if line.startswith("BW")]
    assert [line.split(" ")[0] for line in shown] == [finding.code for finding in found.findings]
    assert "--verbose" not in text


@pytest.mark.parametrize("form", ["concise", "json", "sarif"])
def test_other_formats_have_every_finding_with_and_without_verbose(tmp_path: Path, form: str) -> None:
    found = informed(tmp_path)
    assert FORMATS[form](Run(reports=(found,), verbose=True)) == render(form, found)
    assert {finding.code for finding in found.findings} <= set(re.findall(r"BW\d+", render(form, found)))


def test_full_shows_ties_that_differ_in_their_target_alone_once(tmp_path: Path) -> None:
    text = render("full", audit(write(tmp_path, {"shared.weight": table()}, T5)))
    targets = "decoder.embed_tokens.weight, encoder.embed_tokens.weight"
    assert [line.strip() for line in text.split("\n") if line.startswith("  tie ")] == [
        f"tie        {HEAD} <- shared.weight  SHARED",
        f"tie        {targets} <- shared.weight  SHARED",
    ]


def test_full_says_what_each_figure_of_the_geometry_is(tmp_path: Path) -> None:
    lines = [line.split() for line in render("full", report(tmp_path, "shared")).split("\n")]
    said = {" ".join(words[:2]): " ".join(words[3:]) for words in lines if len(words) > 3}
    assert said["mean cosine"] == "of two rows"
    assert said["effective rank"] == "of 8"
    assert said["nearest cosine"] == "to the nearest other row (median)"


def test_full_says_that_an_untied_head_is_as_the_flag_says(tmp_path: Path) -> None:
    text = render("full", audit(write(tmp_path, {EMBED: table(), HEAD: OWN}, LLAMA)))
    assert "DIVERGED (untied, as the flag says): 64 of 64 rows differ" in text


def test_concise_is_a_line_for_each_finding_and_one_that_counts(tmp_path: Path) -> None:
    path = tmp_path / "m"
    text = render("concise", audit(write(path, {WTE: table(), HEAD: OWN}, {**GPT2, "eos_token_id": 99})))
    lines = text.split("\n")
    assert len(lines) == 3
    assert lines[0].startswith(f"{path}/config.json: BW101 error: ")
    assert lines[1].startswith(f"{path}/config.json: BW203 warning: ")
    assert lines[2] == "Found 1 error, 1 warning in 1 checkpoint; 1 fixable with --fix."


def test_codes_of_an_unknown_scale_differ_by_an_unknown_amount(tmp_path: Path) -> None:
    text = render("full", report(tmp_path, "codes"))
    assert "DIVERGED: 64 of 64 rows differ, by an unknown amount" in text
    assert "differ in 64 of 64 rows (by an unknown amount), but tie_word_embeddings is true" in text


@pytest.mark.parametrize("inside", ["", "model.safetensors", "config.json"])
def test_a_place_is_the_file_that_the_finding_is_about(tmp_path: Path, inside: str) -> None:
    write(tmp_path, {WTE: table(), HEAD: OWN}, GPT2)
    assert f"--> {tmp_path / 'config.json'}\n" in render("full", audit(tmp_path / inside))


def test_a_directory_whose_name_ends_like_the_file_is_not_taken_for_it(tmp_path: Path) -> None:
    path = write(tmp_path / "my-config.json", {WTE: table(), HEAD: OWN}, GPT2)
    assert f"--> {path}/config.json\n" in render("full", audit(path))


def test_nothing_found_is_said_for_all_checkpoints_together(tmp_path: Path) -> None:
    reports = [audit(tied_gpt2(tmp_path / name)) for name in "ab"]
    assert render("concise", *reports) == "Nothing found in 2 checkpoints."


def test_without_values_the_text_says_that_they_were_not_read(tmp_path: Path) -> None:
    text = render("full", report(tmp_path, "diverged", values=False))
    assert "not compared" in text
    assert "unknown  depends on data that was not read" in text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no tie", "none: the class has no head to tie"),
        ("no config", "none: the class is unknown, and names and shapes show none"),
        ("an unknown class", "none: Bowline does not know the class, and names and shapes show none"),
    ],
)
def test_where_there_is_no_tie_the_text_says_why(tmp_path: Path, name: str, said: str) -> None:
    config = EVIDENCE[name][1]
    tensors = {"embeddings.word_embeddings.weight": table()} if name == "no tie" else {"other": table()}
    assert said in render("full", audit(write(tmp_path, tensors, config)))


# --- any tables -----------------------------------------------------------------------------------------------------

WORDS_OF = {
    "F64": "<u8",
    "F32": "<u4",
    "F16": "<u2",
    "BF16": "<u2",
    "F8_E4M3": "u1",
    "F8_E5M2": "u1",
    "F8_E8M0": "u1",
    "I8": "u1",
}
KINDS = ["any bits", "zeros", "ones", "few patterns", "one row repeated", "huge"]


def words(dtype: str, shape: tuple[int, ...], kind: str, seed: int) -> Bits:
    random = np.random.default_rng(seed)
    bits = np.dtype(WORDS_OF[dtype])
    full = np.frombuffer(random.bytes(math.prod(shape) * bits.itemsize), bits).reshape(shape)
    if kind == "zeros":
        full = np.zeros_like(full)
    elif kind == "ones":
        full = np.full_like(full, np.iinfo(bits).max)
    elif kind == "few patterns":
        full = random.choice(full.reshape(-1)[:3], shape) if full.size else full
    elif kind == "one row repeated" and full.ndim and full.size:
        full = np.broadcast_to(full[:1], shape).copy()
    elif kind == "huge":  # the largest finite numbers, of either sign
        largest = {"F64": 0x7FEFFFFFFFFFFFFF, "F32": 0x7F7FFFFF, "F16": 0x7BFF, "BF16": 0x7F7F}.get(dtype, 0x7B)
        full = np.where(full & 1, largest, largest | 1 << (8 * bits.itemsize - 1)).astype(bits)
    return Bits(dtype, full)


@settings(max_examples=120)
@given(
    dtypes=st.tuples(*[st.sampled_from(sorted(WORDS_OF))] * 2),
    same_dtype=st.booleans(),
    shape=st.sampled_from([(0, 8), (1, 1), (8, 0), (24, 16), (160, 20), (64,), (16, 2, 3), ()]),
    kinds=st.tuples(*[st.sampled_from(KINDS)] * 2),
    same=st.booleans(),
    seed=st.integers(0, 9),
    config=st.sampled_from([GPT2, LLAMA, {**GPT2, "pad_token_id": 0, "initializer_range": 0.02}, UNKNOWN, None]),
)
def test_any_tables_under_any_config_end_in_a_report(
    tmp_path_factory: pytest.TempPathFactory,
    dtypes: tuple[str, str],
    same_dtype: bool,
    shape: tuple[int, ...],
    kinds: tuple[str, str],
    same: bool,
    seed: int,
    config: Any,
) -> None:
    """Warnings are errors here: nothing overflows aloud."""
    embedding = words(dtypes[0], shape, kinds[0], seed)
    head = embedding if same else words(dtypes[0] if same_dtype else dtypes[1], shape, kinds[1], seed + 1)
    name = WTE if config and config["model_type"] == "gpt2" else EMBED
    found = audit(write(tmp_path_factory.mktemp("any"), {name: embedding, HEAD: head}, config))
    VALIDATOR.validate(strict_json(render("json", found)))
    for form in ("full", "concise", "sarif"):
        render(form, found)
    if same and found.evidence.ties:
        assert found.evidence.ties[0].state is TieState.EQUAL
