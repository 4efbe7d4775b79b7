"""`chunk_loss` with masked tokens and positions without a label together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bowline.functional.loss import linear_cross_entropy
from bowline.functional.loss.chunks.softmax import banned_tokens, chunk_loss
from bowline.functional.loss.loss_options import Options
from bowline.functional.loss.reference import reference_losses
from bowline.functional.loss.resource_limits import Resources
from tests.functional.loss.cases import case, gradients


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
    """The label is masked, as can happen on a GPU; on a CPU it is refused before."""
    labels, options = torch.tensor([3, 4, -100]), Options(mask_ids=(0, 3), softcap=2.0)
    chunk = chunk_loss(torch.randn(3, 20), labels, torch.ones(3), None, options, Resources())
    assert chunk.losses.isinf().tolist() == [True, False, False]
    assert chunk.grad_label is not None and chunk.grad_label.isfinite().all()


def test_a_scale_is_a_factor_of_what_smoothing_takes_off() -> None:
    """In float32 without a softcap, as on a GPU without a compiler."""
    torch.manual_seed(0)
    labels, x = torch.tensor([1, 4, -100, 7]), torch.randn(4, 20)
    options, grad_loss = Options(label_smoothing=0.2, logit_scale=0.3), torch.tensor([1.0, 2.0, 3.0, 4.0])
    leaf = x.double().requires_grad_()
    losses, lse = reference_losses(leaf * 0.3, labels, options)
    (gradient,) = torch.autograd.grad(losses @ grad_loss.double(), leaf)
    chunk = chunk_loss(x, labels, grad_loss, None, options, Resources())
    assert chunk.grad_label is not None
    found = x.scatter(1, labels.clamp(min=0)[:, None], chunk.grad_label[:, None])
    torch.testing.assert_close([chunk.losses, chunk.lse, found], [losses.float(), lse.float(), gradient.float()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_infinite_logit_is_an_infinite_lse(dtype: torch.dtype) -> None:
    x = torch.randn(3, 20).to(dtype)
    x[0, 5] = torch.inf
    chunk = chunk_loss(x, torch.tensor([3, 4, -100]), None, None, Options(), Resources())
    assert chunk.lse.isinf().tolist() == [True, False, False]


def test_which_tokens_are_masked_may_be_found_without_autograd_first() -> None:
    banned_tokens.cache_clear()
    with torch.inference_mode():
        banned_tokens((0, 3), 11, torch.device("cpu"))
    assert not banned_tokens((0, 3), 11, torch.device("cpu")).is_inference()
