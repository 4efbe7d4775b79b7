"""Graphs of every shape around one matrix: shared where that is certain, dense elsewhere, right in all."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.functional.shared_gradient import head_weight
from bowline.functional.tied_lookup import tied_embedding
from tests.functional.lookup.ends import (
    D,
    Lookup,
    Model,
    V,
    addresses,
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


def two_lookups(lookup: Lookup, to_logits: Lookup) -> torch.Tensor:
    """T5's encoder and decoder, GPT-2's token types."""
    return loss_of(to_logits(body(lookup(tokens(seed=3)) + lookup(tokens(seed=4))) + body(lookup(tokens(seed=5)))))


def two_heads(lookup: Lookup, to_logits: Lookup) -> torch.Tensor:
    hidden = body(lookup(tokens()))
    return loss_of(to_logits(hidden)) + loss_of(to_logits(hidden.sin()), seed=6)


def head_of_something_else_first(lookup: Lookup, to_logits: Lookup) -> torch.Tensor:
    """The lookup's backward runs first: it is made last, and the head does not depend on it."""
    logits = to_logits(torch.linspace(-1, 1, 3 * D, dtype=torch.float64).view(3, D))
    return loss_of(logits) + loss_of(lookup(tokens()))


def lookup_of_predictions(lookup: Lookup, to_logits: Lookup) -> torch.Tensor:
    """A head before a lookup (as in scheduled sampling), and one behind it."""
    first = to_logits(body(lookup(tokens())))
    again = lookup(tokens(seed=8))
    return loss_of(to_logits(again + first.mean())) + loss_of(first)


def no_head(lookup: Lookup, to_logits: Lookup) -> torch.Tensor:
    return loss_of(body(lookup(tokens()) * lookup(tokens(seed=5))))


@pytest.mark.parametrize(
    ("model", "dense"),
    [
        (plain, 0),
        (two_lookups, 0),
        (two_heads, 0),
        (head_of_something_else_first, 1),
        (lookup_of_predictions, 0),
        (no_head, 1),
    ],
)
def test_any_order_and_number_of_ends(model: Model, dense: int) -> None:
    weight = matrix(torch.float64)
    loss = tied(model, weight)
    with dense_gradients(dense):
        loss.backward()
    near(weight.grad, untied(model, weight))


@pytest.mark.parametrize("model", [plain, two_lookups, two_heads, head_of_something_else_first, no_head])
def test_gradients_of_micro_batches_are_added(model: Model) -> None:
    weight = matrix(torch.float64)
    for _ in range(3):
        tied(model, weight).backward()
    near(weight.grad, 3 * untied(model, weight))


@pytest.mark.parametrize("model", [plain, two_lookups, two_heads, head_of_something_else_first, no_head])
def test_a_graph_that_is_kept_gives_the_same_again(model: Model) -> None:
    weight = matrix(torch.float64)
    loss = tied(model, weight)
    (first,) = torch.autograd.grad(loss, weight, retain_graph=True)
    kept = first.clone()
    loss.backward(retain_graph=True)
    loss.backward()
    near(weight.grad, 2 * untied(model, weight))
    assert torch.equal(first, kept)  # what was given out is not written to again


def test_every_pass_over_a_kept_graph_shares_the_gradient() -> None:
    weight = matrix(torch.float64)
    loss = tied(plain, weight)
    for _ in range(3):
        with dense_gradients(0):
            loss.backward(retain_graph=True)


def test_an_ordinary_use_of_the_matrix_beside_both_ends() -> None:
    """A norm of the table in the loss: its gradient comes before the head's, between the ends, and last."""
    weight = matrix(torch.float64)
    early = weight.square().sum()
    rows = body(tied_embedding(tokens(), weight))
    between = weight.sin().sum()
    logits = head(rows, weight)
    late = weight.pow(3).sum()
    (loss_of(logits) + early + between + late).backward()
    exact = weight.detach()
    near(weight.grad, untied(plain, weight) + 2 * exact + exact.cos() + 3 * exact.square())


def test_an_ordinary_linear_head_gives_the_dense_path() -> None:
    weight = matrix(torch.float64)
    loss = loss_of(F.linear(body(tied_embedding(tokens(), weight)), weight))
    with dense_gradients(1):
        loss.backward()
    near(weight.grad, untied(plain, weight))


def test_inputs_of_grad_decide_what_is_made() -> None:
    weight = matrix(torch.float64)
    rows = tied_embedding(tokens(), weight)
    hidden = body(rows)
    loss = loss_of(head(hidden, weight))
    expected = untied(plain, weight)
    grad_weight, grad_rows = torch.autograd.grad(loss, (weight, rows), retain_graph=True)
    near(grad_weight, expected)
    assert grad_weight.data_ptr() == addresses[-1]
    (only_rows,) = torch.autograd.grad(loss, rows, retain_graph=True)
    assert torch.equal(only_rows, grad_rows)
    loss.backward(inputs=[hidden], retain_graph=True)
    assert weight.grad is None
    loss.backward(inputs=[weight], retain_graph=True)
    near(weight.grad, expected)
    through_rows = torch.zeros_like(expected).index_add_(0, tokens(), grad_rows)
    (of_head,) = torch.autograd.grad(loss, weight, retain_graph=True, materialize_grads=True)
    near(of_head - through_rows, expected - through_rows)


def test_a_graph_of_the_gradient_takes_the_dense_path() -> None:
    """Second derivatives through the lookup; a head that can be differentiated twice is F.linear."""
    weight = matrix(torch.float64)

    def model(end: torch.Tensor, other: torch.Tensor, ours: bool) -> torch.Tensor:
        rows = tied_embedding(tokens(), end) if ours else F.embedding(tokens(), end)
        return F.linear(body(rows), other).tanh().sum()

    with dense_gradients(1):
        (first,) = torch.autograd.grad(model(weight, weight, True), weight, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), weight)
    (reference,) = torch.autograd.grad(model(weight, weight, False), weight, create_graph=True)
    (expected,) = torch.autograd.grad(reference.square().sum(), weight)
    near(second, expected)


