"""Chunks with transposed logits, the first in the gradient's buffer, give the same numbers in less memory."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.functional.loss import linear_cross_entropy, resources
from bowline.functional.loss.chunks import cpu_loop, transposed_logits
from bowline.functional.loss.chunks.cpu_matmul import LIBRARIES
from bowline.functional.loss.chunks.loss_job import LossJob
from bowline.functional.loss.loss_options import Reduction
from tests.functional.loss.cases import OPTIONS, gradients

V = 300
WITHIN = [options for options in OPTIONS if not ("softcap" in options and "label_smoothing" in options)]

SIZES = pytest.mark.parametrize(
    ("rows", "width", "taken"), [(7, 9, [5]), (70, 70, [47]), (150, 80, [80, 3, 3, 3, 3, 3, 3, 2])]
)
BLOCKS = pytest.mark.parametrize("block", [2**4, 2**22])


@pytest.fixture
def tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens in each chunk."""
    found: list[int] = []

    def counted(job: LossJob, *args: Any, **options: Any) -> Any:
        found.append(len(job.hidden))
        return transposed_logits.run_transposed(job, *args, **options)

    monkeypatch.setattr(cpu_loop, "run_transposed", counted)
    return found


def ends(rows: int, width: int, dtype: torch.dtype, size: int = V) -> tuple[torch.Tensor, ...]:
    """hidden (rows, width), weight, labels with every third ignored and none of 0, 3, 10, and a bias."""
    torch.manual_seed(rows)
    hidden, weight = (torch.randn(count, width).to(dtype).requires_grad_() for count in (rows, size))
    labels = torch.randint(11, size, (rows,))
    labels[1::3] = -100
    return hidden, weight, labels, torch.randn(size).to(dtype).requires_grad_()


def both(
    tensors: tuple[torch.Tensor, ...], **options: Any
) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
    """The loss and the gradients of "chunked" and of the reference in float64."""
    found = []
    for backend, dtype in (("chunked", tensors[0].dtype), ("reference", torch.float64)):
        hidden, weight, bias = (tensors[at].detach().to(dtype).requires_grad_() for at in (0, 1, 3))
        with resources(budget=1):
            loss = linear_cross_entropy(hidden, weight, tensors[2], bias=bias, backend=backend, **options)
            found.append([loss.detach(), *gradients(loss, hidden, weight, bias)])
    return found[0], found[1]


def blocks_of(rows: int) -> Any:
    """Sets blocks to this many rows of the vocabulary."""

    def parts(_: Any, size: int, *sizes: int) -> list[slice]:
        return [slice(first, min(first + rows, size)) for first in range(0, size, rows)]

    return patch.object(transposed_logits._TransposedChunk, "_parts", parts)


@pytest.mark.parametrize("options", WITHIN)
@SIZES
@BLOCKS
def test_it_is_the_loss_in_float64(
    options: dict[str, Any], rows: int, width: int, taken: list[int], block: int, tokens: list[int], monkeypatch: Any
) -> None:
    monkeypatch.setattr(transposed_logits, "BLOCK", block)
    monkeypatch.setattr(transposed_logits, "LEAST_ROWS", 16)
    ours, expected = both(ends(rows, width, torch.float64, size=700), **options)
    torch.testing.assert_close(ours, expected)
    assert tokens == taken


@pytest.mark.parametrize(("options", "taken"), [({}, [1024, 80]), ({"label_smoothing": 0.1}, [3] * 368)])
def test_of_a_frozen_matrix_nothing_is_kept_but_what_smoothing_needs(
    options: dict[str, Any], taken: list[int], tokens: list[int]
) -> None:
    """So a chunk has the largest useful number of tokens; 1100 are padded to 1104."""
    hidden, weight, _, bias = (one.detach() for one in ends(1100, 9, torch.float64))
    labels, found = torch.randint(0, V, (1100,)), []
    for backend in ("chunked", "reference"):
        x = hidden.clone().requires_grad_()
        loss = linear_cross_entropy(x, weight, labels, bias=bias, backend=backend, **options)
        found.append([loss, *gradients(loss, x)])
    torch.testing.assert_close(*found)
    assert tokens == taken


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_number_of_tokens_that_is_filled_up_is_the_loss_in_float64(
    options: dict[str, Any], reduction: Reduction
) -> None:
    """Padding rows of zeros without a label add nothing to any gradient."""
    rows, width, size = 301, 12, 40
    torch.manual_seed(0)
    labels = torch.randint(11, size, (rows,))
    factors, found = torch.rand(rows).double(), []
    for backend in ("chunked", "reference"):
        torch.manual_seed(1)
        leaves = [torch.randn(*shape).double().requires_grad_() for shape in ((rows, width), (size, width), (size,))]
        hidden, weight, bias = leaves
        given = linear_cross_entropy(
            hidden,
            weight,
            labels,
            bias=bias,
            reduction=reduction,
            return_lse=reduction == "none",
            backend=backend,
            **options,
        )
        losses, lse = given if reduction == "none" else (given, torch.zeros(()))
        loss = (losses * factors).sum() + lse.sin().sum()
        found.append([losses.detach(), *torch.autograd.grad(loss, leaves)])
    torch.testing.assert_close(*found)


