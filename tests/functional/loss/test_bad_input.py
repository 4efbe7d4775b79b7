"""Invalid arguments raise with a clear message, for every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from bowline.errors import UsageError
from bowline.functional.loss import linear_cross_entropy, linear_logits
from bowline.nn import LinearCrossEntropy
from tests.functional.loss.cases import BACKENDS, D, V, needs_torchs_own

HIDDEN, WEIGHT, LABELS = torch.zeros(2, 3, D), torch.zeros(V, D), torch.ones(2, 3, dtype=torch.long)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"labels": LABELS[:, :2]}, r"labels \(2, 2\) for hidden \(2, 3, 5\): expected \(2, 3\)"),
        (
            {"labels": torch.full((2, 3), V)},
            r"label 11: expected 0 to 10, or -100 for a position without a label; at position \(0, 0\)",
        ),
        ({"labels": torch.full((2, 3), -1)}, r"label -1: expected 0 to 10.*; at position \(0, 0\)"),
        ({"labels": LABELS.float()}, r"labels of torch\.float32: expected torch\.int64"),
        ({"labels": LABELS.int()}, r"labels of torch\.int32: expected torch\.int64"),
        ({"mask_ids": [4, 1]}, r"label 1: is masked, so its loss would be infinite; at position \(0, 0\)"),
        ({"mask_ids": [V]}, r"mask_ids has 11, and the head has 11 rows: expected 0 to 10"),
        ({"mask_ids": [-1]}, r"mask_ids has -1"),
        ({"weight": torch.zeros(V, D + 1)}, r"hidden \(2, 3, 5\) and weight \(11, 6\): .* expected \(\.\.\., D\)"),
        ({"weight": torch.zeros(V)}, r"weight \(11,\)"),
        ({"hidden": torch.tensor(1.0)}, r"hidden \(\) and weight \(11, 5\): do not fit"),
        ({"bias": torch.zeros(V - 1)}, r"bias \(10,\) for weight \(11, 5\): expected \(11,\)"),
        ({"bias": torch.zeros(1)}, r"bias \(1,\)"),
        ({"bias": torch.zeros(1, V)}, r"bias \(1, 11\)"),
        ({"class_weight": torch.ones(V + 1)}, r"class_weight \(12,\): expected \(11,\)"),
        ({"reduction": "average"}, "reduction='average': expected 'mean', 'sum' or 'none'"),
        ({"backend": "fast"}, "backend='fast': expected one of auto, reference, logits, chunked, torch"),
        ({"label_smoothing": 1.5}, "label_smoothing=1.5: expected a number from 0 to 1"),
        ({"label_smoothing": -0.1}, "label_smoothing=-0.1: expected a number from 0 to 1"),
        (
            {"mask_ids": list(range(V))},
            "mask_ids has all 11 tokens: expected to leave at least one that can be predicted",
        ),
        ({"weight": WEIGHT.to(torch.int8)}, r"weight of torch\.int8: expected floating point"),
        ({"weight": WEIGHT.bfloat16()}, r"hidden of torch\.float32 and weight of torch\.bfloat16: expected one dtype"),
        ({"hidden": HIDDEN.long()}, r"hidden of torch\.int64: expected floating point"),
        pytest.param(
            {"backend": "torch", "softcap": 2.0},
            "backend='torch' with softcap=2.0: torch's own has no such option",
            marks=needs_torchs_own,
        ),
        ({"backend": "torch", "return_lse": True}, "backend='torch' returns only the loss"),
        ({"backend": "torch", "return_logits": True}, "backend='torch' returns only the loss"),
        ({"softcap": 0.0}, "softcap=0.0: expected a number above 0"),
        ({"softcap": float("inf")}, "softcap=inf: expected a number above 0"),
        ({"logit_scale": torch.tensor(2.0)}, "logit_scale is a tensor: expected a number"),
        ({"z_loss": torch.tensor(0.1)}, "z_loss is a tensor: expected a number"),
        ({"mask_ids": 0}, r"mask_ids=0: expected ids of tokens, such as \[0, 1\]"),
        ({"mask_ids": [1.5]}, r"mask_ids=\[1\.5\]: expected ids of tokens"),
        ({"mask_ids": torch.ones(V, dtype=torch.bool)}, r"mask_ids of bool: expected ids of tokens"),
        (
            {"bias": torch.zeros(V, dtype=torch.long)},
            r"bias of torch\.int64 and weight of torch\.float32",
        ),
        ({"bias": torch.zeros(V).double()}, r"bias of torch\.float64 and weight of torch\.float32: expected one dtype"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: dict[str, Any], words: str) -> None:
    arguments = {"hidden": HIDDEN, "weight": WEIGHT, "labels": LABELS, **change}
    with pytest.raises(UsageError, match=words):
        linear_cross_entropy(**arguments)


def test_a_torch_without_such_a_loss_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.functional, "linear_cross_entropy", raising=False)
    with pytest.raises(UsageError, match=r"backend='torch': torch \d.* has no linear_cross_entropy") as refusal:
        linear_cross_entropy(HIDDEN, WEIGHT, LABELS, backend="torch")
    assert refusal.value.help == 'backend="auto"'


def test_the_logits_alone_are_refused_the_same_way() -> None:
    with pytest.raises(UsageError, match=r"hidden \(2, 3, 5\) and weight \(11, 6\)"):
        linear_logits(HIDDEN, torch.zeros(V, D + 1))


def test_the_position_of_a_wrong_label_is_named() -> None:
    labels = LABELS.clone()
    labels[1, 2] = 99
    with pytest.raises(ValueError, match=r"label 99: expected 0 to 10, .*; at position \(1, 2\)"):
        linear_cross_entropy(HIDDEN, WEIGHT, labels)


def test_an_ignored_index_that_is_a_masked_token_is_no_label() -> None:
    loss = linear_cross_entropy(HIDDEN, WEIGHT, torch.zeros_like(LABELS), ignore_index=0, mask_ids=[0])
    assert loss.item() == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ids", [torch.tensor([0]), np.array([0]), list(torch.tensor([5, 5, 0])), np.array([5, 0])])
def test_masked_ids_may_come_as_numbers_of_any_kind(ids: Any, backend: str) -> None:
    found, expected = (
        linear_cross_entropy(HIDDEN, WEIGHT, LABELS, mask_ids=given, label_smoothing=0.1, backend=backend)
        for given in (ids, sorted({int(one) for one in ids}))
    )
    assert torch.equal(found, expected)
    assert found < linear_cross_entropy(HIDDEN, WEIGHT, LABELS, label_smoothing=0.1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_that_a_bias_forbids_costs_what_smoothing_asks_of_it(backend: str) -> None:
    """Smoothing makes the loss infinite, as torch's own; a masked token gets no share, and costs nothing."""
    bias = torch.zeros(V)
    bias[0] = -torch.inf
    assert linear_cross_entropy(HIDDEN, WEIGHT, LABELS, bias=bias, label_smoothing=0.1, backend=backend) == torch.inf
    masked = linear_cross_entropy(HIDDEN, WEIGHT, LABELS, bias=bias, label_smoothing=0.1, mask_ids=[0], backend=backend)
    torch.testing.assert_close(masked, torch.tensor(float(V - 1)).log())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [0, D])
