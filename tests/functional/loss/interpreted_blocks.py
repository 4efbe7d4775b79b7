"""Tests of `vocabulary_blocks` with kernels in Triton's interpreter; `test_triton.py` runs them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from bowline.functional.loss import linear_cross_entropy
from bowline.functional.loss.chunks import chunk_loop, gpu_loop, gpu_matmul, triton_block_kernels, vocabulary_blocks
from bowline.functional.loss.chunks.chunk_size import padded
from bowline.functional.loss.chunks.loss_job import LossJob, LossResult, Wanted
from bowline.functional.loss.chunks.softmax_formulas import SoftmaxRule
from bowline.functional.loss.chunks.vocabulary_blocks import needs_blocks, run_by_vocabulary
from bowline.functional.loss.loss_options import Options
from bowline.functional.loss.resource_limits import Resources
from tests.functional.loss.cases import OPTIONS, V, case, gradients, large_in_float16

PLANS = [
    (4, 0, 0),  # of 8 tokens all are made again
    (4, 3, 2),
    (16, 5, 3),  # one block, and none is made again
    (1, 1, 6),
]
"""Rows of the vocabulary in a block; tokens whose logits are stored inside the gradient, and beside it."""
EVERYTHING = Wanted(hidden=True, weight=True, bias=True)


@pytest.fixture(params=PLANS, ids=str)
def plan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the plan of every job with gradients; on a CPU no product gives a wider dtype."""
    block, inside, beside = request.param

    def planned(job: LossJob) -> vocabulary_blocks._Plan:  # a mean leaves rows without a label out
        count = len(job.hidden)
        return vocabulary_blocks._Plan(block, min(inside, count), min(beside, count - min(inside, count)))

    monkeypatch.setattr(vocabulary_blocks._Plan, "of", planned)
    monkeypatch.setattr(triton_block_kernels, "BLOCK", 4)
    monkeypatch.setattr(triton_block_kernels, "BLOCK_ONCE", 4)
    monkeypatch.setattr(gpu_matmul, "_widens", lambda _: False)
    monkeypatch.setattr(
        chunk_loop,
        "run_on_cpu",
        lambda job: (run_by_vocabulary if job.wanted.weight else gpu_loop.run_on_gpu)(job),
    )


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("reduction", "with_lse"), [("mean", False), ("none", True)])
@pytest.mark.usefixtures("plan")
def test_wherever_logits_are_kept_the_gradients_are_the_references(
    options: dict[str, Any], reduction: Any, with_lse: bool
) -> None:
    ends, found = case(), []
    for backend, dtype in (("chunked", torch.float32), ("reference", torch.float64)):
        hidden, weight, bias = (
            end.detach().to(dtype).requires_grad_() for end in (ends[0], ends[1], ends[3]) if end is not None
        )
        given = linear_cross_entropy(
            hidden, weight, ends[2], bias=bias, reduction=reduction, return_lse=with_lse, backend=backend, **options
        )
        loss, lse = given if with_lse else (given, torch.zeros(()))
        back = gradients(loss.square().sum() + lse.sum(), hidden, weight, bias)
        found.append([one.double() for one in (loss, lse, *back)])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("plan")
@pytest.mark.parametrize("backward", [1, 2])
def test_float16_gradients_of_large_hidden_states_come_back_as_large_as_they_are(backward: int) -> None:
    for one, exact in large_in_float16(backward):
        assert (one - exact).norm() <= 0.002 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("plan")
def test_the_gradients_of_tensors_transposed_in_memory_are_the_same(dtype: torch.dtype) -> None:
    hidden, weight, _, _ = case(8, dtype=dtype)
    found = []
    for transposed in (False, True):
        x, w, y = hidden.detach(), weight.detach(), torch.tensor([1, 2, 4, 5, 6, 7, 8, 9])  # no row is left out
        if transposed:
            x, w, y = x.t().contiguous().t(), w.t().contiguous().t(), torch.stack([y, y], 1)[:, 0]
        assert x.is_contiguous() == w.is_contiguous() == y.is_contiguous() != transposed
        x.requires_grad_()
        w.requires_grad_()
        loss = linear_cross_entropy(x, w, y, backend="chunked")
        found.append([loss.detach(), *gradients(loss, x, w)])
    torch.testing.assert_close(*found)


