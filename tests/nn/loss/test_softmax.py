"""A chunk between the products, where masked tokens and positions without a label meet."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bowline.nn.loss import linear_cross_entropy
from bowline.nn.loss.options import Options
from bowline.nn.loss.resources import Resources
from bowline.nn.loss.sweep.softmax import chunk_loss
from tests.nn.loss.cases import case, gradients


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"z_loss": 0.1, "label_smoothing": 0.1}])
@pytest.mark.parametrize("backend", ["logits", "chunked"])
def test_without_a_label_the_lse_gives_a_masked_token_0_no_gradient(options: dict[str, Any], backend: str) -> None:
    hidden, weight, labels, bias = case()
    found = []
    for name in (backend, "reference"):
        loss, lse = linear_cross_entropy(
            hidden, weight, labels, bias=bias, mask_ids=[0], reduction="none", return_lse=True, backend=name, **options
        )
        found.append(gradients(loss.sum() + lse.square().sum(), hidden, weight, bias))
    torch.testing.assert_close(*found)


def test_where_labels_are_not_read_a_masked_one_has_an_infinite_loss() -> None:
    """As on a GPU: on a CPU it is refused before."""
    labels, options = torch.tensor([3, 4, -100]), Options(mask_ids=(0, 3), softcap=2.0)
    chunk = chunk_loss(torch.randn(3, 20), labels, torch.ones(3), None, options, Resources())
    assert chunk.losses.isinf().tolist() == [True, False, False]
    assert chunk.of_label is not None and chunk.of_label.isfinite().all()
