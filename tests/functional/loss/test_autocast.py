"""Autocast with a float32 matrix: half-precision products, and a float32 gradient for the parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.functional.loss import cross_entropy, linear_cross_entropy
from bowline.functional.loss.chunks import chunk_loop, chunk_size, gpu_matmul, matmul_choice
from bowline.functional.loss.chunks.gpu_loop import run_on_gpu
from bowline.functional.loss.chunks.loss_job import LossJob
from bowline.functional.loss.loss_options import Reduction
from bowline.functional.tied_lookup import tied_embedding
from tests.functional.lookup.ends import dense_gradients
from tests.functional.loss.cases import BACKENDS, OPTIONS, case, gradients
from tests.functional.loss.float64 import ROWS, WIDTH, Loss, computed, errors, head
from tests.functional.loss.test_transposed_logits import blocks_of

HALF = [torch.bfloat16, torch.float16]


def has_products(monkeypatch: pytest.MonkeyPatch, has_half: bool) -> None:
    """Sets whether the processor claims to multiply half precision."""
    for module in (cross_entropy, matmul_choice):
        monkeypatch.setattr(module, "emulated", lambda _: not has_half)


def autocast(dtype: torch.dtype, labels: torch.Tensor, backend: str, **options: Any) -> Loss:
    def loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype):
            found: torch.Tensor = linear_cross_entropy(hidden, weight, labels, backend=backend, **options)
        return found

    return loss


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("options", [*OPTIONS, {"reduction": "sum"}])
@pytest.mark.parametrize("where", ["cpu", "gpu"])
@pytest.mark.parametrize("rows", [16, 128, 1024])
def test_with_every_option_it_is_no_further_from_float64_than_the_reference(
    dtype: torch.dtype, options: dict[str, Any], where: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_products(monkeypatch, has_half=True)
    monkeypatch.setattr(chunk_size, "ROOFLINE", {"cpu": (rows, rows), "cuda": (rows, rows)})
    if where == "gpu":
        monkeypatch.setattr(gpu_matmul, "_widens", lambda _: False)  # a CPU does not
        monkeypatch.setattr(chunk_loop, "run_on_cpu", run_on_gpu)
    hidden, weight, labels = head(0.3, torch.float32)
    exact = computed(
        lambda x, w: linear_cross_entropy(x, w, labels, backend="reference", **options),
        hidden.to(dtype).double(),
        weight.to(dtype).double(),
    )
    theirs, found = (
        errors(autocast(dtype, labels, backend, **options), hidden, weight, exact)
        for backend in ("reference", "chunked")
    )
    assert all(ours <= 1.02 * their + 1e-5 for ours, their in zip(found, theirs, strict=True)), (found, theirs)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_each_positions_loss_and_lse_have_gradients_too(reduction: Reduction, monkeypatch: pytest.MonkeyPatch) -> None:
    has_products(monkeypatch, has_half=True)
    hidden, weight, labels = head(0.3, torch.float32)
    bias = torch.randn(len(weight))

    def by(backend: str) -> Loss:
        def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype == torch.float32):
                losses, lse = linear_cross_entropy(
                    x, w, labels, bias=bias.to(x.dtype), reduction=reduction, return_lse=True, backend=backend
                )
            total: torch.Tensor = (losses * 3 + lse).sum()
            return total

        return loss

    exact = computed(by("reference"), hidden.double(), weight.double())
    theirs, found = (errors(by(backend), hidden, weight, exact) for backend in ("reference", "chunked"))
    assert all(ours <= 1.02 * their + 1e-5 for ours, their in zip(found, theirs, strict=True)), (found, theirs)


@pytest.mark.parametrize("has_half", [True, False])
def test_dtypes_are_those_of_what_the_gradients_are_of(has_half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    has_products(monkeypatch, has_half)
    hidden, weight, labels = head(0.2, torch.float32)
    bias = torch.zeros(len(weight), requires_grad=True)
    for given in (hidden, hidden.bfloat16()):
        leaves = [given.requires_grad_(), weight.requires_grad_(), bias]
        with torch.autocast("cpu", torch.bfloat16):
            loss = linear_cross_entropy(leaves[0], weight, labels, bias=bias, backend="chunked")
        assert loss.dtype == torch.float32
        found = torch.autograd.grad(loss, leaves)
        assert [one.dtype for one in found] == [given.dtype, torch.float32, torch.float32]


@pytest.mark.parametrize("has_half", [True, False])
def test_products_are_in_half_precision_where_the_processor_has_them(
    has_half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On other processors a cast would gain nothing, and nothing is cast."""
    has_products(monkeypatch, has_half)
    hidden, weight, labels = head(0.2, torch.float32)
    exact = computed(lambda x, w: F.cross_entropy(x @ w.T, labels), hidden.double(), weight.double())
    ours, theirs = (
        errors(autocast(torch.bfloat16, labels, backend), hidden, weight, exact) for backend in ("chunked", "reference")
    )
    assert min(theirs[1:]) > 1e-3
    assert min(ours[1:]) > 1e-3 if has_half else max(ours) < 2e-6


