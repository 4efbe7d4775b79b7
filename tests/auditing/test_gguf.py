"""The audit of GGUF files: tied, stored twice, diverged, two types; tokens, special ids; several files; bad ones."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from typer.testing import CliRunner, Result

from bowline.auditing import AuditReport, Severity, audit
from bowline.auditing.loaders import Fate, Outcome
from bowline.cli import app
from bowline.tie import TieState
from tests.checkpoint.gguf_files import EMBEDDING, HEAD, LLAMA, Stored, gguf_file, q4_0, q8_0, text, vocabulary
from tests.checkpoints import codes, findings, one, table, tied_gpt2, write

ROWS, WIDTH = 128, 64
TABLE, OWN = table(ROWS, WIDTH), table(ROWS, WIDTH, seed=1)
SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "audit.schema.json").read_text())

Tensor = Stored | npt.NDArray[np.float32]


def gguf(directory: Path, tensors: dict[str, Tensor], name: str = "model.gguf", **values: Any) -> Path:
    """A GGUF file with a token for each of its embedding's rows; `values` are further keys, `__` for a dot."""
    rows = tensors[EMBEDDING].shape[0] if EMBEDDING in tensors else ROWS
    directory.mkdir(parents=True, exist_ok=True)
    keys = {key.replace("__", "."): value for key, value in values.items()}
    (directory / name).write_bytes(gguf_file(tensors, {**vocabulary(rows), **keys}))
    return directory / name


def outcome(report: AuditReport) -> Outcome | None:
    """The fate of the head in llama.cpp, which is the only loader of the report."""
    assert list(report.evidence.outcomes) == ["llama.cpp"]
    return report.evidence.outcomes["llama.cpp"][HEAD]


def fate(report: AuditReport) -> str:
    """The fate of the head in the JSON report, where the other loaders have no targets."""
    by_loader: dict[str, dict[str, str]] = report.as_dict()["outcomes"]
    assert {loader for loader, targets in by_loader.items() if targets} == {"llama.cpp"}
    return by_loader["llama.cpp"][HEAD]


def state(report: AuditReport) -> TieState | None:
    (tie,) = report.evidence.ties
    return tie.state


def bowline(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["audit", *map(str, arguments)])


# --- the tie --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("stored", [TABLE, q8_0(TABLE), q4_0(TABLE)], ids=["F32", "Q8_0", "Q4_0"])
def test_without_a_head_the_file_is_tied(tmp_path: Path, stored: Tensor, values: bool) -> None:
    report = audit(gguf(tmp_path, {EMBEDDING: stored}), values=values)
    assert report.findings == ()
    assert state(report) is TieState.SHARED
    assert outcome(report) == Outcome(Fate.TIED, "output.weight is not stored: token_embd.weight serves as the head")
    assert fate(report) == "tied"
    assert report.as_dict()["family"] == "llama"


@pytest.mark.parametrize("stored", [TABLE, q8_0(TABLE)], ids=["F32", "Q8_0"])
def test_bw105_an_equal_head_is_counted_in_bytes(tmp_path: Path, stored: Tensor) -> None:
    file = gguf(tmp_path, {EMBEDDING: stored, HEAD: stored})
    report = audit(file)
    assert state(report) is TieState.EQUAL
    assert fate(report) == "kept"
    found = one(file, "BW105")
    wasted = "32.8 kB" if isinstance(stored, np.ndarray) else "8.7 kB"
    assert found.message == f"{HEAD} repeats {EMBEDDING} value by value: {wasted} wasted"
    assert found.severity is Severity.WARNING
    assert found.file == "model.gguf"
    assert found.help == "convert the model again, from a checkpoint that stores the embedding alone"


def test_an_equal_head_in_two_float_types_is_equal_by_its_values(tmp_path: Path) -> None:
    rounded = TABLE.astype(np.float16)
    tensors: dict[str, Tensor] = {
        EMBEDDING: rounded.astype(np.float32),
        HEAD: Stored("F16", TABLE.shape, rounded.tobytes()),
    }
    report = audit(gguf(tmp_path, tensors))
    assert state(report) is TieState.EQUAL
    assert [finding.code for finding in report.findings] == ["BW105"]


