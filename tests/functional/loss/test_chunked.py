"""Features of the chunked backend: several chunks, early gradients, skipped rows, first-order gradients only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bowline.errors import UsageError
from bowline.functional.loss import linear_cross_entropy
from bowline.functional.loss.chunks import chunk_size
from tests.functional.loss.cases import OPTIONS, V, case, gradients


def both(*args: Any, **options: Any) -> tuple[Any, Any]:
    return tuple(linear_cross_entropy(*args, backend=name, **options) for name in ("chunked", "reference"))


@pytest.mark.parametrize("rows", [1, 2, 5, 7, 8])
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[-1]])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_any_number_of_chunks_gives_the_same(
    rows: int, options: dict[str, Any], reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_size, "ROOFLINE", {"cpu": (rows, rows), "cuda": (rows, rows)})
    hidden, weight, labels, bias = case()
    ours, expected = both(hidden, weight, labels, bias=bias, reduction=reduction, **options)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(
        gradients(ours.square().sum(), hidden, weight, bias), gradients(expected.square().sum(), hidden, weight, bias)
    )


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_retained_graph_gives_the_same_gradients_again(reduction: Any) -> None:
    hidden, weight, labels, _ = case()
    loss = linear_cross_entropy(hidden, weight, labels, reduction=reduction, backend="chunked").sum()
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    kept = [one.clone() for one in first]
    second = torch.autograd.grad(loss, (hidden, weight), grad_outputs=torch.tensor(3.0).double())
    torch.testing.assert_close(list(second), [3 * one for one in kept])
    torch.testing.assert_close(list(first), kept)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, (hidden, weight))


def test_gradients_accumulate_in_a_parameter_over_steps() -> None:
    hidden, weight, labels, _ = case()
    for backend in ("chunked", "chunked", "chunked"):
        linear_cross_entropy(hidden.detach(), weight, labels, backend=backend).backward()
    (one,) = gradients(linear_cross_entropy(hidden, weight, labels, backend="reference"), weight)
    torch.testing.assert_close(weight.grad, 3 * one)


def test_losses_of_several_heads_on_one_matrix_add_up() -> None:
    hidden, weight, labels, bias = case()
    found = []
    for backend in ("chunked", "reference"):
        one = linear_cross_entropy(hidden, weight, labels, backend=backend)
        two = linear_cross_entropy(hidden.tanh(), weight, labels, bias=bias, reduction="sum", backend=backend)
        found.append(gradients(one * 0.5 + two, hidden, weight, bias))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias", "hidden weight", "weight bias", "hidden bias"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_its_own(frozen: str) -> None:
    hidden, weight, labels, bias = case()
    assert bias is not None
    ends = {"hidden": hidden, "weight": weight, "bias": bias}
    for name in frozen.split():
        ends[name].requires_grad_(False)
    free = [one for one in ends.values() if one.requires_grad]
    ours, expected = both(hidden, weight, labels, bias=bias)
    torch.testing.assert_close(gradients(ours, *free), gradients(expected, *free))


def test_where_no_gradient_is_wanted_none_is_made() -> None:
    hidden, weight, labels, bias = case()
    with torch.no_grad():
        ours, expected = both(hidden, weight, labels, bias=bias, **OPTIONS[-1])
    assert not ours.requires_grad
    torch.testing.assert_close(ours, expected)


def test_a_factor_for_each_label_gets_a_gradient_too() -> None:
    hidden, weight, labels, _ = case()
    factors = torch.rand(V, dtype=torch.float64, requires_grad=True)
    ours, expected = both(hidden, weight, labels, class_weight=factors)
    torch.testing.assert_close(gradients(ours, factors, weight), gradients(expected, factors, weight))


@pytest.mark.parametrize("factors", [torch.zeros(V), -torch.ones(V)])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_factors_of_0_or_less_in_float16(factors: torch.Tensor, reduction: Any) -> None:
    """Gradients wait as a multiple, which depends on the factors."""
    hidden, weight, labels, bias = case(dtype=torch.float16)
    ours, expected = both(hidden, weight, labels, bias=bias, class_weight=factors.half(), reduction=reduction)
    torch.testing.assert_close(ours, expected, rtol=0.01, atol=0.01)
    torch.testing.assert_close(
        gradients(ours, hidden, weight, bias), gradients(expected, hidden, weight, bias), rtol=0.01, atol=0.01
    )


@pytest.mark.parametrize("options", OPTIONS)
def test_the_lse_alone_has_its_gradient(options: dict[str, Any]) -> None:
    hidden, weight, labels, bias = case()
    (_, ours), (_, expected) = both(hidden, weight, labels, bias=bias, return_lse=True, **options)
    torch.testing.assert_close(
        gradients(ours.square().sum(), hidden, weight, bias), gradients(expected.square().sum(), hidden, weight, bias)
    )


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_what_is_infinite_where_there_is_no_label_is_not_seen(reduction: Any, bad: float) -> None:
    hidden, weight, labels, _ = case(bias=False)
    hidden, clean = hidden.detach(), hidden.detach().clone()
    hidden[labels == -100] = bad
    found = []
    for one in (hidden, clean):
        loss = linear_cross_entropy(one.requires_grad_(), weight, labels, reduction=reduction, backend="chunked").sum()
        found.append([loss, *gradients(loss, one, weight)])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_infinite_at_a_label_makes_the_loss_what_the_reference_makes_it(bad: float) -> None:
    hidden, weight, labels, _ = case(bias=False)
    hidden = hidden.detach()
    hidden[0, 0, 1] = bad
    ours, expected = both(hidden, weight, labels, reduction="none")
    torch.testing.assert_close(ours, expected, equal_nan=True)
    assert not ours[0, 0].isfinite()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_a_vocabulary_of_one_is_certain(size: int, smoothing: float) -> None:
    hidden = torch.randn(4, 3).double().requires_grad_()
    weight = torch.randn(size, 3).double().requires_grad_()
    ours, expected = both(hidden, weight, torch.zeros(4, dtype=torch.long), label_smoothing=smoothing)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(gradients(ours, hidden, weight), gradients(expected, hidden, weight))


def test_tensors_need_not_be_contiguous() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(5, 8, 4).double().requires_grad_()
    weight = torch.randn(5, 22).double().requires_grad_()
    labels, bias = torch.randint(0, 11, (8, 4)).t(), torch.randn(22).double().requires_grad_()
    ends = hidden.transpose(0, 2), weight[:, ::2].t(), labels
    ours, expected = both(*ends, bias=bias[::2])
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(gradients(ours, hidden, weight, bias), gradients(expected, hidden, weight, bias))


@pytest.mark.parametrize("backend", ["chunked", "logits"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_order_gradients_are_refused_in_words(backend: str, reduction: Any) -> None:
    hidden, weight, labels, _ = case()
    loss = linear_cross_entropy(hidden, weight, labels, reduction=reduction, backend=backend).sum()
    factor = torch.ones((), dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(loss * factor, hidden, create_graph=True)
    for end in (hidden, weight, factor):
        with pytest.raises(UsageError, match=r"second-order gradients .*backend=\"reference\""):
            torch.autograd.grad(first.square().sum(), end, retain_graph=True)
