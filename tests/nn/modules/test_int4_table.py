"""The int4 table, and int8 with groups: within their bounds, one table for both ends, kept by all that keeps int8's."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from bowline import audit
from bowline.errors import CheckpointError, TieError
from bowline.nn import (
    check_ties,
    load_checkpoint,
    quantize_tied,
    resize_vocab,
    save_checkpoint,
    tie_weights,
    untie_weights,
)
from bowline.nn.modules.int4_table import Int4Table
from bowline.nn.modules.quantized_ends import QuantizedEmbedding, QuantizedHead
from bowline.nn.modules.quantized_table import QuantizedTable
from bowline.nn.tree.table_slots import SharedTable
from tests.nn.models import TinyLM
from tests.nn.modules.test_quantized_families import BUILDERS, built, logits

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ROWS, WIDTH, GROUP = 300, 64, 32
FORMS: list[Any] = [{"dtype": "int4", "group_size": 8}, {"dtype": "int8", "group_size": 8}]


def matrix_of(dtype: torch.dtype, rows: int = ROWS, width: int = WIDTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(rows, width, generator=generator, dtype=torch.float64) * torch.logspace(-3, 3, rows)[:, None]
    matrix[0] = 0
    matrix[1, 1:] = 0  # one entry, which is the largest
    matrix[2] = matrix[2].abs() + 1  # no entry below zero, and none near it
    matrix[3] = -matrix[2]
    matrix = matrix.to(dtype)
    matrix[4], matrix[5] = torch.finfo(dtype).max, -torch.finfo(dtype).max
    matrix[6, ::2] = torch.finfo(dtype).max
    matrix[6, 1::2] = -torch.finfo(dtype).max
    return matrix


def decoded(table: Int4Table, size: int) -> torch.Tensor:
    """The matrix by the equation of the docstring, in float64, code by code."""
    rows, width = table.shape
    exact = torch.empty(rows, width, dtype=torch.float64)
    for column in range(width):
        group, place = divmod(column, size)
        octets = table.values[:, group * size // 2 + place % (size // 2)]
        codes = octets % 16 if place < size // 2 else octets // 16
        exact[:, column] = table.scale[:, group].double() * (codes.double() - table.zero[:, group].double() / 16)
    return exact


@pytest.mark.parametrize("size", [2, 8, GROUP, WIDTH])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_int4_entry_is_off_by_at_most_its_bound(dtype: torch.dtype, size: int) -> None:
    matrix = matrix_of(dtype)
    table = Int4Table(matrix, size)
    assert (table.values.dtype, table.scale.dtype, table.zero.dtype) == (torch.uint8, dtype, torch.uint8)
    exact, eps = decoded(table, size), torch.finfo(dtype).eps
    scale = table.scale.double().repeat_interleave(size, 1)
    assert bool(((matrix.double() - exact).abs() <= (1 / 2 + 1 / 32 + 15 * eps) * scale * (1 + 1e-6)).all())
    rounding = exact.abs() * eps / 2 + torch.finfo(dtype).tiny
    assert bool(((table.rows().double() - exact).abs() <= rounding).all()), "rounded to the dtype once"
    assert bool(torch.isfinite(table.rows()).all())
    ids = torch.tensor([[5, 0], [299, 5]])
    assert torch.equal(table.rows(ids), table.rows()[ids])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_int8_entry_is_off_by_at_most_half_its_groups_scale(dtype: torch.dtype) -> None:
    matrix = matrix_of(dtype)
    table = QuantizedTable(matrix, 8)
    assert table.scale.shape == (ROWS, WIDTH // 8)
    scale = table.scale.double().repeat_interleave(8, 1)
    exact = table.values.double() * scale
    assert bool(((matrix.double() - exact).abs() <= scale / 2 * (1 + 1e-12)).all())
    assert float((matrix[7:].double() - exact[7:]).norm()) < float(
        (matrix[7:].double() - QuantizedTable(matrix).rows()[7:].double()).norm()
    )


def test_the_bytes_are_within_the_limits_of_bfloat16s() -> None:
    matrix = torch.randn(64, 576).bfloat16()
    for form, most in ((Int4Table(matrix, 32), 0.30), (QuantizedTable(matrix), 0.52)):
        stored = sum(part.nbytes for part in form.buffers())
        assert stored <= most * matrix.nbytes, form


@pytest.mark.parametrize("states", [1, 3, 40])
@pytest.mark.parametrize("shape", [(9_000, 32, 32), (50, 6, 2), (1, 8, 4), (2000, 640, 64)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_logits_are_as_exact_as_the_float_product(
    dtype: torch.dtype, shape: tuple[int, int, int], states: int
) -> None:
    rows, width, size = shape
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(rows, width, generator=generator).to(dtype)
    hidden = torch.randn(states, width, generator=generator)
    hidden[0, 0] = 30  # one large entry, as trained models have
    hidden = hidden.to(dtype)
    for table in (Int4Table(matrix, size), QuantizedTable(matrix, size)):
        with torch.no_grad():
            found = table.product(hidden)
        scale = table.scale.double().repeat_interleave(size, 1)
        stood_for = decoded(table, size) if isinstance(table, Int4Table) else table.values.double() * scale
        wanted = F.linear(hidden.double(), stood_for)
        most = F.linear(hidden.double().abs(), 127 * scale if isinstance(table, QuantizedTable) else 16 * scale)
        assert found.dtype is dtype
        rounding = wanted.abs() * torch.finfo(dtype).eps + most * (1e-6 if dtype is not torch.float64 else 1e-15)
        assert bool(((found.double() - wanted).abs() <= rounding).all())


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_gradient_and_vmap_go_through_the_float_product(form: dict[str, Any]) -> None:
    model = TinyLM(50, 16).double()
    tie_weights(model, on_conflict="source")
    quantize_tied(model, **form)
    table = cast(SharedTable, model.emb.table)
    hidden = torch.randn(3, 16, dtype=torch.float64, requires_grad=True)
    model.head(hidden).sum().backward()
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad[0], table.rows().sum(0))
    with torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(table.product)(hidden), table.product(hidden))
        assert table.product(hidden[:0]).shape == (0, 50)
        assert table.rows(torch.empty(0, dtype=torch.int64)).shape == (0, 16)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", BUILDERS)
def test_each_family_computes_what_the_rounded_matrix_gives_and_is_saved_and_loaded(
    name: str, form: dict[str, Any], tmp_path: Path
) -> None:
    model, plain = built(name), built(name)
    ties = quantize_tied(model, **form)
    end = next(module for module in model.modules() if isinstance(module, QuantizedEmbedding))
    with torch.no_grad():
        plain.get_input_embeddings().weight.copy_(end.weight)
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-5, atol=1e-5)
    save_checkpoint(model, tmp_path)
    entry = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert {key: entry[key] for key in form} == form
    with torch.device("meta"):
        again = type(model)(plain.config).eval()
    assert set(load_checkpoint(again, tmp_path).tied) == set(ties)
    assert check_ties(again)
    assert torch.equal(logits(again), logits(model))
    copies: list[Any] = [copy.deepcopy(again), pickle.loads(pickle.dumps(again)), again.to(torch.float64).float()]
    for other in copies:
        assert check_ties(other)
        assert torch.equal(logits(other), logits(model))
    kinds = {type(module) for module in plain.modules()}
    untie_weights(again)
    assert {type(module) for module in again.modules()} == kinds
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", ["mean", "copy:7"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_resized_table_keeps_the_codes_of_its_rows(form: dict[str, Any], rule: str) -> None:
    model, plain = built("llama"), built("llama")
    quantize_tied(model, **form)
    table = model.get_input_embeddings().table
    with torch.no_grad():
        plain.get_input_embeddings().weight.copy_(table.rows())
    rows = len(table.values)
    before = {name: getattr(table, name).clone() for name in table.PARTS}
    resize_vocab(model, rows + 5, new_rows=rule)
    resize_vocab(plain, rows + 5, new_rows=rule)
    for name, part in before.items():
        assert torch.equal(getattr(table, name)[:rows], part), name
    fresh = plain.get_input_embeddings().weight[rows:].detach()
    assert table.shape == (rows + 5, 16)
    assert float((table.rows()[rows:] - fresh).abs().max()) <= float(table.scale[rows:].max()) * 0.54
    if rule == "copy:7":
        assert torch.equal(table.rows()[rows:], table.rows()[7].expand(5, 16))
    assert check_ties(model)
    resize_vocab(model, [3, 1, 2, 0], new_rows=rule)
    assert torch.equal(table.zero if form["dtype"] == "int4" else table.scale, before[table.PARTS[-1]][[3, 1, 2, 0]])


def test_a_checkpoint_of_another_width_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model, wider = TinyLM(50, 8), TinyLM(50, 16)
    for one in (model, wider):
        tie_weights(one, on_conflict="source")
    quantize_tied(wider, dtype="int4", group_size=16)
    save_checkpoint(wider, tmp_path)
    with pytest.raises(CheckpointError, match=r"emb\.table\.values has codes for 16 columns, but emb\.weight has 8"):
        load_checkpoint(model, tmp_path)
    assert type(model.emb) is nn.Embedding


def test_untied_ends_are_refused_and_a_load_does_not_tie_them(tmp_path: Path) -> None:
    model, untied = TinyLM(50, 8), TinyLM(50, 8)
    with pytest.raises(TieError, match="no matrix is shared"):
        quantize_tied(untied, dtype="int4", group_size=8)
    tie_weights(model, on_conflict="source")
    quantize_tied(model, dtype="int4", group_size=8)
    save_checkpoint(model, tmp_path)
    with pytest.raises(TieError, match=r"the checkpoint has one int4 table .*head\.weight could"):
        load_checkpoint(untied, tmp_path)
    assert not isinstance(untied.head, QuantizedHead)


def test_a_matrix_that_is_not_finite_is_refused() -> None:
    for number in (torch.nan, torch.inf, -torch.inf):
        model = TinyLM(50, 8)
        tie_weights(model, on_conflict="source")
        model.emb.weight.data[3, 2] = number
        with pytest.raises(TieError, match=r"emb\.weight: holds values that are not finite"):
            quantize_tied(model, dtype="int4", group_size=8)


def test_the_audit_names_the_table_and_its_state(tmp_path: Path) -> None:
    model = built("llama")
    quantize_tied(model, dtype="int4", group_size=8)
    save_checkpoint(model, tmp_path)
    report = audit(tmp_path)
    (tie,) = [tie for tie in report.evidence.ties if tie.quantised is not None]
    assert str(tie.state) == "SHARED"
    assert tie.quantised is not None
    assert tie.quantised.layouts == "int4 table of quantize_tied, groups of 8"
    (found,) = [finding for finding in report.findings if finding.code == "BW116"]
    assert "model.embed_tokens.table is an int4 table that quantize_tied made" in found.message