@pytest.mark.parametrize("quantise", [np.asarray, q8_0, q4_0])
def test_a_head_of_its_own_is_kept_and_no_fault(tmp_path: Path, quantise: Any) -> None:
    report = audit(gguf(tmp_path, {EMBEDDING: quantise(TABLE), HEAD: quantise(OWN)}))
    assert report.findings == ()
    assert state(report) is TieState.DIVERGED
    assert report.evidence.ties[0].difference is not None
    assert report.evidence.ties[0].difference.rows_differing == ROWS
    assert fate(report) == "kept"


@pytest.mark.parametrize(
    ("embedding", "head", "said"),
    [
        (q4_0(TABLE), q8_0(TABLE), "output.weight (Q8_0) looks like token_embd.weight (Q4_0) in another type: 8.7 kB"),
        (TABLE, q8_0(TABLE), "output.weight (Q8_0) looks like token_embd.weight (F32) in another type: 8.7 kB"),
        (q8_0(TABLE), TABLE, "output.weight (F32) looks like token_embd.weight (Q8_0) in another type: 32.8 kB"),
    ],
)
def test_bw105_one_table_in_two_types_is_information(
    tmp_path: Path, embedding: Tensor, head: Tensor, said: str
) -> None:
    file = gguf(tmp_path, {EMBEDDING: embedding, HEAD: head})
    assert state(audit(file)) is TieState.DIVERGED
    found = one(file, "BW105")
    assert found.message == f"{said} for the same table"
    assert found.severity is Severity.INFO
    assert "looks like the same table quantised to Q" in bowline(file).output


@pytest.mark.parametrize("quantise", [(q4_0, q8_0), (q8_0, q4_0), (np.asarray, q8_0)])
def test_two_heads_in_two_types_are_not_one_table(tmp_path: Path, quantise: tuple[Any, Any]) -> None:
    near = (TABLE + 0.3 * OWN).astype(np.float32)
    for own in (OWN, near):
        report = audit(gguf(tmp_path, {EMBEDDING: quantise[0](TABLE), HEAD: quantise[1](own)}))
        assert state(report) is TieState.DIVERGED
        assert report.findings == ()


def test_headers_alone_leave_two_stored_ends_open(tmp_path: Path) -> None:
    report = audit(gguf(tmp_path, {EMBEDDING: q4_0(TABLE), HEAD: q8_0(TABLE)}), values=False)
    assert state(report) is None
    assert fate(report) == "kept"


def test_types_that_are_not_dequantised_are_compared_by_their_bytes(tmp_path: Path) -> None:
    raw = np.random.default_rng(0).integers(0, 256, 128 * 66, dtype=np.uint8).tobytes()
    stored = Stored("IQ2_XXS", (128, 256), raw)
    other = Stored("IQ2_XXS", (128, 256), raw[:-1] + bytes([raw[-1] ^ 1]))
    assert state(audit(gguf(tmp_path, {EMBEDDING: stored, HEAD: stored}))) is TieState.EQUAL
    report = audit(gguf(tmp_path, {EMBEDDING: stored, HEAD: other}))
    assert state(report) is TieState.DIVERGED
    assert report.evidence.ties[0].difference is not None
    assert report.evidence.ties[0].difference.some_rows == (127,)
    mixed: dict[str, Tensor] = {EMBEDDING: stored, HEAD: q8_0(table(128, 256))}
    assert state(audit(gguf(tmp_path, mixed))) is None
    assert "not compared" in bowline(tmp_path).output


def test_bw102_a_missing_head_that_llama_cpp_requires(tmp_path: Path) -> None:
    file = gguf(tmp_path, {EMBEDDING: TABLE}, general__architecture="phi2")
    report = audit(file)
    assert state(report) is TieState.TARGET_MISSING
    assert fate(report) == "refused"
    found = one(file, "BW102")
    assert found.message == "output.weight is not stored, but llama.cpp requires it for the architecture 'phi2'"
    assert found.severity is Severity.ERROR
    assert not found.fixable