@pytest.mark.usefixtures("plan")
def test_a_row_that_nothing_comes_back_for_gets_none_whatever_its_lse() -> None:
    hidden, weight, labels, bias = (None if one is None else one.detach() for one in case(8, dtype=torch.float32))
    assert hidden is not None and weight is not None and labels is not None and bias is not None
    bias[3] = torch.inf
    options = Options(z_loss=0.01)
    found = run_by_vocabulary(LossJob(hidden, weight, bias, labels, options, Resources(), EVERYTHING, torch.zeros(8)))
    assert found.lse.isinf().all()
    for gradient in (found.grad_hidden, found.grad_weight, found.grad_bias):
        assert gradient is not None and not gradient.any()


@pytest.mark.usefixtures("plan")
def test_a_label_that_is_no_token_has_no_loss_and_one_that_is_masked_an_infinite_one() -> None:
    """The result equals that of `gpu_loop`; on a CPU such labels are refused before."""
    hidden, weight, _, bias = (None if one is None else one.detach().float() for one in case(8))
    assert hidden is not None and weight is not None
    labels, options = torch.tensor([V, 10, -1, 0, 3, 4, 10**6, -100]), Options(mask_ids=(0, 10))
    for ignored in (-100, 4):
        wanted = Wanted(hidden=True, weight=True)
        job = LossJob(
            hidden, weight, bias, labels, replace(options, ignore_index=ignored), Resources(), wanted, torch.ones(8)
        )
        found, other = run_by_vocabulary(job), gpu_loop.run_on_gpu(job)
        torch.testing.assert_close(found.losses, other.losses, equal_nan=True)
        torch.testing.assert_close(found.lse, other.lse)
        assert found.losses.isnan().tolist() == [True, False, True, False, False, False, True, ignored == 4]


@pytest.fixture
def job() -> LossJob:
    """300 tokens, a vocabulary that is no multiple of a block, and all gradients wanted."""
    torch.manual_seed(0)
    weight, bias = torch.randn(2001, 64).bfloat16() * 0.3, torch.randn(2001).bfloat16()
    labels = torch.randint(0, 2001, (300,))
    labels[::7] = -100
    hidden, grad_loss = torch.randn(300, 64).bfloat16(), torch.rand(300)
    return LossJob(hidden, weight, bias, labels, Options(), Resources(), EVERYTHING, grad_loss)


def exact(job: LossJob) -> LossResult:
    """The result by float64 autograd."""
    assert job.bias is not None
    hidden, weight, bias = (one.double().requires_grad_() for one in (job.hidden, job.weight, job.bias))
    y = hidden @ weight.t() + bias
    losses = torch.nn.functional.cross_entropy(y, job.labels, reduction="none")
    back = gradients(losses @ job.grad_loss.double(), hidden, weight, bias)
    return LossResult(
        losses=losses.detach(), lse=y.logsumexp(1).detach(), grad_hidden=back[0], grad_weight=back[1], grad_bias=back[2]
    )


@pytest.mark.parametrize("kilobytes", [1, 300, 500, 2000])
def test_within_any_budget_they_are_those_of_float64(
    job: LossJob, kilobytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_matmul, "_widens", lambda _: False)
    monkeypatch.setattr(vocabulary_blocks, "LEAST", 512)
    job = replace(job.of(slice(0, 150)), allowed=Resources(budget=kilobytes * 2**10))
    found, expected = run_by_vocabulary(job), exact(job)
    torch.testing.assert_close(found.losses.double(), expected.losses, rtol=0.01, atol=0.05)
    for one, other in (
        (found.grad_hidden, expected.grad_hidden),
        (found.grad_weight, expected.grad_weight),
        (found.grad_bias, expected.grad_bias),
    ):
        assert one is not None and other is not None
        assert (one.double() - other).norm() <= 0.012 * other.norm()


