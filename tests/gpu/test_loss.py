"""The tied loss on a GPU against float64: every option and dtype, both ends of the matrix, and nothing that waits."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.functional.kernels.triton_support import kernels_run_on
from bowline.functional.loss import linear_cross_entropy, resources
from bowline.functional.loss.chunks import chunk_loop, chunk_size
from bowline.functional.loss.chunks.loss_job import LossJob, LossResult
from bowline.functional.loss.chunks.vocabulary_blocks import run_by_vocabulary
from bowline.functional.tied_lookup import tied_embedding
from tests.functional.loss.cases import OPTIONS

SIZES = [(1, 11, 4), (300, 11, 4), (300, 50257, 64), (129, 1003, 33), (700, 8193, 128), (257, 1, 8), (0, 11, 4)]
NEAR = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@pytest.fixture(params=[True, False], ids=["triton", "plain"])
def compiler(request: pytest.FixtureRequest) -> Iterator[bool]:
    with resources(compiler=request.param):
        yield request.param


@pytest.fixture
def several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_size, "ROOFLINE", {"cpu": (128, 128), "cuda": (128, 128)})


def ends(rows: int, size: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Ids, weight, bias, and labels, some ignored, none masked by `OPTIONS`, on the GPU."""
    torch.manual_seed(0)
    weight, bias = torch.randn(size, width) * 0.3, torch.randn(size)
    labels = torch.tensor([1, 2, 4, 5, 6, 7, 8, 9])[torch.randint(0, 8, (rows,))] % size
    labels[1::3] = -100
    made = torch.randint(0, size, (rows,)), weight.to(dtype), bias.to(dtype), labels
    return tuple(one.to("cuda") for one in made)


def tied_step(
    backend: str,
    ids: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    options: Any,
) -> list[torch.Tensor]:
    """Loss, and the gradients of the matrix, both ends together, and of the bias."""
    leaves = [one.detach().clone().requires_grad_() for one in (weight, bias) if one is not None]
    lookup = F.embedding if backend == "reference" else tied_embedding
    hidden = torch.tanh(lookup(ids, leaves[0]))
    added = leaves[1] if bias is not None else None
    loss = linear_cross_entropy(hidden, leaves[0], labels, bias=added, backend=backend, **options)
    (3 * loss).backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def share(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm().clamp(min=1e-30))


