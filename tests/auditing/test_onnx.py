"""The audit of ONNX files: one matrix, a copy of it, two matrices, codes with scales; verdicts against the truth."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

from bowline.auditing import AuditReport, Severity, audit
from bowline.cli import app
from bowline.errors import BowlineError
from bowline.tie import TieState
from tests.checkpoint.onnx_files import HEAD, TABLE, causal, dequantised, gemm, lookup, merged, model, norm, onnx, save
from tests.checkpoints import GPT2, one, table

ROWS, OWN = table(96, 16), table(96, 16, seed=1)


def state(report: AuditReport) -> TieState | None:
    """The state of the head and the table."""
    assert report.evidence.main_tie is not None
    return report.evidence.main_tie.state


def bowline(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["audit", *map(str, arguments)])


def in_directory(path: Path, made: Any, **config: object) -> Path:
    """A directory as optimum writes it: a model, its data and a config."""
    save(path / "model.onnx", made, external=True)
    (path / "config.json").write_text(json.dumps({**GPT2, "vocab_size": 96, **config}))
    return path


# --- the tie ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("made", [causal(ROWS), gemm(ROWS), dequantised(ROWS, None)], ids=["matmul", "gemm", "int8"])
def test_one_initializer_for_both_ends_is_tied(tmp_path: Path, made: Any, values: bool) -> None:
    report = audit(save(tmp_path / "model.onnx", made), values=values)
    assert state(report) is TieState.SHARED
    assert report.findings == ()
    assert report.evidence.outcomes == {}
    assert all(fates == {} for fates in report.as_dict()["outcomes"].values())


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (causal(ROWS, ROWS), f"{HEAD} repeats {TABLE} value by value, transposed: 6.14 kB wasted"),
        (gemm(ROWS, ROWS), f"lm_head.weight repeats {TABLE} value by value: 6.14 kB wasted"),
        (
            dequantised(ROWS, ROWS),
            "head_quantized repeats wte_quantized value by value, transposed: 1.54 kB wasted",
        ),
        (
            merged(ROWS, ROWS, inside=True),
            f"{HEAD} and optimum::if[1]/{HEAD} each repeat {TABLE} value by value, transposed: 12.3 kB wasted",
        ),
        (merged(ROWS, ROWS, inside=False), f"{HEAD} repeats {TABLE} value by value, transposed: 6.14 kB wasted"),
    ],
    ids=["transposed", "rows", "int8", "branches", "merged"],
)
@pytest.mark.parametrize("external", [False, True])
def test_bw105_a_copy_is_counted_in_bytes(tmp_path: Path, made: Any, message: str, external: bool) -> None:
    path = save(tmp_path / "model.onnx", made, external=external)
    assert state(audit(path)) is TieState.EQUAL
    found = one(path, "BW105")
    assert found.message == message
    assert found.severity is Severity.WARNING
    assert "dynamo=True" in found.help
    assert state(audit(path, values=False)) is None


@pytest.mark.parametrize("made", [causal(ROWS, OWN), gemm(ROWS, OWN), dequantised(ROWS, OWN)])
def test_two_matrices_are_no_fault_and_a_fault_if_the_config_says_tied(tmp_path: Path, made: Any) -> None:
    report = audit(save(tmp_path / "model.onnx", made))
    assert state(report) is TieState.DIVERGED
    assert report.findings == ()
    assert report.evidence.ties[0].difference is not None
    assert report.evidence.ties[0].difference.rows_differing == 96
    assert not audit(in_directory(tmp_path / "untied", made, tie_word_embeddings=False)).findings
    found = one(in_directory(tmp_path / "tied", made, tie_word_embeddings=True), "BW101")
    assert "but tie_word_embeddings is true" in found.message
    assert found.help.startswith("the graph computes with its own head")
    assert not found.fixable


def test_a_trained_row_in_the_copy_is_seen(tmp_path: Path) -> None:
    head = ROWS.copy()
    head[7] += 1
    report = audit(save(tmp_path / "model.onnx", causal(ROWS, head)))
    assert state(report) is TieState.DIVERGED
    assert report.evidence.ties[0].difference is not None
    assert report.evidence.ties[0].difference.some_rows == (7,)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_an_equal_head_in_another_type_is_equal_by_its_values(tmp_path: Path, dtype: Any) -> None:
    rounded = ROWS.astype(np.float16)
    path = save(tmp_path / "model.onnx", causal(rounded.astype(np.float32), rounded.astype(dtype)))
    assert state(audit(path)) is TieState.EQUAL


def test_heads_of_other_lengths_are_incompatible(tmp_path: Path) -> None:
    path = save(tmp_path / "model.onnx", causal(ROWS, table(104, 16)))
    assert state(audit(path)) is TieState.INCOMPATIBLE
    assert one(path, "BW108").message == f"{HEAD} is F32 [104, 16] but {TABLE} is F32 [96, 16]"


def test_codes_with_float_scales_that_are_not_read_are_not_compared(tmp_path: Path) -> None:
    made = dequantised(ROWS, OWN)
    for node in made.graph.node:
        if node.op_type == "DequantizeLinear":
            node.attribute.append(onnx.helper.make_attribute("block_size", 8))
    report = audit(save(tmp_path / "model.onnx", made))
    assert state(report) is None
    assert report.findings == ()


def test_an_encoder_says_that_it_has_no_head(tmp_path: Path) -> None:
    made = model([lookup(), norm()], {TABLE: ROWS, "norm": np.ones(16, np.float32)}, outputs=["y"])
    path = save(tmp_path / "model.onnx", made)
    assert audit(path).evidence.ties == ()
    assert "ties       none: no head was found: no product uses one" in bowline(path).output


# --- what is beside the file ------------------------------------------------------------------------------------------


def test_config_and_tokenizer_beside_the_file_are_read(tmp_path: Path) -> None:
    path = in_directory(tmp_path, causal(ROWS), pad_token_id=96, eos_token_id=3)
    (path / "vocab.json").write_text(json.dumps({f"t{number}": number for number in range(120)}))
    assert one(path, "BW202").message.startswith("the tokenizer (vocab.json) has 24 ids beyond the table's 96 rows")
    assert one(path, "BW203").message == "pad_token_id: 96, but ids run from 0 to 95"
    report = audit(path)
    assert report.evidence.declaration.family == "gpt2"
    assert state(report) is TieState.SHARED


def test_the_report_names_the_format(tmp_path: Path) -> None:
    result = bowline(save(tmp_path / "model.onnx", causal(ROWS)))
    assert result.exit_code == 0
    assert "ONNX (unknown family)" in result.output
    assert "flag       none: an ONNX graph has no flag" in result.output
    assert "tie        /lm_head/MatMul <- wte.weight  SHARED" in result.output


def test_each_file_of_a_directory_is_audited(tmp_path: Path) -> None:
    for name in ("decoder_model.onnx", "decoder_with_past_model.onnx", "decoder_model_merged.onnx"):
        save(tmp_path / name, causal(ROWS))
    assert "Nothing found in 3 checkpoints." in bowline(tmp_path).output


def test_a_damaged_file_is_one_line_and_exit_code_two(tmp_path: Path) -> None:
    path = save(tmp_path / "model.onnx", causal(ROWS))
    path.write_bytes(path.read_bytes()[:900])
    result = bowline(path)
    assert result.exit_code == 2
    assert len([line for line in result.output.splitlines() if line.startswith("error: ")]) == 1


def test_damage_raises_nothing_but_bowlines_errors(tmp_path: Path) -> None:
    raw = dequantised(ROWS[:40], OWN[:40]).SerializeToString()
    rng = np.random.default_rng(0)
    path = tmp_path / "model.onnx"
    outcomes = set()
    for _ in range(150):
        damaged = bytearray(raw)
        for place in rng.integers(0, len(raw), 3):
            damaged[place] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            tie = audit(path).evidence.main_tie
            outcomes.add(tie.state if tie else "no tie")
        except BowlineError:
            outcomes.add("refused")
    assert {TieState.DIVERGED, "refused"} <= outcomes


# --- what exporters write ---------------------------------------------------------------------------------------------


class TinyLM(nn.Module):
    """An embedding, something between, and a head."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 32)
        self.norm = nn.LayerNorm(32)
        self.lm_head = nn.Linear(32, 1000, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(self.norm(self.embed(ids).relu()))
        return logits


def export(path: Path, module: nn.Module, ids: torch.Tensor, *, dynamo: bool, **options: Any) -> Path:
    some = {"ids": {0: "batch", 1: "time"}}
    options |= {"verbose": False, "dynamic_shapes": some} if dynamo else {"dynamic_axes": some}
    with warnings.catch_warnings():  # both exporters warn of what torch will remove from under them
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(), (ids,), path, input_names=["ids"], output_names=["logits"], dynamo=dynamo, **options
        )
    return path