def test_an_architecture_that_needs_a_head_is_not_told_to_leave_it_out(tmp_path: Path) -> None:
    file = gguf(tmp_path, {EMBEDDING: TABLE, HEAD: TABLE}, general__architecture="phi2")
    assert one(file, "BW105").help == "leave it: llama.cpp requires a stored head for the architecture 'phi2'"


def test_of_an_unknown_architecture_the_outcome_is_not_known(tmp_path: Path) -> None:
    for tensors in ({EMBEDDING: TABLE}, {EMBEDDING: TABLE, HEAD: OWN}):
        report = audit(gguf(tmp_path, dict(tensors), general__architecture="unheard-of"))
        assert outcome(report) is None
        assert report.findings == ()


def test_the_runtime_was_not_tried_with_a_head_that_the_converter_never_writes(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {EMBEDDING: TABLE, HEAD: OWN}
    assert outcome(audit(gguf(tmp_path, tensors, general__architecture="gemma"))) is None


def test_an_embedding_model_has_no_tie(tmp_path: Path) -> None:
    report = audit(gguf(tmp_path, {EMBEDDING: TABLE}, general__architecture="bert"))
    assert report.evidence.ties == ()
    assert "ties       none: the class has no head to tie" in bowline(tmp_path).output


def test_bw107_only_the_head_is_stored(tmp_path: Path) -> None:
    file = gguf(tmp_path, {HEAD: TABLE})
    assert one(file, "BW107").message == (
        "output.weight is stored, but token_embd.weight, from which loaders take the matrix, is not"
    )
    assert fate(audit(file)) == "refused"


def test_a_file_without_either_end_has_no_tie(tmp_path: Path) -> None:
    gguf(tmp_path, {"v.patch_embd.weight": TABLE}, general__architecture="clip")
    result = bowline(tmp_path)
    assert result.exit_code == 0
    assert "ties       none: token_embd.weight is not stored" in result.output


def test_bw108_two_widths(tmp_path: Path) -> None:
    file = gguf(tmp_path, {EMBEDDING: TABLE, HEAD: table(ROWS, 32)})
    assert one(file, "BW108").message == "output.weight is F32 [128, 32] but token_embd.weight is F32 [128, 64]"
    assert fate(audit(file)) == "refused"


# --- vocabulary -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [True, False])
def test_bw201_rows_and_tokens_that_differ(tmp_path: Path, values: bool) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf_file({EMBEDDING: TABLE}, vocabulary(ROWS - 8)))
    found = one(file, "BW201", values=values)
    assert found.message == "tokenizer.ggml.tokens has 120 tokens, but token_embd.weight has 128"
    assert found.file == "model.gguf"
    assert fate(audit(file)) == "refused"
    assert "BW202" not in codes(file)


@pytest.mark.parametrize("values", [True, False])
def test_bw202_tokens_without_a_row_are_named(tmp_path: Path, values: bool) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf_file({EMBEDDING: TABLE}, vocabulary(ROWS + 2)))
    assert one(file, "BW202", values=values).message == (
        "the tokenizer (model.gguf) has 2 ids beyond the table's 128 rows, up to 129 ('t129')"
    )
    assert "BW201" in codes(file)


def test_without_tokens_the_stated_size_counts(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf_file({EMBEDDING: TABLE}, {**LLAMA, "llama.vocab_size": 120}))
    assert one(file, "BW201").message == "llama.vocab_size is 120, but token_embd.weight has 128"
    file.write_bytes(gguf_file({EMBEDDING: TABLE}, {**LLAMA, "llama.vocab_size": 128}))
    assert findings(file) == []


def test_bw203_a_special_id_without_a_row(tmp_path: Path) -> None:
    file = gguf(tmp_path, {EMBEDDING: TABLE}, tokenizer__ggml__bos_token_id=1, tokenizer__ggml__eot_token_id=128)
    found = one(file, "BW203")
    assert found.message == "tokenizer.ggml.eot_token_id: 128, but ids run from 0 to 127"
    assert found.file == "model.gguf"


def test_bw204_padding_that_is_the_end_of_text(tmp_path: Path) -> None:
    zero = TABLE.copy()
    zero[2] = 0
    ids: dict[str, Any] = {"tokenizer__ggml__padding_token_id": 2, "tokenizer__ggml__eos_token_id": 2}
    found = one(gguf(tmp_path, {EMBEDDING: zero}, **ids), "BW204")
    assert "row 2 (pad_token_id, also tokenizer.ggml.eos_token_id) is zero and the head is tied" in found.message