def test_on_no_device_and_beside_another_default_there_is_a_loss(backend: str, width: int) -> None:
    ends = HIDDEN[..., :width], WEIGHT[:, :width], LABELS
    expected = linear_cross_entropy(*ends, backend=backend)
    with torch.device("meta"):
        assert torch.equal(linear_cross_entropy(*ends, backend=backend), expected)
    shape = linear_cross_entropy(*(one.to("meta") for one in ends), backend=backend)
    assert shape.device.type == "meta" and shape.shape == ()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_head_of_no_tokens_has_no_loss(backend: str) -> None:
    ends = torch.zeros(0, D, requires_grad=True), torch.zeros(0, D, requires_grad=True)
    loss = linear_cross_entropy(*ends, torch.zeros(0, dtype=torch.long), label_smoothing=0.1, backend=backend)
    loss.backward()
    assert loss == 0 and all(one.grad is not None and not one.grad.any() for one in ends)


def test_a_text_of_no_tokens_has_no_shifted_labels() -> None:
    assert LinearCrossEntropy(shift=True)(HIDDEN[:, :0], WEIGHT, LABELS[:, :0]) == 0
    with pytest.raises(UsageError, match=r"labels \(\): expected \(\.\.\., T\)"):
        LinearCrossEntropy(shift=True)(HIDDEN[0, 0], WEIGHT, LABELS[0, 0])


def test_what_has_no_values_has_shapes() -> None:
    with FakeTensorMode():
        hidden, weight = torch.zeros(5, D, requires_grad=True), torch.zeros(V, D, requires_grad=True)
        loss = linear_cross_entropy(hidden, weight, torch.zeros(5, dtype=torch.long))
        assert [tuple(one.shape) for one in torch.autograd.grad(loss, (hidden, weight))] == [(5, D), (V, D)]


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_each_text_has_gradients_of_its_own_under_vmap(backend: str) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 3, D), torch.randn(V, D)

    def loss(matrix: torch.Tensor, some: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = linear_cross_entropy(some, matrix, labels, backend=backend)
        return found

    found = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weight, hidden, LABELS)
    for one, some, labels in zip(found, hidden, LABELS, strict=True):
        leaf = weight.clone().requires_grad_()
        loss(leaf, some, labels).backward()
        torch.testing.assert_close(one, leaf.grad)


@pytest.mark.parametrize("backend", ["logits", "chunked"])
def test_batched_gradients_are_refused_where_only_one_can_be_taken(backend: str) -> None:
    weight = torch.zeros(V, D, requires_grad=True)
    losses = linear_cross_entropy(HIDDEN, weight, LABELS, reduction="none", backend=backend)
    with pytest.raises(UsageError, match="batched gradients of linear_cross_entropy"):
        torch.autograd.grad(losses, weight, torch.ones(4, 2, 3), is_grads_batched=True)


def test_a_head_of_no_rows_has_no_logits_and_masks_none() -> None:
    assert linear_logits(HIDDEN, torch.zeros(0, D)).shape == (2, 3, 0)