IDS = torch.arange(12).view(2, 6)


@pytest.mark.parametrize(
    ("tied", "options", "truth"),
    [
        (True, {"dynamo": True}, TieState.SHARED),
        (True, {"dynamo": False}, TieState.EQUAL),
        (True, {"dynamo": False, "do_constant_folding": False}, TieState.SHARED),
        (False, {"dynamo": True}, TieState.DIVERGED),
        (False, {"dynamo": False}, TieState.DIVERGED),
    ],
)
def test_the_verdict_on_torchs_exports_is_the_truth(
    tmp_path: Path, tied: bool, options: dict[str, Any], truth: TieState
) -> None:
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    report = audit(export(tmp_path / "model.onnx", TinyLM(tied), IDS, **options))
    assert state(report) is truth
    assert [finding.code for finding in report.findings if finding.severity is not Severity.INFO] == (
        ["BW105"] if truth is TieState.EQUAL else []
    )


@pytest.mark.parametrize(
    ("tied", "kind", "per_channel", "truth", "said"),
    [
        (True, "QUInt8", False, TieState.EQUAL, "repeats embed.weight_quantized value by value, transposed: 32 kB"),
        (True, "QUInt8", True, TieState.DIVERGED, "looks like embed.weight_quantized (U8*scale) with other scales"),
        (True, "QInt8", False, TieState.DIVERGED, "looks like embed.weight_quantized (U8*scale) in another type"),
        (False, "QUInt8", False, TieState.DIVERGED, None),
        (False, "QInt8", True, TieState.DIVERGED, None),
    ],
)
def test_the_verdict_on_onnxruntimes_quantisation_is_the_truth(
    tmp_path: Path, tied: bool, kind: str, per_channel: bool, truth: TieState, said: str | None
) -> None:
    quantization = pytest.importorskip("onnxruntime.quantization")
    torch.manual_seed(0)
    path, quantised = export(tmp_path / "model.onnx", TinyLM(tied), IDS, dynamo=False), tmp_path / "quantised.onnx"
    logging.disable(logging.WARNING)
    try:
        quantization.quantize_dynamic(
            path, quantised, per_channel=per_channel, weight_type=getattr(quantization.QuantType, kind)
        )
    finally:
        logging.disable(logging.NOTSET)
    report = audit(quantised)
    assert state(report) is truth
    messages = [finding.message for finding in report.findings if finding.code == "BW105"]
    assert len(messages) == (said is not None)
    assert said is None or said in messages[0]


@pytest.mark.parametrize("tied", [True, False])
def test_the_verdict_on_a_llama_of_transformers_is_the_truth(tmp_path: Path, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.LlamaConfig(
                vocab_size=1000, tie_word_embeddings=tied, attn_implementation="eager", num_key_value_heads=2, **sizes
            )
            self.model = transformers.LlamaForCausalLM(config)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            given = {"attention_mask": torch.zeros(2, 1, 6, 6), "position_ids": torch.arange(6).view(1, 6)}
            logits: torch.Tensor = self.model(input_ids=ids, use_cache=False, **given).logits
            return logits

    torch.manual_seed(0)
    report = audit(export(tmp_path / "model.onnx", Logits(), IDS, dynamo=False))
    assert state(report) is (TieState.EQUAL if tied else TieState.DIVERGED)
    assert report.evidence.declaration.embedding == "model.model.embed_tokens.weight"