def test_findings_about_rows_name_the_tokens(tmp_path: Path) -> None:
    twice = TABLE.copy()
    twice[7] = twice[3]
    found = one(gguf(tmp_path, {EMBEDDING: q8_0(twice)}), "BW205")
    assert "2 rows in 1 groups of equal rows" in found.message
    assert "among them 't3', 't7'" in found.message


def test_bw207_a_damaged_scale_is_found(tmp_path: Path) -> None:
    stored = q8_0(TABLE)
    damaged = Stored("Q8_0", stored.shape, stored.raw[: 34 * 6] + b"\x00\x7e" + stored.raw[34 * 6 + 2 :])  # a NaN
    assert "1 row with NaN or infinite values (3)" in one(gguf(tmp_path, {EMBEDDING: damaged}), "BW207").message


# --- beside the original --------------------------------------------------------------------------------------------


def test_a_quantised_table_is_compared_with_the_original(tmp_path: Path) -> None:
    base = write(tmp_path / "base", {"transformer.wte.weight": TABLE}, {**_gpt2(), "tie_word_embeddings": True})
    report = audit(gguf(tmp_path, {EMBEDDING: q8_0(TABLE)}), base=base)
    assert report.evidence.base is not None
    (compared,) = report.evidence.base.tables
    assert compared.ends == ("embedding", "head")
    assert str(compared).endswith("looks like the same table quantised to Q8_0")
    report = audit(gguf(tmp_path, {EMBEDDING: TABLE}), base=base)
    assert report.evidence.base is not None
    assert str(report.evidence.base.tables[0]) == "equal in all 128 rows"


def test_a_gguf_file_can_be_the_original(tmp_path: Path) -> None:
    merged = write(tmp_path / "model", {"transformer.wte.weight": TABLE}, {**_gpt2(), "tie_word_embeddings": True})
    report = audit(merged, base=gguf(tmp_path, {EMBEDDING: TABLE}))
    assert report.evidence.base is not None
    assert str(report.evidence.base.tables[0]) == "equal in all 128 rows"


