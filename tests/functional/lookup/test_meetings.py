"""One meeting of a matrix's ends serves several graphs, passes and heads, and is left when it no longer fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.functional.loss.cross_entropy import linear_cross_entropy
from bowline.functional.shared_gradient import head_weight, meeting
from bowline.functional.tied_lookup import tied_embedding
from tests.functional.lookup.ends import (
    V,
    body,
    dense_gradients,
    head,
    loss_of,
    matrix,
    near,
    plain,
    tied,
    tokens,
    untied,
)


@pytest.mark.parametrize("first", [0, 1])
def test_graphs_that_share_a_meeting_run_in_any_order(first: int) -> None:
    weight = matrix(torch.float64)
    losses = [tied(plain, weight), tied(plain, weight)]
    for index in (first, 1 - first):
        with dense_gradients(0):
            losses[index].backward()
    near(weight.grad, 2 * untied(plain, weight))


@pytest.mark.parametrize("backend", ["logits", "chunked"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_loss_is_a_head_that_meets_the_lookup(backend: str, reduction: Any) -> None:
    weight, ids = matrix(torch.float64), tokens()
    losses = linear_cross_entropy(
        body(tied_embedding(ids, weight)), weight, ids, backend=backend, reduction=reduction
    ).sum()
    exact = weight.detach().clone().requires_grad_()
    F.cross_entropy(F.linear(body(exact[ids]), exact), ids, reduction=reduction).sum().backward()
    assert exact.grad is not None
    for passes in (1, 2):
        with dense_gradients(0):
            losses.backward(retain_graph=True)
        near(weight.grad, passes * exact.grad)


def test_rows_that_a_failed_pass_has_left_are_not_added_to_another() -> None:
    """The first of two lookups leaves its rows, then the pass fails; the meeting they lie in is not used again."""
    weight = matrix(torch.float64)
    fails = [True]

    def fail(gradient: torch.Tensor) -> None:
        if fails:
            raise ZeroDivisionError

    first = tied_embedding(tokens(seed=3), weight)
    inner = first.tanh()
    inner.register_hook(fail)
    loss = loss_of(head(body(inner + tied_embedding(tokens(seed=4), weight)), weight))
    before = meeting(weight)
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)
    assert before is not None and before.grad_fn is not None
    assert meeting(weight) is not before
    tied(plain, weight).backward()
    near(weight.grad, untied(plain, weight))
    fails.clear()
    (again,) = torch.autograd.grad(loss, weight)
    near(
        again,
        untied(
            lambda lookup, end: loss_of(end(body(lookup(tokens(seed=3)).tanh() + lookup(tokens(seed=4))))),
            weight,
        ),
    )


@pytest.mark.parametrize("change", ["frozen", "another shape", "another dtype"])
def test_a_matrix_that_has_changed_since_the_lookup_is_used_as_it_is(change: str) -> None:
    weight = matrix(torch.float64)
    edge = meeting(weight)
    assert edge is not None and head_weight(weight) is not weight
    if change == "frozen":
        weight.requires_grad_(False)
    else:
        weight.data = weight.data[: V - 1] if change == "another shape" else weight.data.float()
    assert head_weight(weight) is weight


def test_the_head_sees_values_that_were_written_after_the_lookup() -> None:
    weight, other = matrix(torch.float64), matrix(torch.float64, seed=9)
    rows = tied_embedding(tokens(), weight)
    weight.data = other.data.clone()
    assert torch.equal(head(body(rows), weight), body(rows) @ other.t())


def test_a_matrix_that_changes_before_the_backward_pass_is_named() -> None:
    weight = matrix(torch.float64)
    loss = tied(plain, weight)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_meeting_outlives_its_lookups() -> None:
    weight = matrix(torch.float64)
    rows = tied_embedding(tokens(), weight)
    assert head_weight(weight) is not weight
    del rows
    assert head_weight(weight) is weight


def test_a_matrix_without_columns_has_a_gradient_without_columns() -> None:
    weight = matrix(width=0)
    tied_embedding(tokens(), weight).sum().backward()
    assert weight.grad is not None and weight.grad.shape == (V, 0)