def test_a_graph_of_the_gradient_is_not_written_to_whatever_the_head_says() -> None:
    """It returns a gradient without a graph."""

    class Detached(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(hidden, weight)
            return hidden @ weight.t()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            hidden, weight = ctx.saved_tensors
            grad_weight = (grads[0].t() @ hidden).detach()
            return grads[0] @ weight, grad_weight

    weight, function = matrix(torch.float64), Detached
    to_logits: Any = function.apply
    loss = loss_of(to_logits(body(tied_embedding(tokens(), weight)), head_weight(weight)))
    with dense_gradients(1):
        (first,) = torch.autograd.grad(loss, weight, create_graph=True)
    near(first.detach(), untied(plain, weight))


def test_second_derivatives_pass_gradgradcheck() -> None:
    weight = matrix(torch.float64, size=5, width=2)
    ids = torch.tensor([[0, 4], [4, 1]])
    for padding_idx in (None, 1):
        assert torch.autograd.gradcheck(lambda table: tied_embedding(ids, table).sin(), weight) or padding_idx
        assert torch.autograd.gradgradcheck(lambda table: tied_embedding(ids, table, padding_idx).sin(), weight)  # noqa: B023


def test_a_head_that_cannot_be_differentiated_twice_says_so() -> None:
    weight = matrix(torch.float64)
    with dense_gradients(1):
        (first,) = torch.autograd.grad(tied(plain, weight), weight, create_graph=True)
    near(first.detach(), untied(plain, weight))
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("ends", ["one cast", "two casts", "the head's cast"])
def test_a_matrix_that_is_no_leaf(ends: str) -> None:
    """The gradients meet where the edges do: at the cast, if both ends were given the same one."""
    weight = matrix(torch.float32)
    one = weight.double()
    source = {"one cast": one, "two casts": weight.double(), "the head's cast": weight}[ends]
    loss = loss_of(head(body(tied_embedding(tokens(), source)).double(), one))
    with dense_gradients(0 if ends == "one cast" else 1):
        loss.backward()
    near(weight.grad, untied(plain, weight))


def test_parts_of_one_split_are_not_taken_for_one_another() -> None:
    """One node, two places: the first part is looked up, the second is the head."""
    both = torch.cat([matrix(torch.float64), matrix(torch.float64, seed=9)]).detach().requires_grad_()
    source, target = both.split(V)
    loss = loss_of(head(body(tied_embedding(tokens(), source)), target))
    with dense_gradients(1):
        loss.backward()
    reference = both.detach().clone().requires_grad_()
    loss_of(body(F.embedding(tokens(), reference[:V])) @ reference[V:].t()).backward()
    assert reference.grad is not None
    near(both.grad, reference.grad)


def test_two_matrices_in_one_graph_are_not_confused() -> None:
    first, second = matrix(torch.float64), matrix(torch.float64, seed=9)
    loss = tied(plain, first) + tied(plain, second) * 2
    with dense_gradients(0):
        loss.backward()
    near(first.grad, untied(plain, first))
    near(second.grad, 2 * untied(plain, second))


def test_a_backward_pass_inside_another_is_another() -> None:
    weight = matrix(torch.float64)
    inner: list[torch.Tensor] = []

    def run(gradient: torch.Tensor) -> None:
        with torch.enable_grad():
            inner.extend(torch.autograd.grad(tied(plain, weight), weight))

    rows = tied_embedding(tokens(), weight)
    hidden = body(rows)
    hidden.register_hook(run)  # between the head's backward and the lookup's
    loss_of(head(hidden, weight)).backward()
    near(inner[0], untied(plain, weight))
    near(weight.grad, untied(plain, weight))


@pytest.mark.parametrize("model", [plain, two_lookups])
def test_a_pass_that_fails_leaves_nothing_behind(model: Model) -> None:
    weight = matrix(torch.float64)

    def fail(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError

    hidden = body(tied_embedding(tokens(), weight))
    handle = hidden.register_hook(fail)
    loss = loss_of(head(hidden, weight))
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)
    assert weight.grad is None
    handle.remove()
    tied(model, weight).backward()
    near(weight.grad, untied(model, weight))


def test_no_memory_is_kept_alive() -> None:
    weight = matrix(torch.float64)
    loss = tied(plain, weight)
    (gradient,) = torch.autograd.grad(loss, weight, retain_graph=True)
    alive = weakref.ref(gradient)
    del gradient
    assert alive() is None  # at once, without a collection
    del loss
    owner = weakref.ref(weight)
    del weight
    gc.collect()
    assert owner() is None


def test_threads_that_train_one_matrix_at_once() -> None:
    weight = matrix(torch.float64)
    results: list[torch.Tensor] = []

    def work() -> None:
        for _ in range(20):
            results.append(torch.autograd.grad(tied(two_lookups, weight), weight)[0])
            tied(plain, weight).backward()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = untied(two_lookups, weight)
    assert len(results) == 80
    for one in results:
        near(one, expected)
    assert weight.grad is not None
    near(weight.grad / 80, untied(plain, weight))


def test_threads_that_run_one_graph_at_once() -> None:
    weight = matrix(torch.float64)
    loss = tied(two_lookups, weight)
    results: list[torch.Tensor] = []

    def work() -> None:
        for _ in range(20):
            results.append(torch.autograd.grad(loss, weight, retain_graph=True)[0])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80
    for one in results:
        near(one, untied(two_lookups, weight))