def _gpt2() -> dict[str, Any]:
    return {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": ROWS}


# --- the report -----------------------------------------------------------------------------------------------------


def test_the_report_says_gguf_and_names_no_flag_of_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[")
    (tmp_path / "generation_config.json").write_text("[")
    file = gguf(tmp_path, {EMBEDDING: TABLE})
    lines = bowline(file).output.splitlines()
    assert lines[0].startswith(f"{file}: ")
    assert "GGUF (llama)" in "".join(lines[:2])
    assert "  flag       none: a GGUF file has no flag" in lines
    assert "config.json" not in "".join(lines)


@pytest.mark.parametrize(
    "tensors", [{EMBEDDING: q8_0(TABLE)}, {EMBEDDING: TABLE, HEAD: q4_0(TABLE)}, {HEAD: TABLE}, {}]
)
def test_json_follows_the_schema_and_sarif_is_written(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    file = gguf(tmp_path, tensors)
    record = json.loads(bowline(file, "--output-format", "json").output)
    Draft202012Validator(SCHEMA).validate(record)
    assert record["checkpoints"][0]["flag"]["path"] is None
    assert json.loads(bowline(file, "--output-format", "sarif").output)["runs"]


def test_fix_changes_nothing(tmp_path: Path) -> None:
    file = gguf(tmp_path, {EMBEDDING: TABLE, HEAD: TABLE})
    before = file.read_bytes()
    assert bowline(file, "--fix").exit_code == 1
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


# --- several files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", [(), ("--recursive",)])
def test_each_of_several_gguf_files_is_audited_and_named(tmp_path: Path, option: tuple[str, ...]) -> None:
    gguf(tmp_path, {EMBEDDING: q8_0(TABLE)}, "m-Q8_0.gguf")
    gguf(tmp_path, {EMBEDDING: q4_0(TABLE), HEAD: q4_0(TABLE)}, "m-Q4_0.gguf")
    result = bowline(tmp_path, *option)
    assert result.exit_code == 1
    assert f"{tmp_path}/m-Q4_0.gguf: " in result.output
    assert f"{tmp_path}/m-Q8_0.gguf: " in result.output
    assert "Found 1 warning in 2 checkpoints" in result.output


def test_one_damaged_file_of_several_does_not_hide_the_others(tmp_path: Path) -> None:
    gguf(tmp_path, {EMBEDDING: TABLE}, "a.gguf")
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    result = bowline(tmp_path)
    assert result.exit_code == 2
    assert f"{tmp_path}/a.gguf: " in result.output
    assert f"error: {tmp_path}/b.gguf: the version at byte 4 needs 4 bytes" in result.output


def test_a_gguf_file_beside_a_model_is_audited_with_recursive(tmp_path: Path) -> None:
    tied_gpt2(tmp_path)
    gguf(tmp_path, {EMBEDDING: TABLE})
    assert "model.gguf" not in bowline(tmp_path).output
    both = bowline(tmp_path, "--recursive").output
    assert f"{tmp_path}: " in both
    assert f"{tmp_path}/model.gguf: " in both


def test_a_model_in_parts_is_one_checkpoint(tmp_path: Path) -> None:
    keys = {"split__count": 2, "split__tensors__count": 2}
    gguf(tmp_path, {EMBEDDING: TABLE}, "m-00001-of-00002.gguf", split__no=0, **keys)
    gguf(tmp_path, {HEAD: TABLE}, "m-00002-of-00002.gguf", split__no=1, **keys)
    result = bowline(tmp_path)
    assert "in 1 checkpoint" in result.output
    found = one(tmp_path, "BW105")
    assert found.file == "m-00002-of-00002.gguf"
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    result = bowline(tmp_path)
    assert result.exit_code == 2
    assert "one part of 2, and 1 of them is missing: 'm-00002-of-00002.gguf'" in result.output


# --- bad files ------------------------------------------------------------------------------------------------------


def _key(name: str, kind: int, raw: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text(name) + struct.pack("<I", kind) + raw


GOOD = gguf_file({EMBEDDING: TABLE}, vocabulary(ROWS))


@pytest.mark.parametrize(
    "file",
    [
        b"",
        b"GGUF",
        GOOD[:100],
        GOOD[:-1],
        GOOD.replace(struct.pack("<IQQ", 2, WIDTH, ROWS), struct.pack("<IQQ", 2, WIDTH, 1 << 40)),
        _key("a", 8, struct.pack("<Q", 1 << 63)),
        _key("a", 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 9, 1)),
        _key("a", 99, bytes(8)),
        _key("a", 9, struct.pack("<IQ", 8, 1 << 63)),
        b"GGUF" + struct.pack("<IQQ", 3, 1 << 63, 1 << 63),
    ],
    ids=["empty", "magic", "header", "data", "size", "string", "nested", "type", "array", "counts"],
)
@pytest.mark.parametrize("option", [(), ("--headers-only",), ("--recursive",)])
def test_a_bad_file_gives_one_line_and_2(tmp_path: Path, file: bytes, option: tuple[str, ...]) -> None:
    (tmp_path / "model.gguf").write_bytes(file)
    result = bowline(tmp_path, *option)
    assert result.exit_code == 2
    (line, footer) = result.output.strip().splitlines()
    assert line.startswith((f"error: {tmp_path}/model.gguf: ", f"error: {tmp_path}: model.gguf: "))
    assert "(help: " in line
    assert footer == "1 path could not be audited."


def test_a_table_that_no_vocabulary_has_is_refused_before_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + text("general.architecture") + struct.pack("<I", 8) + text("llama")
    head += text(EMBEDDING) + struct.pack("<I2QIQ", 2, 32, 1 << 30, 8, 0)
    head += bytes(-len(head) % 32)
    with file.open("wb") as sparse:
        sparse.write(head)
        sparse.truncate(len(head) + (1 << 30) * 34)
    result = bowline(file)
    assert result.exit_code == 2
    assert "expected a vocabulary table of at most" in result.output
    assert bowline(file, "--headers-only").exit_code == 0
