"""Gradients against finite differences, float64, and both ends of a tied matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.functional.loss import full_logits, linear_cross_entropy
from tests.functional.loss.cases import BACKENDS, OPTIONS, V, case, gradients


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_the_backward_pass_of_logits_is_that_of_finite_differences(options: dict[str, Any], bias: bool) -> None:
    hidden, weight, labels, added = case(1, 3, bias=bias)
    mixture = torch.randn(1, 3, V).double()

    def all_at_once(hidden: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The losses, the lse, and the logits, whose three gradients arrive together."""
        loss, lse, logits = linear_cross_entropy(
            hidden,
            weight,
            labels,
            bias=rest[0] if rest else None,
            reduction="none",
            return_lse=True,
            return_logits=True,
            backend="logits",
            **options,
        )
        return loss, lse.sin(), (logits.masked_fill(logits == -torch.inf, 0) * mixture).sum()

    leaves = (hidden, weight) if added is None else (hidden, weight, added)
    assert torch.autograd.gradcheck(all_at_once, leaves)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("wanted", ["loss", "lse", "logits", "all"])
def test_all_backends_have_the_same_gradients_whatever_they_flow_into(options: dict[str, Any], wanted: str) -> None:
    found = []
    for backend in BACKENDS:
        hidden, weight, labels, bias = case()
        loss, lse, logits = linear_cross_entropy(
            hidden, weight, labels, bias=bias, return_lse=True, return_logits=True, backend=backend, **options
        )
        parts = {
            "loss": loss.square(),
            "lse": lse.square().sum(),
            "logits": logits.masked_fill(logits == -torch.inf, 0).square().sum(),
        }
        total = sum(parts.values()) if wanted == "all" else parts[wanted]
        assert isinstance(total, torch.Tensor)
        found.append(gradients(total, hidden, weight, bias))
    torch.testing.assert_close(found[1:], found[:1] * 2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", OPTIONS)
def test_of_a_tied_matrix_the_gradient_is_the_sum_of_both_ends(backend: str, options: dict[str, Any]) -> None:
    _, weight, labels, bias = case()
    ids = torch.randint(0, V, labels.shape)

    def loss_of(table: torch.Tensor, head: torch.Tensor) -> Any:
        hidden = torch.tanh(F.embedding(ids, table))
        return linear_cross_entropy(hidden, head, labels, bias=bias, backend=backend, **options)

    table, head = (weight.detach().clone().requires_grad_() for _ in range(2))
    grad_table, grad_head = gradients(loss_of(table, head), table, head)
    (tied,) = gradients(loss_of(weight, weight), weight)
    assert grad_table.any() and grad_head.any()
    torch.testing.assert_close(tied, grad_table + grad_head)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_tied_gradient_is_that_of_finite_differences(backend: str) -> None:
    _, weight, labels, bias = case(1, 3)
    ids = torch.tensor([[1, 7, 1]])
    assert bias is not None

    def loss_of(tied: torch.Tensor, bias: torch.Tensor) -> Any:
        hidden = torch.tanh(F.embedding(ids, tied))
        return linear_cross_entropy(hidden, tied, labels, bias=bias, label_smoothing=0.1, backend=backend)

    assert torch.autograd.gradcheck(loss_of, (weight, bias))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "near"), [(torch.bfloat16, 0.03), (torch.float16, 0.004)])
@pytest.mark.parametrize("options", OPTIONS)
def test_half_precision_is_near_float64_and_gives_float32(
    backend: str, dtype: torch.dtype, near: float, options: dict[str, Any]
) -> None:
    hidden, weight, labels, bias = case(4, 8, dtype=dtype)
    exact = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight, bias) if leaf is not None]
    loss, lse = linear_cross_entropy(hidden, weight, labels, bias=bias, return_lse=True, backend=backend, **options)
    assert loss.dtype == lse.dtype == torch.float32
    expected = linear_cross_entropy(exact[0], exact[1], labels, bias=exact[2], backend="reference", **options)
    torch.testing.assert_close(loss.double(), expected, rtol=near / 2, atol=0)
    for ours, theirs in zip(gradients(loss, hidden, weight, bias), gradients(expected, *exact), strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - theirs).norm() < near * theirs.norm()


def test_where_the_head_is_frozen_the_hidden_states_still_get_their_gradient() -> None:
    hidden, weight, labels, _ = case()
    loss = linear_cross_entropy(hidden, weight.detach(), labels, backend="logits")
    expected = linear_cross_entropy(hidden, weight, labels, backend="reference")
    torch.testing.assert_close(gradients(loss, hidden), gradients(expected, hidden))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("frozen", [None, "hidden", "weight"])
def test_kept_logits_in_blocks_of_rows_and_columns_that_do_not_divide_them(
    dtype: torch.dtype, options: dict[str, Any], frozen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full_logits, "_columns", lambda *_: 4)
    monkeypatch.setattr(full_logits, "_rows", lambda _: 3)
    mixture, found = torch.randn(2, 4, V).double(), []
    for backend in ("logits", "reference"):
        hidden, weight, labels, bias = case(dtype=dtype)
        if backend == "reference":
            hidden, weight, bias = (one.detach().double() for one in (hidden, weight, bias) if one is not None)
        ends = {"hidden": hidden, "weight": weight, "bias": bias}
        free = [one.requires_grad_(name != frozen) for name, one in ends.items() if one is not None]
        free = [one for one in free if one.requires_grad]
        loss = linear_cross_entropy(hidden, weight, labels, bias=bias, backend=backend, **options)
        losses, lse, logits = linear_cross_entropy(
            hidden,
            weight,
            labels,
            bias=bias,
            reduction="none",
            return_lse=True,
            return_logits=True,
            backend=backend,
            **options,
        )
        whole = losses.sum() + lse.sin().sum() + (logits.masked_fill(logits == -torch.inf, 0) * mixture).sum()
        found.append([loss, losses, lse, *gradients(loss, *free), *gradients(whole, *free)])
    near = 1e-9 if dtype == torch.float64 else 0.03
    for one, exact in zip(*found, strict=True):
        assert (one.double() - exact).norm() <= near * exact.norm() + 1e-9
