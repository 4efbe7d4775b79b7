"""Tests of the Triton kernels in Triton's interpreter on the CPU; `test_triton.py` runs them in a new process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bowline.functional.kernels import row_sums, triton_support
from bowline.functional.loss import linear_cross_entropy, resources
from bowline.functional.loss.chunks import chunk_loop, gpu_loop, gpu_matmul, label_gradient, softmax, triton_row_kernels
from bowline.functional.loss.chunks.chunk_size import padded
from bowline.functional.loss.chunks.softmax_formulas import Chunk, SoftmaxRule
from bowline.functional.loss.loss_options import Options
from bowline.functional.loss.resource_limits import Resources
from tests.functional.loss.cases import OPTIONS, V, case, gradients, large_in_float16

EVERYTHING = SoftmaxRule(0.7, 3.0, 0.01, 0.1, 0.9)
RULES = [
    SoftmaxRule(1.0, None, 0.0, 0.0, 1.0),
    SoftmaxRule(0.7, None, 0.0, 0.0, 1.0),
    SoftmaxRule(1.0, 3.0, 0.0, 0.0, 1.0),
    SoftmaxRule(1.0, None, 0.01, 0.0, 1.0),
    SoftmaxRule(1.0, None, 0.0, 0.1, 0.9),
    EVERYTHING,
]
PLAIN = RULES[0]


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_row_kernels, "BLOCK", 16)
    monkeypatch.setattr(triton_row_kernels, "BLOCK_ONCE", 16)


def room(rows: int, size: int, dtype: torch.dtype, fill: float = torch.nan) -> torch.Tensor:
    """(n, V) normal numbers, with `fill` between the rows."""
    torch.manual_seed(size)
    x = torch.full((rows, padded(size)), fill, dtype=dtype)[:, :size]
    return x.copy_(3 * torch.randn(rows, size))


def exact(
    x: torch.Tensor,
    labels: torch.Tensor,
    banned: torch.Tensor | None,
    grad_loss: torch.Tensor,
    grad_lse: torch.Tensor | None,
    rule: SoftmaxRule,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The losses, the lse, and the gradient of x, by float64 autograd; a label of -1 means none."""
    x = x.detach().double().requires_grad_()
    y = rule.scale * x
    if rule.softcap is not None:
        y = rule.softcap * torch.tanh(y / rule.softcap)
    allowed = torch.ones(x.shape[1], dtype=torch.bool) if banned is None else ~banned
    lse, added = y[:, allowed].logsumexp(1), y[:, allowed].sum(1)
    label = y.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    losses = lse - rule.label_share * label - rule.share * added + rule.z_loss * lse.square()
    losses = losses.masked_fill(labels < 0, 0.0)
    total = grad_loss.double() @ losses
    if grad_lse is not None:
        total = total + grad_lse.double() @ lse
    (gradient,) = torch.autograd.grad(total, x)
    return losses.detach(), lse.detach(), gradient


def whole(x: torch.Tensor, labels: torch.Tensor, found: Chunk) -> torch.Tensor:
    """The gradient times its factor, with the label's column put back where the kernel has left 0."""
    assert found.grad_label is not None
    places = labels.clamp(min=0)[:, None]
    assert not x.gather(1, places).any()
    wide = x.double() if found.factor is None else x.double() * found.factor.double()[:, None]
    return wide.scatter(1, places, found.grad_label.double()[:, None])


KERNELS = [triton_row_kernels.softmax_rows, triton_row_kernels.power_rows]


@pytest.mark.parametrize("dtype", triton_support.DTYPES)
@pytest.mark.parametrize("factor", [1.0, 0.5, 0.0, torch.nan, torch.inf])
def test_a_gradient_is_multiplied_where_it_lies(dtype: torch.dtype, factor: float) -> None:
    for shape in [(1,), (16,), (7, 13), (4, 64)]:
        x = torch.randn(shape).to(dtype)
        expected, beyond = x * factor, torch.full((x.numel() + 40,), 3.0, dtype=dtype)
        part = beyond[: x.numel()].view(shape).copy_(x)
        found = triton_support.multiply_(part, torch.tensor(factor))
        assert found is part
        torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0, equal_nan=True)
        assert (beyond[x.numel() :] == 3.0).all(), "it wrote behind the gradient"


