"""Arguments that do not fit are refused in words, whatever the backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bowline.errors import UsageError
from bowline.nn.loss import linear_cross_entropy, linear_logits
from tests.nn.loss.cases import D, V

HIDDEN, WEIGHT, LABELS = torch.zeros(2, 3, D), torch.zeros(V, D), torch.ones(2, 3, dtype=torch.long)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"labels": LABELS[:, :2]}, r"labels \(2, 2\) for hidden \(2, 3, 5\): expected \(2, 3\)"),
        (
            {"labels": torch.full((2, 3), V)},
            r"label 11: expected 0 to 10, or -100 where there is none; at position \(0, 0\)",
        ),
        ({"labels": torch.full((2, 3), -1)}, r"label -1: expected 0 to 10.*; at position \(0, 0\)"),
        ({"labels": LABELS.float()}, r"labels of torch\.float32: expected torch\.int64"),
        ({"labels": LABELS.int()}, r"labels of torch\.int32: expected torch\.int64"),
        ({"mask_ids": [4, 1]}, r"label 1: is masked, so its loss would be infinite; at position \(0, 0\)"),
        ({"mask_ids": [V]}, r"mask_ids has 11, and the head has 11 rows: expected 0 to 10"),
        ({"mask_ids": [-1]}, r"mask_ids has -1"),
        ({"weight": torch.zeros(V, D + 1)}, r"hidden \(2, 3, 5\) and weight \(11, 6\): .* expected \(\.\.\., D\)"),
        ({"weight": torch.zeros(V)}, r"weight \(11,\)"),
        ({"bias": torch.zeros(V - 1)}, r"bias \(10,\) for weight \(11, 5\): expected \(11,\)"),
        ({"bias": torch.zeros(1)}, r"bias \(1,\)"),
        ({"class_weight": torch.ones(V + 1)}, r"class_weight \(12,\): expected \(11,\)"),
        ({"reduction": "average"}, "reduction='average': expected 'mean', 'sum' or 'none'"),
        ({"backend": "fast"}, "backend='fast': expected one of auto, reference, logits, chunked, torch"),
        ({"label_smoothing": 1.5}, "label_smoothing=1.5: expected 0 to 1"),
        ({"mask_ids": list(range(V))}, "mask_ids has all 11 tokens: expected some that can be predicted"),
        ({"weight": WEIGHT.to(torch.int8)}, r"weight of torch\.int8: expected floating point"),
        ({"weight": WEIGHT.bfloat16()}, r"hidden of torch\.float32 and weight of torch\.bfloat16: expected one dtype"),
        ({"hidden": HIDDEN.long()}, r"hidden of torch\.int64: expected floating point"),
        ({"backend": "torch", "softcap": 2.0}, "backend='torch' with softcap=2.0: torch's own has no such option"),
        ({"backend": "torch", "return_lse": True}, "backend='torch' returns the loss alone"),
        ({"softcap": 0.0}, "softcap=0.0: expected more than 0"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: dict[str, Any], words: str) -> None:
    arguments = {"hidden": HIDDEN, "weight": WEIGHT, "labels": LABELS, **change}
    with pytest.raises(UsageError, match=words):
        linear_cross_entropy(**arguments)


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
