"""The loss at the head against torch's own, and against sums spelled out in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.functional.loss import linear_cross_entropy
from tests.functional.loss.cases import BACKENDS, OPTIONS, TORCHS_OWN, V, by_hand, case, gradients


@pytest.mark.parametrize("backend", [*BACKENDS, TORCHS_OWN, "auto"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_values_and_gradients_are_those_of_torchs_cross_entropy(backend: str, smoothing: float, reduction: str) -> None:
    hidden, weight, labels, bias = case()
    ours = linear_cross_entropy(
        hidden,
        weight,
        labels,
        bias=bias,
        label_smoothing=smoothing,
        reduction=reduction,  # type: ignore[arg-type]
        backend=backend,
    )
    logits = F.linear(hidden, weight, bias).flatten(0, 1)
    theirs = F.cross_entropy(logits, labels.flatten(), label_smoothing=smoothing, reduction=reduction)
    assert ours.shape == (labels.shape if reduction == "none" else ())
    torch.testing.assert_close(ours.flatten(), theirs.flatten())
    torch.testing.assert_close(
        gradients(ours.square().sum(), hidden, weight, bias), gradients(theirs.square().sum(), hidden, weight, bias)
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_values_are_those_of_the_sum_spelled_out(backend: str, options: dict[str, Any], weighted: bool) -> None:
    hidden, weight, labels, bias = case()
    class_weight = torch.rand(V, dtype=torch.float64) if weighted else None
    losses, divisor, lses = by_hand(hidden, weight, labels, bias, class_weight=class_weight, **options)
    for reduction, expected in (
        ("none", torch.tensor(losses).view(2, 4)),
        ("sum", torch.tensor(sum(losses))),
        ("mean", torch.tensor(sum(losses) / divisor)),
    ):
        loss, lse = linear_cross_entropy(
            hidden,
            weight,
            labels,
            bias=bias,
            class_weight=class_weight,
            reduction=reduction,  # type: ignore[arg-type]
            return_lse=True,
            backend=backend,
            **options,
        )
        torch.testing.assert_close(loss, expected.double(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(lse, torch.tensor(lses).view(2, 4).double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_factor_for_each_label_is_torchs(backend: str, reduction: Any) -> None:
    hidden, weight, labels, bias = case()
    factors = torch.rand(V, dtype=torch.float64)
    ours = linear_cross_entropy(
        hidden, weight, labels, bias=bias, class_weight=factors, reduction=reduction, backend=backend
    )
    theirs = F.cross_entropy(
        F.linear(hidden, weight, bias).flatten(0, 1), labels.flatten(), weight=factors, reduction=reduction
    )
    torch.testing.assert_close(ours.flatten(), theirs.flatten())
    torch.testing.assert_close(
        gradients(ours.sum(), hidden, weight, bias), gradients(theirs.sum(), hidden, weight, bias)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_positions_without_a_label_add_nothing_and_get_no_gradient(backend: str) -> None:
    hidden, weight, labels, _ = case(bias=False)
    loss = linear_cross_entropy(
        hidden, weight, labels, label_smoothing=0.1, z_loss=0.1, reduction="sum", backend=backend
    )
    counted = labels != -100
    alone = linear_cross_entropy(
        hidden[counted], weight, labels[counted], label_smoothing=0.1, z_loss=0.1, reduction="sum", backend=backend
    )
    torch.testing.assert_close(loss, alone)
    (gradient,) = gradients(loss, hidden)
    assert not gradient[~counted].any()
    assert gradient[counted].abs().sum(-1).min() > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_index_may_be_the_ignored_one(backend: str) -> None:
    hidden, weight, labels, _ = case(bias=False)
    expected = linear_cross_entropy(hidden, weight, labels, backend=backend)
    renamed = labels.masked_fill(labels == -100, 0)
    torch.testing.assert_close(linear_cross_entropy(hidden, weight, renamed, ignore_index=0, backend=backend), expected)


@pytest.mark.parametrize("backend", [*BACKENDS, TORCHS_OWN])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("shape", [(2, 4), (0,), (3, 0)])
def test_without_any_label_loss_and_gradients_are_zero(backend: str, reduction: Any, shape: tuple[int, ...]) -> None:
    hidden, weight, labels, bias = case(*shape)
    labels = torch.full_like(labels, -100)
    loss = linear_cross_entropy(hidden, weight, labels, bias=bias, reduction=reduction, backend=backend)
    assert loss.item() == 0
    assert all(torch.equal(one, torch.zeros_like(one)) for one in gradients(loss, hidden, weight, bias))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_masked_tokens_get_no_gradient(backend: str) -> None:
    hidden, weight, labels, bias = case()
    loss, logits = linear_cross_entropy(
        hidden, weight, labels, bias=bias, mask_ids=[0, 3], label_smoothing=0.1, return_logits=True, backend=backend
    )
    assert torch.equal((logits == -torch.inf).nonzero()[:, -1].unique(), torch.tensor([0, 3]))
    grad_weight, grad_bias = gradients(loss, weight, bias)
    assert not grad_weight[[0, 3]].any() and not grad_bias[[0, 3]].any()
    assert grad_weight.isfinite().all() and grad_weight[1].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_masked_twice_is_masked_once(backend: str) -> None:
    hidden, weight, labels, _ = case()
    once, twice = (
        linear_cross_entropy(hidden, weight, labels, mask_ids=ids, label_smoothing=0.1, backend=backend)
        for ids in ([0, 3], [0, 3, 3])
    )
    torch.testing.assert_close(twice, once)
    torch.testing.assert_close(gradients(twice, hidden, weight), gradients(once, hidden, weight))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_returned_is_what_was_asked_for(backend: str) -> None:
    hidden, weight, labels, bias = case()
    options: dict[str, Any] = {"bias": bias, "softcap": 2.0, "backend": backend}
    loss = linear_cross_entropy(hidden, weight, labels, **options)
    assert isinstance(loss, torch.Tensor)
    one, lse, logits = linear_cross_entropy(hidden, weight, labels, return_lse=True, return_logits=True, **options)
    assert torch.equal(one, loss)
    expected = 2.0 * torch.tanh(F.linear(hidden, weight, bias) / 2.0)
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(lse, expected.exp().sum(-1).log())
    assert len(linear_cross_entropy(hidden, weight, labels, return_logits=True, **options)) == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_in_the_thousands_do_not_overflow(backend: str) -> None:
    hidden, weight, labels, _ = case(dtype=torch.float32)
    loss = linear_cross_entropy(hidden * 1000, weight, labels, backend=backend)
    expected = F.cross_entropy((hidden * 1000 @ weight.T).flatten(0, 1).double(), labels.flatten())
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    assert all(gradient.isfinite().all() for gradient in gradients(loss, hidden, weight))


@pytest.mark.parametrize("backend", ["logits", "chunked"])
def test_in_float32_a_large_vocabulary_costs_no_digits(backend: str) -> None:
    """The powers of all tokens are added in an order that rounds little."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(8, 64), torch.randn(262_144, 64) * 0.3
    labels = torch.randint(0, len(weight), (8,))
    exact = torch.nn.functional.cross_entropy(hidden.double() @ weight.double().T, labels)
    found = linear_cross_entropy(hidden, weight, labels, backend=backend)
    assert abs(float(found) - float(exact)) < 1e-6 * float(exact)