@given(
    count=st.integers(1, 3000),
    size=st.integers(1, 20000),
    width=st.integers(1, 2048),
    kilobytes=st.integers(1, 60000),
    hidden=st.booleans(),
)
@example(count=300, size=2600, width=64, kilobytes=762, hidden=False)  # room for 1300, which is no multiple of 128
def test_the_plan_is_within_the_budget_and_has_room(
    count: int, size: int, width: int, kilobytes: int, hidden: bool
) -> None:
    x, w = (torch.empty(rows, width, dtype=torch.bfloat16, device="meta") for rows in (count, size))
    grad_hidden = 4 * count * width * hidden
    job = LossJob(
        hidden=x,
        weight=w,
        bias=None,
        labels=torch.zeros(0),
        options=Options(),
        allowed=Resources(budget=kilobytes * 2**10 + grad_hidden),
        wanted=Wanted(hidden=hidden, weight=True),
        grad_loss=torch.zeros(0),
    )
    plan = vocabulary_blocks._Plan.of(job)
    assert 1 <= plan.block <= size and (plan.block % 128 == 0 or plan.block == size)
    for first in range(0, size, plan.block):
        rows = min(plan.block, size - first)
        assert plan.inside * padded(rows) <= rows * width
    assert plan.inside >= min(count, 128, width // 2)
    assert plan.inside + plan.beside <= count
    for kept, rest in ((plan.inside, count), (plan.beside, count - plan.inside)):
        assert kept % 128 == 0 or kept < 128 or kept == rest
    taken = 2 * count * padded(plan.block) + 2 * plan.beside * padded(size)
    assert taken <= kilobytes * 2**10 or (plan.block <= vocabulary_blocks.LEAST and not plan.beside)


def test_logits_are_made_twice_only_of_tokens_that_have_no_room(job: LossJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of about 64 of 300 tokens fit inside the gradient (fewer if the last block is not a multiple)."""
    made = []

    def counted(self: Any, rows: slice, *others: Any) -> None:
        made.append(rows.stop - rows.start)
        make(self, rows, *others)

    make = vocabulary_blocks._Blocks.make
    monkeypatch.setattr(vocabulary_blocks._Blocks, "make", counted)
    for kernel in ("add_to_lse", "gradient_rows", "add_rows", "add_label_rows"):
        monkeypatch.setattr(vocabulary_blocks, kernel, lambda *_: None)
    monkeypatch.setattr(gpu_matmul, "_widens", lambda _: False)
    one_block = 300 * 64 * 4 + 2048 * 2 * 300
    for budget, blocks, again in ((2**10, 2, 300 - 61), (one_block + 2048 * 2 * 100, 1, 300 - 62 - 100), (2**22, 1, 0)):
        made.clear()
        run_by_vocabulary(replace(job, allowed=Resources(budget=budget)))
        assert sum(made) == blocks * (300 + again), budget


def test_sums_that_do_not_fit_are_what_it_is_for() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(300, 64).bfloat16(), torch.randn(2000, 64).bfloat16()
    job = LossJob(hidden, weight, None, torch.arange(300), Options(), Resources(), Wanted(weight=True), torch.ones(300))
    assert [needs_blocks(replace(job, allowed=Resources(budget=b))) for b in (None, 2**18, 2**19, 2**21)] == [
        False,
        True,
        False,  # twice the gradient fits
        False,
    ]


# --- the kernel of the first pass -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0.0, 1e4, torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("masked", [False, True])
def test_block_by_block_the_lse_is_that_of_all_logits(
    bad: float, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(triton_block_kernels, "BLOCK", 8)
    x, rule = 3 * torch.randn(3, 70), SoftmaxRule(0.7, None, 0.0, 0.1, 0.9)
    x[0, 33] += bad
    x[1] += bad
    banned = torch.arange(70) < 20 if masked else None  # the whole of the first block
    label, lse, added = torch.full((3,), torch.nan), torch.full((3,), -torch.inf), torch.zeros(3)
    labels = torch.tensor([33, 69, 70])
    for first in range(0, 70, 16):
        part = slice(first, first + 16)
        triton_block_kernels.add_to_lse(
            x[:, part], first, labels, label, lse, added, None if banned is None else banned[part], rule
        )
    y = rule.logits(x)
    allowed = y if banned is None else y.masked_fill(banned, -torch.inf)
    torch.testing.assert_close(lse, allowed.logsumexp(1), equal_nan=True)
    torch.testing.assert_close(added, allowed[:, 20 * masked :].sum(1), equal_nan=True)
    torch.testing.assert_close(label, torch.tensor([x[0, 33], x[1, 69], torch.nan]), equal_nan=True)