@contextmanager
def no_waiting() -> Iterator[None]:
    """Makes waiting for the GPU inside an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", list(NEAR))
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("backend", ["chunked", "logits"])
@pytest.mark.usefixtures("several_chunks")
def test_loss_and_both_ends_are_those_of_float64(
    dtype: torch.dtype, options: dict[str, Any], backend: str, compiler: bool
) -> None:
    for sizes in SIZES:
        if max(options.get("mask_ids", [0])) >= sizes[1] or (options.get("mask_ids") and sizes[1] == 1):
            continue
        ids, weight, bias, labels = ends(*sizes, dtype)
        found = tied_step(backend, ids, weight, bias, labels, options)
        exact = tied_step("reference", ids, weight.double(), bias.double(), labels, options)
        assert [one.dtype for one in found] == [torch.promote_types(dtype, torch.float32), dtype, dtype]
        for name, one, other in zip(("loss", "matrix", "bias"), found, exact, strict=True):
            if sizes[1] == 1:  # all of it is the difference of two equal numbers
                assert float((one.double() - other).abs().max()) <= NEAR[dtype], (sizes, name)
            else:
                assert share(one, other) <= NEAR[dtype], (sizes, name)


@pytest.mark.parametrize("rows", [2048, 512, 128])
def test_bf16_is_nearer_to_float64_than_eager_bf16(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_size, "ROOFLINE", {"cuda": (rows, rows)})
    torch.manual_seed(0)
    weight = (torch.randn(32000, 256, device="cuda") * 0.1).bfloat16()
    hidden = torch.randn(2048, 256, device="cuda").bfloat16()
    labels = (torch.rand(2048, device="cuda") ** 3 * 32000).long()

    def gradients(wide: bool, ours: bool) -> list[torch.Tensor]:
        x, w = ((one.double() if wide else one).detach().clone().requires_grad_() for one in (hidden, weight))
        if ours:
            loss = linear_cross_entropy(x, w, labels, backend="chunked")
        else:
            logits = x @ w.t()
            loss = F.cross_entropy(logits if wide else logits.float(), labels)
        return [loss.detach(), *torch.autograd.grad(loss, (x, w))]

    exact = gradients(wide=True, ours=False)
    pairs = zip(gradients(wide=False, ours=True), gradients(wide=False, ours=False), exact, strict=True)
    for ours, eager, truth in pairs:
        assert share(ours, truth) <= max(share(eager, truth), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_of_each_positions_loss_does_not_wait_for_the_gpu(dtype: torch.dtype) -> None:
    ids, weight, bias, labels = ends(600, 8192, 64, dtype)
    weight.requires_grad_()

    def step() -> None:
        hidden = torch.tanh(tied_embedding(ids, weight))
        loss, lse = linear_cross_entropy(
            hidden, weight, labels, bias=bias, reduction="none", return_lse=True, backend="chunked"
        )
        (loss.sum() + lse.sum()).backward()

    step()
    with no_waiting():
        step()


def test_a_step_can_be_captured_as_a_graph_and_replayed() -> None:
    ids, weight, bias, labels = ends(600, 8192, 64, torch.bfloat16)
    weight.requires_grad_()
    bias.requires_grad_()

    def step() -> torch.Tensor:
        hidden = torch.tanh(tied_embedding(ids, weight))
        loss: torch.Tensor = linear_cross_entropy(hidden, weight, labels, bias=bias, backend="chunked")
        loss.backward()
        return loss.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    expected = weight.grad.clone() if weight.grad is not None else None
    weight.grad = bias.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    assert captured.isfinite()
    assert expected is not None
    assert weight.grad is not None
    assert share(weight.grad, expected.double()) <= 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("megabytes", [64, 256, 1024])
def test_beyond_the_gradient_there_is_the_budget(
    dtype: torch.dtype, megabytes: int, peak: Callable[..., float]
) -> None:
    """Besides the budget, the peak has a few copies of hidden in both dtypes; one is its gradient."""
    size, width, rows = 50257, 768, 8192
    weight = (torch.randn(size, width, device="cuda") * 0.02).to(dtype).requires_grad_()
    labels = torch.randint(0, size, (rows,), device="cuda")
    hidden = torch.randn(rows, width, device="cuda").to(dtype).requires_grad_()

    def step() -> None:
        weight.grad = hidden.grad = None
        with resources(budget=megabytes * 2**20):
            linear_cross_entropy(hidden, weight, labels).backward()

    step()
    gradient = weight.nbytes / 2**20
    assert peak(step) <= (gradient if weight.grad is None else 0) + megabytes + 4 * 4 * rows * width / 2**20


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_with_a_small_budget_there_are_blocks_of_the_vocabulary_and_no_sum_is_rounded(
    dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored are the logits of a few tokens; of a few inside the gradient and beside it; of all, inside."""
    swept = []

    def counted(job: LossJob) -> LossResult:
        swept.append(job)
        return run_by_vocabulary(job)

    monkeypatch.setattr(chunk_loop, "run_by_vocabulary", counted)
    places = {(4000, 5003, 130): 2, (3000, 8193, 256): 3, (2400, 8193, 1024): 20, (900, 8193, 1024): 9}
    for sizes, megabytes in places.items():
        ids, weight, bias, labels = ends(*sizes, dtype)
        swept.clear()
        exact = tied_step("reference", ids, weight.double(), bias.double(), labels, options)
        with resources(budget=megabytes * 2**20):
            found = tied_step("chunked", ids, weight, bias, labels, options)
        assert len(swept) == 1, sizes
        for one, other in zip(found, exact, strict=True):
            assert share(one, other) <= NEAR[dtype], sizes


