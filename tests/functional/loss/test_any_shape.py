"""For any shape and options, the loss is the sum spelled out, with the reference's gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bowline.functional.loss import linear_cross_entropy
from tests.functional.loss.cases import BACKENDS, by_hand, gradients


@settings(max_examples=40)
@given(
    shape=st.lists(st.integers(1, 4), max_size=3),
    width=st.integers(1, 6),
    size=st.integers(2, 12),
    smoothing=st.sampled_from([0.0, 0.1]),
    z_loss=st.sampled_from([0.0, 0.01]),
    scale=st.sampled_from([1.0, 0.5]),
    softcap=st.sampled_from([None, 5.0]),
    masked=st.booleans(),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_for_any_shape_and_options_all_backends_give_the_sum_spelled_out(
    shape: list[int],
    width: int,
    size: int,
    smoothing: float,
    z_loss: float,
    scale: float,
    softcap: float | None,
    masked: bool,
    bias: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    hidden = torch.randn(*shape, width).double().requires_grad_()
    weight = torch.randn(size, width).double().requires_grad_()
    labels = torch.randint(1, size, shape)
    labels[torch.rand(shape) < 0.2] = -100
    added = torch.randn(size).double().requires_grad_() if bias else None
    options: dict[str, Any] = {
        "label_smoothing": smoothing,
        "z_loss": z_loss,
        "logit_scale": scale,
        "softcap": softcap,
        "mask_ids": [0] if masked else None,
    }
    expected = sum(by_hand(hidden, weight, labels, added, **options)[0])
    grads = []
    for backend in BACKENDS:
        loss = linear_cross_entropy(hidden, weight, labels, bias=added, reduction="sum", backend=backend, **options)
        assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
        grads.append(gradients(loss, hidden, weight, added))
    torch.testing.assert_close(grads[1:], grads[:1] * 2)
