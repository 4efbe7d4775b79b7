"""Half precision: no further from float64 than a plain model in the same dtype, both ends of the matrix included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.nn.loss import linear_cross_entropy
from bowline.nn.loss.sweep import chunks
from tests.nn.loss.cases import OPTIONS
from tests.nn.loss.float64 import ROWS, SIZE, Loss, computed, errors, head


@pytest.mark.parametrize("rows", [512, 128, 64])
@pytest.mark.parametrize("scale", [0.02, 0.2, 0.5])
@pytest.mark.parametrize("tied", [False, True])
def test_bf16_is_nearer_to_float64_than_eager_bf16(
    rows: int, scale: float, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager with the logits in float32 from the product on, which is the better of the two eager ways."""
    monkeypatch.setattr(chunks, "ROOFLINE", {"cpu": (rows, rows), "cuda": (rows, rows)})
    hidden, weight, labels = head(scale, torch.bfloat16)
    ids = torch.randint(0, SIZE, (ROWS,))

    def through(loss: Loss) -> Loss:
        return lambda x, w: loss(x + F.embedding(ids, w) if tied else x, w)

    eager = through(lambda x, w: F.cross_entropy((x @ w.T).float(), labels))
    ours = through(lambda x, w: linear_cross_entropy(x, w, labels, backend="chunked"))
    exact = computed(eager_in_float64(labels, ids, tied), hidden.double(), weight.double())
    theirs, found = errors(eager, hidden, weight, exact), errors(ours, hidden, weight, exact)
    assert found[0] <= theirs[0] + 1e-6
    assert found[1] <= theirs[1] * 1.01 and found[2] <= theirs[2] * 1.01


def eager_in_float64(labels: torch.Tensor, ids: torch.Tensor, tied: bool) -> Loss:
    """Of what the others are given: a sum with the rows that were looked up is rounded, and its gradient is not."""

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if tied:
            x = x + F.embedding(ids, w)
            x = x + (x.bfloat16().double() - x).detach()
        return F.cross_entropy(x @ w.T, labels)

    return loss


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS)
def test_with_every_option_it_is_no_further_than_the_reference_in_the_same_dtype(
    dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "ROOFLINE", {"cpu": (128, 128), "cuda": (128, 128)})
    hidden, weight, labels = head(0.3, dtype)

    def by(backend: str) -> Loss:
        return lambda x, w: linear_cross_entropy(x, w, labels, backend=backend, **options)

    exact = computed(by("reference"), hidden.double(), weight.double())
    theirs, found = (errors(by(backend), hidden, weight, exact) for backend in ("reference", "chunked"))
    assert all(ours <= 1.02 * their + 1e-5 for ours, their in zip(found, theirs, strict=True)), (found, theirs)


def test_a_grad_scaler_saves_small_float16_gradients_as_it_does_in_eager() -> None:
    """What the factor saves from underflow must not have been lost in the forward pass already."""
    hidden, weight, labels = head(0.02, torch.float16)
    factor = 2.0**14
    exact = computed(lambda x, w: F.cross_entropy(x @ w.T, labels) * factor, hidden.double(), weight.double())
    eager = errors(lambda x, w: F.cross_entropy((x @ w.T).float(), labels) * factor, hidden, weight, exact)
    ours = errors(lambda x, w: linear_cross_entropy(x, w, labels, backend="chunked") * factor, hidden, weight, exact)
    assert ours[1] <= 1.02 * eager[1] and ours[2] <= 1.02 * eager[2]
