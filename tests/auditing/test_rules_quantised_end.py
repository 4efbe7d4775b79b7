"""BW118 and the states of ties with a quantised end: one table, two that are equal, equal but for rounding, or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from bowline.auditing import Severity, audit
from bowline.auditing.verdict import verdict
from bowline.checkpoint.formats.numpy_writer import Bits
from bowline.tie import TieState
from tests.checkpoint.formats.quantised.vectors import read_vectors
from tests.checkpoints import LLAMA, Tensors, codes, one, write

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
VECTORS = read_vectors()
MLX, GPTQ, AWQ = "mlx 4 bits, groups of 32", "gptq 4 bits, gptq", "awq 4 bits"
FP8, PACKED, TORCHAO = "fp8 blocks [8, 16]", "pack-quantized 4 bits, 32, symmetric", "torchao int8"
NUMPY = {"U8": "u1", "I8": "i1", "I32": "<i4", "I64": "<i8", "U32": "<u4", "F16": "<f2", "F32": "<f4"}
ROWS = 16


def trained() -> npt.NDArray[np.float32]:
    """The table that the vectors were quantised from (`tools/quantised_vectors.py`)."""
    random = np.random.default_rng(2026)
    rows = random.normal(0, 0.05, (ROWS, 64)) * random.uniform(0.3, 2, (ROWS, 1))
    rows[3] = 0
    rows[5, 7] = 1.5
    return rows.astype(np.float32)


OTHER = np.random.default_rng(7).normal(0, 0.05, (ROWS, 64)).astype(np.float32)


def quantised(case: str, stem: str) -> dict[str, Any]:
    """The tensors of a recorded weight, at this end."""
    tensors: dict[str, Any] = {}
    for name, tensor in VECTORS[case].memory.tensors.items():
        raw, there = VECTORS[case].memory.bytes[name], stem + name.removeprefix("head.")
        if tensor.dtype in NUMPY:
            tensors[there] = np.frombuffer(raw, NUMPY[tensor.dtype]).reshape(tensor.shape).copy()
        else:
            tensors[there] = Bits(tensor.dtype, np.frombuffer(raw, "u1").reshape(tensor.shape))
    return tensors


def saved(place: Path, tensors: Tensors, case: str, *, tied: bool = True) -> Path:
    config = {**LLAMA, "vocab_size": ROWS, "tie_word_embeddings": tied, **VECTORS[case].config}
    recorded = VECTORS[case].metadata.get("head.weight")
    metadata = {HEAD: recorded, EMBED: recorded} if recorded else None
    return write(place, tensors, config, metadata=metadata)


def tie_of(place: Path, **options: Any) -> Any:
    return audit(place, **options).evidence.main_tie


@pytest.mark.parametrize("case", [MLX, FP8, PACKED, TORCHAO])
def test_a_single_quantised_table_is_shared(tmp_path: Path, case: str) -> None:
    place = saved(tmp_path, quantised(case, "model.embed_tokens."), case)
    assert tie_of(place).state is TieState.SHARED
    assert tie_of(place, values=False).state is TieState.SHARED
    found = one(place, "BW118")
    assert found.severity is Severity.INFO
    assert found.message.endswith(f"is stored, and serves {HEAD} too")


@pytest.mark.parametrize("case", [MLX, FP8, PACKED, TORCHAO, GPTQ, AWQ])
def test_bw118_warns_of_the_same_codes_at_both_ends_of_a_tied_model(tmp_path: Path, case: str) -> None:
    tensors = quantised(case, "model.embed_tokens.") | quantised(case, "lm_head.")
    place = saved(tmp_path, tensors, case)
    tie = tie_of(place)
    assert tie.state is TieState.EQUAL
    assert tie.quantised.alike
    assert tie_of(place, values=False).state is None
    found = one(place, "BW118")
    assert found.severity is Severity.WARNING
    assert "equal in every value" in found.message
    assert not {"BW101", "BW105"} & set(codes(place))


@pytest.mark.parametrize("case", [MLX, FP8, PACKED, TORCHAO, AWQ])
def test_the_same_codes_of_an_untied_model_are_information(tmp_path: Path, case: str) -> None:
    tensors = quantised(case, "model.embed_tokens.") | quantised(case, "lm_head.")
    place = saved(tmp_path, tensors, case, tied=False)
    assert one(place, "BW118").severity is Severity.INFO
    assert "BW112" in codes(place)


@pytest.mark.parametrize("case", [MLX, "mlx 2 bits, groups of 64", "mlx 8 bits, groups of 32", FP8, TORCHAO, AWQ])
def test_a_quantised_head_of_the_embedding_is_equal_within_its_quantisation(tmp_path: Path, case: str) -> None:
    place = saved(tmp_path, quantised(case, "lm_head.") | {EMBED: trained()}, case)
    tie = tie_of(place)
    assert tie.state is TieState.DIVERGED
    assert tie.quantised.within is not None
    assert 0.25 < tie.quantised.within <= 1
    assert tie.difference.dtype == tie.quantised.layouts
    found = one(place, "BW118")
    assert found.severity is Severity.INFO
    assert "equal within the quantisation" in found.message
    assert "BW101" not in codes(place)


@pytest.mark.parametrize(
    ("tied", "says"),
    [
        (True, "one matrix but for its quantisation, stored twice"),
        (False, "two matrices, equal within the quantisation"),
    ],
)
def test_the_verdict_on_a_head_within_its_quantisation_follows_the_flag(tmp_path: Path, tied: bool, says: str) -> None:
    """An untied head that training moved by less than a step looks the same, so it is not called the one matrix."""
    place = saved(tmp_path, quantised(FP8, "lm_head.") | {EMBED: trained()}, FP8, tied=tied)
    assert verdict(audit(place).evidence).startswith(says)


@pytest.mark.parametrize("case", VECTORS)
def test_values_moved_by_up_to_half_a_step_are_within_and_by_three_steps_are_not(tmp_path: Path, case: str) -> None:
    vector = VECTORS[case]
    table = vector.memory.recognise(vector.config, vector.metadata)
    assert table is not None
    values, steps = table.rows(vector.memory.stored, 0, ROWS)
    moved = values + np.random.default_rng(0).uniform(-0.5, 0.5, values.shape).astype(np.float32) * steps
    near = tie_of(saved(tmp_path / "near", quantised(case, "lm_head.") | {EMBED: moved}, case))
    assert near.state is TieState.DIVERGED
    assert 0.3 < near.quantised.within <= 0.51
    moved[7] += 3 * np.broadcast_to(steps, values.shape)[7]
    far = saved(tmp_path / "far", quantised(case, "lm_head.") | {EMBED: moved}, case)
    assert tie_of(far).quantised.within is None
    assert "more than quantisation explains" in one(far, "BW118").message
    assert "BW101" in codes(far)
    exact = tie_of(saved(tmp_path / "exact", quantised(case, "lm_head.") | {EMBED: values}, case))
    assert exact.state is TieState.EQUAL


def test_rows_of_codes_that_differ_are_counted_and_never_called_rounding(tmp_path: Path) -> None:
    tensors = quantised(MLX, "model.embed_tokens.") | quantised(MLX, "lm_head.")
    tensors["lm_head.weight"][[2, 9], 0] ^= 1
    tie = tie_of(saved(tmp_path, tensors, MLX))
    assert tie.state is TieState.DIVERGED
    assert (tie.difference.rows_differing, tie.difference.some_rows) == (2, (2, 9))
    assert tie.quantised.within is None
    assert "BW101" in codes(tmp_path)


def test_bw118_names_layout_and_size_of_each_end(tmp_path: Path) -> None:
    place = saved(tmp_path, quantised(GPTQ, "lm_head.") | {EMBED: OTHER}, GPTQ, tied=False)
    message = one(place, "BW118").message
    assert f"{HEAD} (GPTQ 4 bits, groups of 32, " in message
    assert f"{EMBED} (F32, 4.1 kB)" in message


def test_bw118_is_not_said_of_a_float_head(tmp_path: Path) -> None:
    assert "BW118" not in codes(write(tmp_path, {EMBED: trained(), HEAD: OTHER}, {**LLAMA, "vocab_size": ROWS}))


def test_ends_of_two_shapes_are_incompatible(tmp_path: Path) -> None:
    place = saved(tmp_path, quantised(MLX, "lm_head.") | {EMBED: trained()[:, :32].copy()}, MLX)
    assert tie_of(place).state is TieState.INCOMPATIBLE
    assert "different shapes" in one(place, "BW118").message


def test_parts_that_do_not_fit_leave_the_state_open_with_the_reason(tmp_path: Path) -> None:
    tensors = quantised(GPTQ, "lm_head.") | {EMBED: trained()}
    tensors["lm_head.g_idx"] = np.full(64, 99, np.int32)
    place = saved(tmp_path, tensors, GPTQ)
    tie = tie_of(place)
    assert tie.state is None
    assert "groups from 99 to 99" in tie.quantised.reason
    assert "not compared: " in one(place, "BW118").message


def test_the_json_report_has_layout_size_and_distance(tmp_path: Path) -> None:
    place = saved(tmp_path, quantised(MLX, "lm_head.") | {EMBED: trained()}, MLX)
    (tie,) = json.loads(json.dumps(audit(place).as_dict()))["ties"]
    record = tie["quantised"]
    assert record["target"] == {"layout": "MLX 4 bits, groups of 32", "bytes": 512 + 2 * 128}
    assert record["source"] is None
    assert 0.25 < record["within_steps"] <= 1
    assert record["reason"] is None


def test_fp8_codes_are_not_described_as_values(tmp_path: Path) -> None:
    place = saved(tmp_path, quantised(FP8, "lm_head.") | quantised(FP8, "model.embed_tokens."), FP8)
    assert audit(place).evidence.tables == ()