def test_a_softcap_with_smoothing_takes_the_other_way(tokens: list[int]) -> None:
    ours, expected = both(ends(7, 9, torch.float64), softcap=3.0, label_smoothing=0.1)
    torch.testing.assert_close(ours, expected)
    assert tokens == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", WITHIN)
def test_in_half_precision_no_gradient_is_further_off_than_eager_ones(
    dtype: torch.dtype, options: dict[str, Any], tokens: list[int]
) -> None:
    hidden, weight, labels, bias = (
        tensor.detach() * 0.5 if tensor.is_floating_point() else tensor for tensor in ends(96, 128, dtype)
    )
    ours, expected = both((hidden, weight, labels, bias), **options)
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    scale, softcap = options.get("logit_scale", 1.0), options.get("softcap")
    logits = (leaves[0] @ leaves[1].t() + leaves[2]) * scale
    logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
    banned = torch.tensor(options.get("mask_ids", []), dtype=torch.int64)
    logits = logits.float().index_fill(1, banned, -torch.inf)
    smoothing = options.get("label_smoothing", 0.0)
    if smoothing and len(banned):
        return  # F.cross_entropy would count the masked
    loss = F.cross_entropy(logits, labels, label_smoothing=smoothing)
    loss = loss + options.get("z_loss", 0.0) * logits.logsumexp(1)[labels >= 0].square().mean()
    for one, eager, exact in zip(ours[1:], gradients(loss, *leaves), expected[1:], strict=True):
        assert one is not None and eager is not None and exact is not None
        assert (one - exact).norm() <= 1.05 * (eager - exact).norm()
    assert tokens == [64]  # of 96 tokens, those that have a label


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "mask_ids": [0]}, {"label_smoothing": 0.1}])
@pytest.mark.parametrize("library", ["mm", "float32"])
def test_products_may_be_widened_or_not(options: dict[str, Any], library: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(cpu_loop, "products_for", lambda *_: LIBRARIES[library])
    hidden, weight, labels, bias = ends(150, 80, torch.bfloat16)
    ours, expected = both((hidden.detach() * 0.3, weight, labels, bias), **options)
    for one, exact in zip(ours, expected, strict=True):
        assert one is not None and exact is not None
        assert (one - exact).norm() <= 0.01 * exact.norm()


@pytest.mark.parametrize("options", WITHIN)
@SIZES
@BLOCKS
def test_by_onednn_blocks_lie_the_other_way_round(
    options: dict[str, Any], rows: int, width: int, taken: list[int], block: int, tokens: list[int], monkeypatch: Any
) -> None:
    monkeypatch.setattr(cpu_loop, "products_for", lambda *_: LIBRARIES["onednn"])
    monkeypatch.setattr(transposed_logits, "BLOCK", block)
    monkeypatch.setattr(transposed_logits, "LEAST_ROWS", 80)
    ours, expected = both(ends(rows, width, torch.float32, size=700), **options)
    for one, exact in zip(ours, expected, strict=True):
        assert one is not None and exact is not None
        assert (one - exact).norm() <= 1e-6 * max(1.0, float(exact.norm()))
    assert tokens == taken


@pytest.mark.parametrize("library", ["mm", "onednn"])
def test_a_matrix_may_be_transposed_itself(library: str, tokens: list[int], monkeypatch: Any) -> None:
    monkeypatch.setattr(cpu_loop, "products_for", lambda *_: LIBRARIES[library])
    hidden, weight, labels, bias = ends(40, 50, torch.float32)
    lying = weight.detach().t().contiguous().t()
    ours, expected = both((hidden, lying, labels, bias))
    torch.testing.assert_close(ours, [exact.float() for exact in expected if exact is not None])
    assert tokens


@settings(max_examples=60)
@given(
    rows=st.integers(1, 40),
    size=st.integers(2, 90),
    width=st.integers(1, 40),
    block=st.integers(1, 600),
    options=st.fixed_dictionaries(
        {},
        optional={
            "logit_scale": st.floats(0.1, 3),
            "softcap": st.floats(0.5, 30),
            "z_loss": st.floats(0, 0.1),
            "label_smoothing": st.floats(0, 1),
            "mask_ids": st.just([0]),
            "reduction": st.sampled_from(["mean", "sum"]),
        },
    ),
)
def test_whatever_the_sizes_and_options(rows: int, size: int, width: int, block: int, options: dict[str, Any]) -> None:
    torch.manual_seed(size)
    tensors = torch.randn(rows, width).double(), torch.randn(size, width).double(), torch.randint(1, size, (rows,))
    with blocks_of(block):
        ours, expected = both((*tensors, torch.randn(size).double()), **options)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("block", [5, 2**21])
def test_logits_that_grow_over_the_vocabulary_by_any_amount_overflow_nowhere(
    dtype: torch.dtype, block: int, tokens: list[int]
) -> None:
    """Powers of all blocks share the first block's base; here each block's logits are far above the block before."""
    size, width = 60, 16
    hidden, weight, labels, bias = ends(30, width, torch.float64, size)
    steep = torch.linspace(-900, 900, size).double()
    tensors = [one.detach().to(dtype) for one in (hidden, weight)] + [labels, (steep + bias.detach()).to(dtype)]
    with blocks_of(block):
        ours, expected = both(tuple(tensors))
    close = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2}[dtype]
    for one, exact in zip(ours, expected, strict=True):
        assert one is not None and exact is not None
        torch.testing.assert_close(one.double(), exact, rtol=close, atol=close)
    assert tokens