@pytest.mark.parametrize("has_half", [True, False])
def test_the_lookup_adds_into_the_heads_gradient(has_half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    has_products(monkeypatch, has_half)
    _, weight, labels = head(0.2, torch.float32)
    labels = labels.clamp(min=0)
    weight.requires_grad_()
    with dense_gradients(0), torch.autocast("cpu", torch.bfloat16):
        rows = tied_embedding(labels, weight)
        linear_cross_entropy(rows.bfloat16(), weight, labels, backend="chunked").backward()
    assert weight.grad is not None
    exact = weight.detach().double().requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(exact[labels] @ exact.T, labels), [exact])
    assert (weight.grad - gradient).norm() <= 0.01 * gradient.norm()


def test_a_float32_gradient_has_room_for_the_powers_of_twice_as_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Powers are in half precision: two of them fit in the memory of one float32 number."""
    has_products(monkeypatch, has_half=True)
    found: list[int] = []
    some_rows = LossJob.of

    def counted(job: LossJob, rows: Any) -> LossJob:
        if isinstance(rows, slice):
            found.append(rows.stop - rows.start)
        return some_rows(job, rows)

    monkeypatch.setattr(LossJob, "of", counted)
    monkeypatch.setattr(chunk_size, "ROOFLINE", {"cpu": (50, 50), "cuda": (50, 50)})
    hidden, weight, labels = head(0.2, torch.float32)
    loss = autocast(torch.bfloat16, labels.clamp(min=0), "chunked")(hidden, weight.requires_grad_())
    assert loss.isfinite() and found[0] == 2 * WIDTH and sum(found) == ROWS


@pytest.mark.parametrize("backend", BACKENDS)
def test_float64_is_left_as_it_is(backend: str) -> None:
    hidden, weight, labels, bias = case()
    plain = linear_cross_entropy(hidden, weight, labels, bias=bias, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_cross_entropy(hidden, weight, labels, bias=bias, backend=backend)
    assert found.dtype == torch.float64 and torch.equal(found, plain)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("backend", ["logits", "chunked"])
def test_a_float32_bias_is_cast_too(backend: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    has_products(monkeypatch, has_half=True)
    hidden, weight, labels, bias = case(dtype=torch.float32)
    found = []
    for name in (backend, "reference"):
        with torch.autocast("cpu", torch.bfloat16):
            loss = linear_cross_entropy(hidden, weight, labels, bias=bias, backend=name, **options)
        found.append([loss, *gradients(loss, hidden, weight, bias)])
    torch.testing.assert_close(*found, rtol=0.05, atol=0.02)


def test_where_nothing_is_cast_no_product_is_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses `row_major`, whose products autocast would change if it were still on."""
    has_products(monkeypatch, has_half=False)
    hidden, weight, labels = head(0.2, torch.float32)
    options: dict[str, Any] = {"softcap": 3.0, "label_smoothing": 0.1}
    exact = computed(
        lambda x, w: linear_cross_entropy(x, w, labels, backend="reference", **options),
        hidden.double(),
        weight.double(),
    )
    assert max(errors(autocast(torch.bfloat16, labels, "chunked", **options), hidden, weight, exact)) < 2e-6


@pytest.mark.parametrize("rows", [50, 300])
def test_each_block_of_the_matrix_is_cast(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    has_products(monkeypatch, has_half=True)
    hidden, weight, labels = head(0.3, torch.float32)
    exact = computed(lambda x, w: F.cross_entropy(x @ w.T, labels), hidden.double(), weight.double())
    with blocks_of(rows):
        assert max(errors(autocast(torch.bfloat16, labels, "chunked"), hidden, weight, exact)) < 0.02


def test_the_gradient_of_a_bias_is_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses `row_major`, with half-precision gradients of logits; compares rows of tokens that are never a label."""
    has_products(monkeypatch, has_half=True)
    monkeypatch.setattr(chunk_size, "ROOFLINE", {"cpu": (ROWS, ROWS), "cuda": (ROWS, ROWS)})
    hidden, weight, labels = head(0.02, torch.bfloat16)
    found = []
    for backend, dtype in (("chunked", torch.float32), ("reference", torch.float64)):
        bias = torch.zeros(len(weight), dtype=dtype, requires_grad=True)
        ends = hidden.to(dtype), weight.to(dtype), labels
        with torch.autocast("cpu", torch.bfloat16, enabled=backend == "chunked"):
            loss = linear_cross_entropy(*ends, bias=bias, softcap=30.0, label_smoothing=0.5, backend=backend)
        found.append(gradients(loss, bias)[0][:11].double())
    assert (found[0] - found[1]).norm() <= 5e-4 * found[1].norm()