@pytest.mark.parametrize(
    ("rule", "masked", "with_lse", "size"),
    [
        *((rule, masked, with_lse, 37) for rule in RULES for masked in (False, True) for with_lse in (False, True)),
        *((EVERYTHING, size > 8, True, size) for size in (1, 2, 13, 16, 70)),
    ],
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_loss_lse_and_gradient_are_those_of_float64(
    rule: SoftmaxRule, masked: bool, with_lse: bool, size: int, kernel: Any
) -> None:
    rule = replace(rule, share=0.0) if kernel is triton_row_kernels.power_rows else rule
    x, grad_loss = room(4, size, torch.float32), torch.tensor([0.5, 0.0, -1.5, 1.0])
    grad_lse = torch.tensor([0.25, 2.0, 0.0, 0.5]) if with_lse else None
    banned = torch.arange(size) % 5 == 1 if masked else None
    labels = torch.tensor([0, -1, size - 1 - (masked and (size - 1) % 5 == 1), -1])
    losses, lse, gradient = exact(x, labels, banned, grad_loss, grad_lse, rule)
    found = kernel(x, labels, -1, banned, grad_loss, grad_lse, rule)
    torch.testing.assert_close(found.lse.double(), lse, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.losses.double(), losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole(x, labels, found), gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once_and_the_label_never(dtype: torch.dtype) -> None:
    x, grad_loss, labels = room(3, 37, dtype), torch.tensor([0.5, 1.0, -1.5]), torch.tensor([3, 36, 17])
    _, lse, gradient = exact(x, labels, None, grad_loss, None, EVERYTHING)
    found = triton_row_kernels.softmax_rows(x, labels, -1, None, grad_loss, None, EVERYTHING)
    assert found.lse.dtype == torch.float32
    torch.testing.assert_close(found.lse.double(), lse, rtol=1e-6, atol=1e-6)
    bits = 1.01 if dtype == torch.bfloat16 else 0.51  # the interpreter cuts bits of bf16 off, and a GPU rounds
    near = bits * torch.finfo(dtype).eps * gradient.abs().clamp(min=torch.finfo(dtype).smallest_normal)
    assert ((whole(x, labels, found) - gradient).abs() <= near + 1e-6).all()
    assert found.grad_label is not None
    exactly = gradient.gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(found.grad_label.double(), exactly, rtol=1e-6, atol=1e-6)


def test_without_a_gradient_the_products_stay() -> None:
    x = room(2, 13, torch.float32)
    before = x.clone()
    found = triton_row_kernels.softmax_rows(x, torch.tensor([2, -1]), -1, None, None, None, EVERYTHING)
    assert torch.equal(x, before)
    assert found.grad_label is None


@pytest.mark.parametrize("far", [-1e4, 1e4])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_logits_far_from_zero_do_not_overflow_block_by_block(far: float, masked: bool, kernel: Any) -> None:
    x, labels = room(2, 70, torch.float32), torch.tensor([40, 69])
    x += torch.linspace(far, 2 * far, 70)
    banned = torch.arange(70) < 32 if masked else None  # two whole blocks
    _, lse, gradient = exact(x, labels, banned, torch.ones(2), None, PLAIN)
    found = kernel(x, labels, -1, banned, torch.ones(2), None, PLAIN)
    torch.testing.assert_close(found.lse.double(), lse)
    torch.testing.assert_close(whole(x, labels, found), gradient, rtol=1e-2, atol=1e-5)  # steps of 1e-3 there


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("everywhere", [False, True])
def test_infinities_are_what_they_are_to_the_plain_operations(bad: float, everywhere: bool) -> None:
    x, labels = room(2, 20, torch.float32), torch.tensor([9, 3])
    x[0, slice(None) if everywhere else 9] = bad
    plain = x.clone()
    arguments = (labels, torch.ones(2), None, Options())
    expected = softmax.chunk_loss(plain, *arguments, Resources(compiler=False))
    found = softmax.chunk_loss(x, *arguments, Resources())
    for name in ("losses", "lse", "grad_label"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), equal_nan=True)
    torch.testing.assert_close(x, plain, equal_nan=True)


@pytest.mark.parametrize("steps", [(0, 50, 100, 40, 170), (0, 61, 61, 200, 0), (-1e4, 0, 70, 0, 1e4)])
def test_powers_stay_numbers_as_logits_rise_from_block_to_block(steps: tuple[float, ...]) -> None:
    x, labels = room(2, 80, torch.float32), torch.tensor([3, 70])
    x += torch.tensor(steps).repeat_interleave(16)
    _, lse, gradient = exact(x, labels, None, torch.ones(2), None, PLAIN)
    found = triton_row_kernels.power_rows(x, labels, -1, None, torch.ones(2), None, PLAIN)
    assert x.isfinite().all()
    torch.testing.assert_close(found.lse.double(), lse)
    torch.testing.assert_close(whole(x, labels, found), gradient, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("bad", [0.0, torch.inf, torch.nan])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_that_nothing_comes_back_for_gets_none_whatever_it_holds(bad: float, kernel: Any) -> None:
    x, grad_loss = room(2, 20, torch.float32), torch.tensor([0.0, 1.0])
    x[0] = bad
    rule = replace(PLAIN, z_loss=0.01)
    found = kernel(x, torch.tensor([4, 5]), -1, None, grad_loss, None, rule)
    assert not x[0].any() and x[1].any()
    assert found.grad_label is not None and found.grad_label[0] == 0


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_label_that_is_no_token_has_no_loss_and_nothing_else_is_read(kernel: Any) -> None:
    x = room(3, 20, torch.float32)
    found = kernel(x, torch.tensor([20, 3, -7]), -1, None, torch.ones(3), None, PLAIN)
    assert found.losses.isnan().tolist() == [True, False, True]


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", triton_support.DTYPES)
@pytest.mark.parametrize("with_factors", [False, True])
@pytest.mark.parametrize(("count", "size", "width"), [(1, 1, 1), (40, 5, 7), (33, 100, 64), (70, 2, 1030)])
def test_rows_of_one_id_are_summed_in_float32_and_rounded_once(
    dtype: torch.dtype, with_factors: bool, count: int, size: int, width: int
) -> None:
    torch.manual_seed(count)
    table, rows = torch.randn(size, width).to(dtype), torch.randn(count, width).to(dtype)
    ids, factors = torch.randint(0, size, (count,)), torch.randn(count) if with_factors else None
    wide = rows.double() if factors is None else rows.double() * factors.double()[:, None]
    exactly = table.double().index_add(0, ids, wide)
    row_sums.add_rows(table, ids, rows, factors)
    near = (1.01 if dtype == torch.bfloat16 else 0.51) * torch.finfo(dtype).eps
    assert ((table - exactly).abs() <= near * exactly.abs() + 1e-4 * near + 1e-5).all()


@pytest.mark.parametrize("cap", [1.0, 30.0, 1e4, 1e6])
def test_a_softcap_keeps_the_digits_of_logits_far_below_it(cap: float) -> None:
    x, labels = room(3, 37, torch.float32), torch.tensor([0, 5, 36])
    rule = replace(PLAIN, softcap=cap)
    losses, _, gradient = exact(x, labels, None, torch.ones(3), None, rule)
    found = triton_row_kernels.softmax_rows(x, labels, -1, None, torch.ones(3), None, rule)
    torch.testing.assert_close(found.losses.double(), losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(whole(x, labels, found), gradient, rtol=2e-6, atol=1e-6)


def test_rows_are_added_to_a_table_whose_columns_are_no_neighbours_too() -> None:
    table, rows = torch.zeros(3, 4).t(), torch.arange(10.0).view(2, 5).t()[:, :1].expand(5, 3)
    row_sums.add_rows(table, torch.tensor([0, 1, 1, 3, 3]), rows)
    assert table.tolist() == [[0.0] * 3, [3.0] * 3, [0.0] * 3, [7.0] * 3]
    transposed = torch.arange(6.0).view(2, 3).t()  # (3, 2)
    row_sums.add_rows(plain := torch.zeros(2, 2), torch.tensor([1, 1, 0]), transposed)
    assert plain.tolist() == [[2.0, 5.0], [1.0, 7.0]]


def test_rows_at_the_padding_row_and_at_no_row_are_left_out() -> None:
    table = torch.zeros(4, 3)
    row_sums.add_rows(table, torch.tensor([1, 3, 1, 9, -2]), torch.ones(5, 3), padding_idx=3)
    assert table[:, 0].tolist() == [0.0, 2.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_labels_rows_are_added_to_a_product(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    product, weight, grad_label = torch.randn(5, 37), torch.randn(9, 37).to(dtype), torch.randn(5)
    ids, out = torch.tensor([8, 0, 3, 3, 1]), torch.full((5, 40), 7.0, dtype=dtype)
    label_gradient.add_label_rows(product, weight, ids, grad_label, out[:, :37])
    expected = product + grad_label[:, None] * weight[ids].float()
    torch.testing.assert_close(
        out[:, :37].float(), expected, rtol=0.008 if dtype == torch.bfloat16 else 1e-6, atol=1e-6
    )
    assert (out[:, 37:] == 7.0).all()


# --- where it is chosen -----------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[SoftmaxRule]:
    """The rules that the kernel was called with; nothing is made in place."""
    found: list[SoftmaxRule] = []

    def counted(*args: Any) -> Any:
        found.append(args[-1])
        return triton_row_kernels.softmax_rows(*args)

    monkeypatch.setattr(softmax, "softmax_rows", counted)
    monkeypatch.setattr(chunk_loop, "run_on_cpu", gpu_loop.run_on_gpu)
    return found


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("reduction", "with_lse"), [("mean", False), ("none", True)])
def test_loss_and_gradients_are_the_references(
    options: dict[str, Any], reduction: Any, with_lse: bool, calls: list[SoftmaxRule]
) -> None:
    ends = case()
    factors = torch.linspace(1.0, 2.0, V)
    found = []
    for backend, dtype in (("chunked", torch.float32), ("reference", torch.float64)):
        hidden, weight, bias = (
            end.detach().to(dtype).requires_grad_() for end in (ends[0], ends[1], ends[3]) if end is not None
        )
        given = linear_cross_entropy(
            hidden,
            weight,
            ends[2],
            bias=bias,
            class_weight=factors,
            reduction=reduction,
            return_lse=with_lse,
            backend=backend,
            **options,
        )
        loss, lse = given if with_lse else (given, torch.zeros(()))
        back = gradients(loss.square().sum() + lse.sum(), hidden, weight, bias)
        found.append([one.double() for one in (loss, lse, *back)])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    assert calls


@pytest.mark.parametrize("options", OPTIONS)
def test_in_bf16_without_a_bias_the_factor_finds_its_way_into_both_gradients(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_loop, "run_on_cpu", gpu_loop.run_on_gpu)
    monkeypatch.setattr(gpu_matmul, "_widens", lambda _: False)  # a CPU does not
    hidden, weight, labels, _ = case(3, 5, dtype=torch.bfloat16)
    found = []
    for backend, dtype in (("chunked", torch.bfloat16), ("reference", torch.float64)):
        x, w = (end.detach().to(dtype).requires_grad_() for end in (hidden, weight))
        loss = linear_cross_entropy(x, w, labels, backend=backend, **options)
        found.append([loss.detach(), *gradients(loss, x, w)])
    for ours, exactly in zip(*found, strict=True):
        assert (ours.double() - exactly).norm() <= 0.012 * exactly.norm()


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("backward", [1, 2])
def test_float16_gradients_of_large_hidden_states_come_back_as_large_as_they_are(
    backward: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_matmul, "_widens", lambda _: False)
    for one, exact in large_in_float16(backward):
        assert (one - exact).norm() <= 0.002 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradients_of_tensors_transposed_in_memory_are_the_same(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_loop, "run_on_cpu", gpu_loop.run_on_gpu)
    monkeypatch.setattr(gpu_matmul, "_widens", lambda _: False)
    hidden, weight, labels, _ = case(15, dtype=dtype)
    found = []
    for transposed in (False, True):
        x, w = (end.detach().t().contiguous().t() if transposed else end.detach() for end in (hidden, weight))
        assert x.is_contiguous() != transposed
        x.requires_grad_()
        w.requires_grad_()
        loss = linear_cross_entropy(x, w, labels, backend="chunked")
        found.append([loss.detach(), *gradients(loss, x, w)])
    torch.testing.assert_close(*found)


def test_it_is_not_for_float64_nor_where_nothing_may_be_compiled(calls: list[SoftmaxRule]) -> None:
    hidden, weight, labels, _ = case()
    linear_cross_entropy(hidden, weight, labels, backend="chunked")
    with resources(compiler=False):
        linear_cross_entropy(hidden.float(), weight.float(), labels, backend="chunked")
    assert calls == []


def test_it_is_found_where_triton_is() -> None:
    assert triton_support.kernels_run_on(torch.zeros(1))
    assert not triton_support.kernels_run_on(torch.zeros(1).double())
    assert triton_support.triton_runs_on(torch.device("cpu"))
