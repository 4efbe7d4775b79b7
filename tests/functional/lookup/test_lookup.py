"""Values and gradients of the lookup: F.embedding's, and with a head two untied ends' in float64, added."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

import bowline.nn
from bowline.errors import UsageError
from bowline.functional.kernels import row_sums
from bowline.functional.kernels.row_sums import add_rows
from bowline.functional.tied_lookup import tied_embedding
from bowline.nn.modules.tied_embedding import TiedEmbedding
from tests.functional.lookup.ends import (
    D,
    N,
    V,
    addresses,
    body,
    dense_gradients,
    head,
    loss_of,
    matrix,
    near,
    tokens,
    truth,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("padding_idx", [None, 2, -V])
@pytest.mark.parametrize("shape", [(N,), (3, 5), (1, 1), (2, 0)])
def test_with_a_head_one_buffer_holds_the_sum_of_both_ends(
    dtype: torch.dtype, padding_idx: int | None, shape: tuple[int, ...]
) -> None:
    weight, ids = matrix(dtype), tokens(*shape)
    loss = loss_of(head(body(tied_embedding(ids, weight, padding_idx)).reshape(-1, D), weight).view(*shape, V))
    with dense_gradients(0):
        loss.backward()
    near(weight.grad, truth(weight, ids, None if padding_idx is None else padding_idx % V))
    assert weight.grad is not None and weight.grad.data_ptr() == addresses[-1]


@pytest.mark.parametrize("padding_idx", [None, 3, -1])
def test_rows_are_those_of_f_embedding(padding_idx: int | None) -> None:
    weight, ids = matrix(), tokens(3, 5)
    assert torch.equal(tied_embedding(ids, weight, padding_idx), F.embedding(ids, weight, padding_idx))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("padding_idx", [None, 3, -1])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_without_a_head_the_gradient_is_that_of_f_embedding_to_the_bit(
    dtype: torch.dtype, padding_idx: int | None, kind: torch.dtype
) -> None:
    weight, ids = matrix(dtype), tokens(3, 5).to(kind)
    ids[0, 0] = V - 1
    (ours,) = torch.autograd.grad(loss_of(tied_embedding(ids, weight, padding_idx)), weight)
    (torchs,) = torch.autograd.grad(loss_of(F.embedding(ids, weight, padding_idx)), weight)
    assert torch.equal(ours, torchs)


def test_a_padding_row_keeps_what_the_head_gives_it() -> None:
    weight, ids = matrix(), torch.full((N,), 2)
    loss_of(head(tied_embedding(ids, weight, 2), weight)).backward()
    (of_head,) = torch.autograd.grad(loss_of(head(weight.detach()[ids], weight)), weight)
    assert weight.grad is not None and torch.equal(weight.grad, of_head)
    assert bool((of_head[2] != 0).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kinds", [1, 4, 40])
def test_half_precision_is_no_further_from_the_truth_than_the_dense_path(dtype: torch.dtype, kinds: int) -> None:
    def gradient(lookup: Any) -> torch.Tensor:
        weight.grad = None
        (lookup(ids, weight) * factors).sum().add((head(hidden, weight) * of_logits).sum()).backward()
        assert weight.grad is not None
        return weight.grad.double()

    generator = torch.Generator().manual_seed(kinds)
    weight = matrix(dtype, size=60, width=32)
    ids = torch.randint(0, kinds, (200,), generator=generator)
    factors = torch.randn(200, 32, generator=generator).to(dtype)
    hidden = torch.randn(16, 32, generator=generator).to(dtype)
    of_logits = torch.randn(16, 60, generator=generator).to(dtype)
    exact = of_logits.double().t() @ hidden.double()
    exact.index_add_(0, ids, factors.double())
    ours, dense = ((gradient(one) - exact).norm() / exact.norm() for one in (tied_embedding, F.embedding))
    assert ours <= dense
    assert ours < 2 * torch.finfo(dtype).eps


@settings(max_examples=60)
@given(
    size=st.integers(1, 40),
    width=st.integers(1, 70),
    length=st.integers(0, 60),
    kinds=st.integers(1, 40),
    padded=st.booleans(),
    read_ids=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**16),
)
def test_added_rows_are_rounded_once(
    size: int, width: int, length: int, kinds: int, padded: bool, read_ids: bool, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(size, width, generator=generator).to(dtype)
    ids = torch.randint(0, min(kinds, size), (length,), generator=generator)
    rows = torch.randn(length, width, generator=generator).to(dtype)
    padding_idx = int(ids[0]) if padded and length else -1
    counted = (ids != padding_idx).double()[:, None]
    one_hot = F.one_hot(ids, size).double().t()
    exact = table.double() + one_hot @ (rows.double() * counted)
    among = table.double().abs() + one_hot @ (rows.double() * counted).abs()  # what the sums' own errors are a share of
    add_rows(table, ids, rows, padding_idx=padding_idx, read_ids=read_ids)
    wide = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    allowed = exact.abs() * torch.finfo(dtype).eps / 2 + among * wide * (length + 2) + least
    assert bool(((table.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("read_ids", [True, False])
def test_many_rows_are_summed_in_blocks_of_columns(read_ids: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    ids, rows = tokens(50), torch.randn(50, 200, generator=generator).bfloat16()
    tables = [torch.zeros(V, 200, dtype=torch.bfloat16) for _ in range(2)]
    add_rows(tables[0], ids, rows, read_ids=read_ids)
    monkeypatch.setattr(row_sums, "NUMBERS", 1)
    add_rows(tables[1], ids, rows, read_ids=read_ids)
    assert torch.equal(*tables)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("read_ids", [True, False])
def test_ids_may_be_int32_and_rows_narrower_than_the_table(dtype: torch.dtype, read_ids: bool) -> None:
    ids, rows = tokens(), torch.randn(N, D).bfloat16()
    tables = [torch.zeros(V, D, dtype=dtype) for _ in range(3)]
    add_rows(tables[0], ids, rows.to(dtype), read_ids=read_ids)
    add_rows(tables[1], ids.int(), rows.to(dtype), read_ids=read_ids)
    add_rows(tables[2], ids, rows, read_ids=read_ids)
    assert torch.equal(tables[0], tables[1]) and torch.equal(tables[0], tables[2])


def test_a_sparse_gradient_stays_sparse() -> None:
    table = TiedEmbedding(V, D, sparse=True)
    table(tokens()).sum().backward()
    assert table.weight.grad is not None and table.weight.grad.is_sparse


def test_a_gradient_that_is_expanded_or_strided_is_added() -> None:
    weight, ids = matrix(torch.float64), tokens(N)
    loss = tied_embedding(ids, weight).sum() + loss_of(head(torch.ones(N, D, dtype=torch.float64), weight))
    with dense_gradients(0):
        loss.backward()
    target = weight.detach().clone().requires_grad_()
    loss_of(torch.ones(N, D, dtype=torch.float64) @ target.t()).backward()
    assert target.grad is not None
    near(weight.grad, target.grad + torch.bincount(ids, minlength=V)[:, None])


@pytest.mark.parametrize("frozen", [True, False])
def test_a_weight_that_needs_no_gradient_gets_none(frozen: bool) -> None:
    weight, ids = matrix(), tokens()
    if frozen:
        weight.requires_grad_(False)
        assert not tied_embedding(ids, weight).requires_grad
    else:
        with torch.no_grad():
            assert not tied_embedding(ids, weight).requires_grad


def test_wrong_arguments_are_told() -> None:
    weight, ids = matrix(), tokens()
    with pytest.raises(UsageError, match=r"weight \(13,\): expected \(V, D\)"):
        tied_embedding(ids, weight[:, 0])
    with pytest.raises(UsageError, match=r"ids of torch.float32"):
        tied_embedding(ids.float(), weight)
    for wrong in (V, -V - 1):
        with pytest.raises(UsageError, match=f"padding_idx={wrong} for weight"):
            tied_embedding(ids, weight, wrong)
    with pytest.raises(IndexError):
        tied_embedding(torch.tensor([V]), weight)


def test_it_is_called_by_its_public_name() -> None:
    """`bowline.nn.tied_embedding(ids, weight)`: no module stands in the way of the function."""
    assert bowline.nn.tied_embedding is tied_embedding and bowline.nn.TiedEmbedding is TiedEmbedding
