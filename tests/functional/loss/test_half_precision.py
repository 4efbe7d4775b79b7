"""Half precision: no further from float64 than a plain model in the same dtype, both ends of the matrix included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.functional.loss import linear_cross_entropy, resources
from bowline.functional.loss.chunks import chunk_size, cpu_loop
from bowline.functional.loss.chunks.cpu_matmul import LIBRARIES
from tests.functional.loss.cases import OPTIONS
from tests.functional.loss.float64 import ROWS, SIZE, Loss, computed, errors, head


@pytest.mark.parametrize("rows", [512, 128, 64])
@pytest.mark.parametrize("scale", [0.02, 0.2, 0.5])
@pytest.mark.parametrize("tied", [False, True])
def test_bf16_is_nearer_to_float64_than_eager_bf16(
    rows: int, scale: float, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager with the logits in float32 from the product on, which is the better of the two eager ways."""
    monkeypatch.setattr(chunk_size, "ROOFLINE", {"cpu": (rows, rows), "cuda": (rows, rows)})
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"softcap": 20.0, "label_smoothing": 0.1}])
@pytest.mark.parametrize("library", ["mm", "float32"])
def test_however_many_chunks_no_row_of_the_gradient_is_further_off(
    dtype: torch.dtype, options: dict[str, Any], library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states have a mean, as trained ones do, so each chunk adds nearly the same to a row."""
    monkeypatch.setattr(cpu_loop, "products_for", lambda *_: LIBRARIES[library])
    torch.manual_seed(0)
    hidden = (torch.randn(4096, 16) + 2 * torch.randn(16)).to(dtype)
    weight, labels = (0.1 * torch.randn(300, 16)).to(dtype), torch.randint(0, 300, (4096,))

    def by(backend: str) -> Loss:
        return lambda x, w: linear_cross_entropy(x, w, labels, backend=backend, **options)

    def grad_weight(backend: str, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return computed(by(backend), x, w)[2]

    exact = grad_weight("reference", hidden.double(), weight.double())
    theirs = grad_weight("reference", hidden, weight)
    with resources(budget=1):  # 64 chunks
        found = grad_weight("chunked", hidden, weight)
    assert found.dtype == dtype
    far, allowed = ((one.double() - exact).norm(dim=1) / exact.norm(dim=1) for one in (found, theirs))
    assert far.mean() <= 1.1 * allowed.mean() and far.max() <= 1.5 * allowed.max()


def eager_in_float64(labels: torch.Tensor, ids: torch.Tensor, tied: bool) -> Loss:
    """The loss for the inputs of the half-precision heads: the sum with looked-up rows is rounded, its gradient not."""

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
    monkeypatch.setattr(chunk_size, "ROOFLINE", {"cpu": (128, 128), "cuda": (128, 128)})
    hidden, weight, labels = head(0.3, dtype)

    def by(backend: str) -> Loss:
        return lambda x, w: linear_cross_entropy(x, w, labels, backend=backend, **options)

    exact = computed(by("reference"), hidden.double(), weight.double())
    theirs, found = (errors(by(backend), hidden, weight, exact) for backend in ("reference", "chunked"))
    assert all(ours <= 1.02 * their + 1e-5 for ours, their in zip(found, theirs, strict=True)), (found, theirs)


def test_the_gradient_of_a_transposed_matrix_is_contiguous_however_many_chunks() -> None:
    """A lookup that adds to the gradient needs this."""
    hidden, weight, labels = torch.randn(3000, 32), torch.randn(32, 1000), torch.arange(3000) % 1000
    for count in (100, 3000):
        transposed = weight.bfloat16().t().requires_grad_()
        assert not transposed.is_contiguous()
        with resources(budget=1):
            loss = linear_cross_entropy(hidden[:count].bfloat16(), transposed, labels[:count], backend="chunked")
        assert torch.autograd.grad(loss, transposed)[0].is_contiguous()


def test_a_grad_scaler_saves_small_float16_gradients_as_it_does_in_eager() -> None:
    """The forward pass must not lose gradients that the factor would save from underflow."""
    hidden, weight, labels = head(0.02, torch.float16)
    factor = 2.0**14
    exact = computed(lambda x, w: F.cross_entropy(x @ w.T, labels) * factor, hidden.double(), weight.double())
    eager = errors(lambda x, w: F.cross_entropy((x @ w.T).float(), labels) * factor, hidden, weight, exact)
    ours = errors(lambda x, w: linear_cross_entropy(x, w, labels, backend="chunked") * factor, hidden, weight, exact)
    assert ours[1] <= 1.02 * eager[1] and ours[2] <= 1.02 * eager[2]


@pytest.mark.parametrize(
    ("size", "spread", "options"),
    [
        (100.0, 0.02, {}),
        (1.0, 0.02, {"logit_scale": 100.0}),
        (4.0, 0.4, {"z_loss": 1.0}),
        (0.1, 20.0, {}),
        (1.0, 60.0, {"z_loss": 0.1}),
    ],
    ids=[
        "hidden of 100",
        "steep logits",
        "a z-loss as large as the loss",
        "a matrix of 20",
        "an lse of 500",
    ],
)
@pytest.mark.parametrize("rows", [1, 4])
def test_a_float16_gradient_that_eager_has_is_not_infinite(
    size: float, spread: float, options: dict[str, Any], rows: int
) -> None:
    """Until the backward pass gradients are scaled up, and they must stay finite."""
    torch.manual_seed(0)
    hidden, weight = (size * torch.randn(rows, 64)).half(), (spread * torch.randn(50, 64)).half()
    labels = torch.full((rows,), 3)

    def by(backend: str) -> Loss:
        return lambda x, w: linear_cross_entropy(x, w, labels, backend=backend, **options)

    exact = computed(by("reference"), hidden.double(), weight.double())
    assert all(error < 2e-3 for error in errors(by("chunked"), hidden, weight, exact))


def test_losses_of_nearly_nothing_have_float16_gradients_of_0() -> None:
    hidden, weight, labels = head(0.4, torch.float16)
    factors = torch.full((SIZE,), 1e-38)
    _, *found = computed(
        lambda x, w: linear_cross_entropy(x, w, labels, class_weight=factors, reduction="sum", backend="chunked"),
        hidden,
        weight,
    )
    assert all((one == 0).all() for one in found)


@pytest.mark.parametrize("largest", [1.0, 100.0, 1000.0])
@pytest.mark.parametrize("budget", [2**14, 2**30])
def test_large_numbers_in_hidden_cost_float16_gradients_no_digits(
    largest: float, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of tokens that are no label, which most underflows."""
    monkeypatch.setattr(cpu_loop, "products_for", lambda *_: LIBRARIES["mm"])
    hidden, weight, labels = head(1.0, torch.float16)
    hidden[:, 5], weight[:, 5], others = largest, weight[:, 5] / largest, torch.ones(SIZE, dtype=torch.bool)
    others[labels.clamp(min=0)] = False
    factor = 2.0**12
    exact = computed(lambda x, w: F.cross_entropy(x @ w.T, labels) * factor, hidden.double(), weight.double())[2]
    found = []
    for backend in ("logits", "chunked"):
        with resources(budget=budget):
            ours = computed(
                lambda x, w, by=backend: linear_cross_entropy(x, w, labels, backend=by) * factor, hidden, weight
            )[2]
        found.append(((ours.double() - exact)[others].norm(dim=1) / exact[others].norm(dim=1)).max())
    assert found[1] <= 2 * found[0]