@pytest.mark.parametrize("block", [4, 2**21])
def test_a_first_block_of_masked_tokens_alone_gives_no_base(block: int) -> None:
    """The other tokens' logits are so low that powers with a base of 0 would vanish."""
    hidden, weight, labels, _ = ends(9, 16, torch.float32)
    low = torch.full((V,), -400.0)
    with blocks_of(block):
        ours, expected = both((hidden, weight, labels, low), mask_ids=list(range(10)))
    torch.testing.assert_close(ours, [one.float() for one in expected if one is not None], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block", [4, 2**21])
def test_masked_tokens_make_no_base(block: int) -> None:
    """Their logits are so high that the powers of the others would vanish."""
    hidden, weight, labels, _ = ends(9, 16, torch.float32)
    high = torch.zeros(V).index_fill(0, torch.tensor([0, 3, 10]), 1e4)
    with blocks_of(block):
        ours, expected = both((hidden, weight, labels, high), mask_ids=[0, 3, 10])
    torch.testing.assert_close(ours, [one.float() for one in expected if one is not None], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("library", ["mm", "float32"])
def test_powers_that_are_kept_in_float16_are_no_larger_than_it_can_hold(library: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(cpu_loop, "products_for", lambda *_: LIBRARIES[library])
    hidden, weight, labels, _ = ends(30, 16, torch.float16, 60)
    with blocks_of(5):
        ours, expected = both((hidden, weight, labels, torch.linspace(0, 30, 60).half()))
    for one, exact in zip(ours, expected, strict=True):
        assert one is not None and exact is not None
        assert (one - exact).norm() <= 0.01 * exact.norm()


def test_in_float16_no_product_with_a_small_factor_underflows(monkeypatch: Any) -> None:
    """The power of vocabulary token 200 is in the thousands, above an earlier base, so the factors are as small."""
    monkeypatch.setattr(cpu_loop, "products_for", lambda *_: LIBRARIES["mm"])
    hidden, weight, labels, _ = (one.detach() for one in ends(96, 128, torch.float16))
    high, found = torch.zeros(V).index_fill(0, torch.tensor(200), 9.0).half(), []
    for backend, dtype in (("chunked", torch.float16), ("reference", torch.float64)):
        x, w, bias = ((one * by).to(dtype).requires_grad_() for one, by in ((hidden, 0.1), (weight, 0.1), (high, 1)))
        with blocks_of(5), resources(budget=1):
            losses = linear_cross_entropy(x, w, labels, bias=bias, reduction="none", backend=backend)
            found.append(gradients(losses.mean(), x, w, bias))
    for one, exact in zip(*found, strict=True):
        assert (one - exact).norm() <= 0.005 * exact.norm()


def test_large_logits_and_infinite_ones_are_those_of_the_reference() -> None:
    hidden, weight, labels, bias = ends(8, 16, torch.float32)
    big = hidden.detach() * 200
    ours, expected = both((big, weight, labels, bias))
    torch.testing.assert_close(ours, [one.float() for one in expected if one is not None], rtol=1e-3, atol=1e-3)
    big[0, 0] = torch.inf
    loss, *_ = both((big, weight, labels, bias))[0]
    assert loss is not None and not loss.isfinite()


@pytest.mark.parametrize("scale", [1e10, -1e10])
def test_logits_of_ten_thousand_million_have_the_loss_that_they_have_in_float64(scale: float) -> None:
    weight = torch.linspace(-1, 1, V)[:, None].clone().requires_grad_()
    first, last = (0, V - 1) if scale < 0 else (V - 1, 0)
    labels = torch.tensor([first, first, last])
    losses = linear_cross_entropy(
        torch.ones(3, 1), weight, labels, logit_scale=scale, reduction="none", backend="chunked"
    )
    assert losses[:2].tolist() == [0.0, 0.0] and losses[2].item() == pytest.approx(2e10)
    assert gradients(losses[:2].sum(), weight)[0].abs().max() == 0


@pytest.mark.parametrize("options", [{}, {"logit_scale": -1.7}, {"logit_scale": 1.7, "mask_ids": [4]}])
@pytest.mark.parametrize("block", [16, 2**22])
def test_the_loss_of_a_sure_token_is_not_below_0(options: dict[str, Any], block: int) -> None:
    torch.manual_seed(0)
    hidden, weight = 4 * torch.randn(1000, 64), torch.randn(V, 64)
    logits = (hidden @ weight.T * options.get("logit_scale", 1.0)).index_fill(1, torch.tensor([4]), -torch.inf)
    with blocks_of(block), resources(budget=1):
        found = linear_cross_entropy(
            hidden, weight, logits.argmax(1), reduction="none", return_lse=True, backend="chunked", **options
        )
    assert (found[0] >= 0).all()
    expected = logits if "mask_ids" in options else hidden @ weight.T * options.get("logit_scale", 1.0)
    torch.testing.assert_close(found[1], expected.double().logsumexp(1).float())


@pytest.mark.parametrize("block", [50, 2**22])
def test_an_infinite_token_leaves_the_others_their_loss_and_gradient(block: int) -> None:
    hidden, weight, labels, _ = ends(8, 16, torch.float32)
    labels = labels.clamp(min=11)
    broken = hidden.detach().clone()
    broken[0, 0] = torch.inf
    found = []
    with blocks_of(block), resources(budget=1):
        for some, backend in ((broken, "chunked"), (hidden.detach().double(), "reference")):
            x, w = some.clone().requires_grad_(), weight.detach().to(some.dtype).requires_grad_()
            losses = linear_cross_entropy(x, w, labels, reduction="none", backend=backend)
            found.append([losses.detach()[1:], gradients(losses.sum(), x)[0][1:]])
    torch.testing.assert_close(found[0], [one.float() for one in found[1]], rtol=1e-4, atol=1e-5)


def test_an_infinite_token_has_its_blocks_made_again_and_not_all_of_them_each_time() -> None:
    """The other tokens' logits grow over the vocabulary, but not above their base."""
    hidden, weight, labels, _ = ends(8, 16, torch.float32)
    broken = hidden.detach() * 0.1
    broken[0, 0] = torch.inf
    made: list[int] = []
    make = transposed_logits._TransposedChunk._make_powers

    def counted(self: Any, at: int) -> Any:
        made.append(at)
        return make(self, at)

    with blocks_of(30), patch.object(transposed_logits._TransposedChunk, "_make_powers", counted):
        linear_cross_entropy(
            broken, weight.detach() + torch.arange(V)[:, None] / V, labels.clamp(min=11), backend="chunked"
        )
    assert V / 30 <= len(made) <= 3 * V / 30