def test_blocks_of_the_vocabulary_wait_for_nothing() -> None:
    ids, weight, bias, labels = ends(900, 8193, 1024, torch.bfloat16)
    weight.requires_grad_()

    def step() -> None:
        hidden = torch.tanh(tied_embedding(ids, weight))
        with resources(budget=9 * 2**20):
            linear_cross_entropy(hidden, weight, labels, bias=bias, mask_ids=[3], backend="chunked").backward()

    step()
    with no_waiting():
        step()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.usefixtures("several_chunks")
def test_without_a_bias_rows_in_bf16_are_read_once(options: dict[str, Any]) -> None:
    for sizes in SIZES[1:5]:
        ids, weight, _, labels = ends(*sizes, torch.bfloat16)
        exact = tied_step("reference", ids, weight.double(), None, labels, options)
        for one, other in zip(tied_step("chunked", ids, weight, None, labels, options), exact, strict=True):
            assert share(one, other) <= NEAR[torch.bfloat16], sizes


def test_logits_that_rise_along_the_vocabulary_overflow_nothing() -> None:
    torch.manual_seed(0)
    size, width = 50257, 64
    weight = torch.randn(size, width, device="cuda")
    weight[:, 0] = torch.linspace(-400, 400, size, device="cuda")
    hidden = torch.randn(300, width, device="cuda")
    hidden[:, 0] = torch.linspace(-1, 1, 300, device="cuda")
    labels = torch.randint(0, size, (300,), device="cuda")
    found = []
    for dtype, ours in ((torch.bfloat16, True), (torch.bfloat16, False), (torch.float64, False)):
        x, w = (one.bfloat16().to(dtype).requires_grad_() for one in (hidden, weight))
        if ours:
            loss = linear_cross_entropy(x, w, labels, backend="chunked")
        else:
            loss = F.cross_entropy((x @ w.t()).to(torch.promote_types(dtype, torch.float32)), labels)
        found.append([loss.detach(), *torch.autograd.grad(loss, (x, w))])
    for one, eager, exact in zip(*found, strict=True):
        assert share(one, exact) <= 1.05 * share(eager, exact)  # a logit of 400 has steps of 2 in bf16


def test_a_label_that_is_no_token_has_no_loss() -> None:
    ids, weight, bias, labels = ends(300, 1003, 32, torch.bfloat16)
    labels[7] = 1003
    loss = linear_cross_entropy(weight[ids], weight, labels, bias=bias, backend="chunked")
    assert loss.isnan()


def test_the_gradient_of_both_ends_is_one_buffer(peak: Callable[..., float]) -> None:
    size, width = 128256, 512
    weight = (torch.randn(size, width, device="cuda") * 0.02).requires_grad_()
    ids, labels = torch.randint(0, size, (2, 16), device="cuda")

    def step(lookup: Callable[..., torch.Tensor]) -> None:
        weight.grad = None
        linear_cross_entropy(torch.tanh(lookup(ids, weight)), weight, labels, backend="chunked").backward()

    one = size * width * 4 / 2**20
    assert peak(lambda: step(F.embedding)) - peak(lambda: step(tied_embedding)) > 0.9 * one


def test_on_another_stream_the_two_ends_are_added_by_autograd() -> None:
    ids, weight, bias, labels = ends(300, 1003, 32, torch.float32)
    exact = tied_step("reference", ids, weight.double(), bias.double(), labels, {})
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = tied_step("chunked", ids, weight, bias, labels, {})
    torch.cuda.synchronize()
    assert share(found[1], exact[1]) <= NEAR[torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_gradient_of_a_float32_matrix_is_float32(dtype: torch.dtype) -> None:
    ids, weight, bias, labels = ends(300, 1003, 32, torch.float32)
    exact = tied_step("reference", ids, weight.double(), bias.double(), labels, {})
    with torch.autocast("cuda", dtype):
        found = tied_step("chunked", ids, weight, bias, labels, {})
    assert found[1].dtype == torch.float32
    assert share(found[1], exact[1]) <= NEAR[torch.bfloat16]


def test_triton_is_what_runs_here() -> None:
    assert kernels_run_on(torch.zeros(1, device="cuda"))
