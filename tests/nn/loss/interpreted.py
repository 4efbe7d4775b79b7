"""The Triton kernel, run by Triton's interpreter on the CPU. Started by `test_triton.py`, in a process of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bowline.nn.loss import linear_cross_entropy, resources, softmax, sweep, triton_kernel
from bowline.nn.loss.chunks import padded
from bowline.nn.loss.rule import Rule
from tests.nn.loss.cases import OPTIONS, V, case, gradients

EVERYTHING = Rule(0.7, 3.0, 0.01, 0.1, 0.9)
RULES = [
    Rule(1.0, None, 0.0, 0.0, 1.0),
    Rule(0.7, None, 0.0, 0.0, 1.0),
    Rule(1.0, 3.0, 0.0, 0.0, 1.0),
    Rule(1.0, None, 0.01, 0.0, 1.0),
    Rule(1.0, None, 0.0, 0.1, 0.9),
    EVERYTHING,
]
PLAIN = RULES[0]


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "BLOCK", 16)


def room(rows: int, size: int, dtype: torch.dtype, fill: float = torch.nan) -> torch.Tensor:
    """(n, V) normal numbers; between the rows there is `fill`."""
    torch.manual_seed(size)
    x = torch.full((rows, padded(size)), fill, dtype=dtype)[:, :size]
    return x.copy_(3 * torch.randn(rows, size))


def exact(
    x: torch.Tensor, banned: torch.Tensor | None, of_loss: torch.Tensor, of_lse: torch.Tensor | None, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The lse, the sum of the logits, and the gradient of x but for the label's part, by float64 autograd."""
    x = x.detach().double().requires_grad_()
    y = rule.scale * x
    if rule.softcap is not None:
        y = rule.softcap * torch.tanh(y / rule.softcap)
    allowed = torch.ones(x.shape[1], dtype=torch.bool) if banned is None else ~banned
    lse, added = y[:, allowed].logsumexp(1), y[:, allowed].sum(1)
    total = of_loss.double() @ (lse + rule.z_loss * lse.square() - rule.share * added)
    if of_lse is not None:
        total = total + of_lse.double() @ lse
    (gradient,) = torch.autograd.grad(total, x)
    return lse.detach(), added.detach(), gradient


@pytest.mark.parametrize("dtype", triton_kernel.DTYPES)
@pytest.mark.parametrize("factor", [1.0, 0.5, 0.0, torch.nan, torch.inf])
def test_a_gradient_is_multiplied_where_it_lies(dtype: torch.dtype, factor: float) -> None:
    for shape in [(1,), (16,), (7, 13), (4, 64)]:
        x = torch.randn(shape).to(dtype)
        expected, beyond = x * factor, torch.full((x.numel() + 40,), 3.0, dtype=dtype)
        part = beyond[: x.numel()].view(shape).copy_(x)
        found = triton_kernel.multiply_(part, torch.tensor(factor))
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
def test_lse_sum_and_gradient_are_those_of_float64(rule: Rule, masked: bool, with_lse: bool, size: int) -> None:
    x, of_loss = room(3, size, torch.float32), torch.tensor([0.5, 0.0, -1.5])
    of_lse = torch.tensor([0.25, 2.0, 0.0]) if with_lse else None
    banned = torch.arange(size) % 5 == 1 if masked else None
    lse, added, gradient = exact(x, banned, of_loss, of_lse, rule)
    found = triton_kernel.softmax_rows(x, banned, of_loss, of_lse, rule)
    torch.testing.assert_close(found[0].double(), lse, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[1].double(), added if rule.share else 0 * added, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.double(), gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    x, of_loss = room(3, 37, dtype), torch.tensor([0.5, 1.0, -1.5])
    lse, _, gradient = exact(x, None, of_loss, None, EVERYTHING)
    found, _ = triton_kernel.softmax_rows(x, None, of_loss, None, EVERYTHING)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), lse, rtol=1e-6, atol=1e-6)
    bits = 1.01 if dtype == torch.bfloat16 else 0.51  # the interpreter cuts bits of bf16 off, and a GPU rounds
    near = bits * torch.finfo(dtype).eps * gradient.abs().clamp(min=torch.finfo(dtype).smallest_normal)
    assert ((x - gradient).abs() <= near + 1e-6).all()


def test_without_a_gradient_the_products_stay() -> None:
    x = room(2, 13, torch.float32)
    before = x.clone()
    triton_kernel.softmax_rows(x, None, None, None, EVERYTHING)
    assert torch.equal(x, before)


@pytest.mark.parametrize("far", [-1e4, 1e4])
@pytest.mark.parametrize("masked", [False, True])
def test_logits_far_from_zero_do_not_overflow_block_by_block(far: float, masked: bool) -> None:
    x = room(2, 70, torch.float32)
    x += torch.linspace(far, 2 * far, 70)
    banned = torch.arange(70) < 32 if masked else None  # two whole blocks
    lse, _, gradient = exact(x, banned, torch.ones(2), None, PLAIN)
    found, _ = triton_kernel.softmax_rows(x, banned, torch.ones(2), None, PLAIN)
    torch.testing.assert_close(found.double(), lse)
    torch.testing.assert_close(x.double(), gradient, rtol=1e-2, atol=1e-5)  # float32 has steps of 1e-3 there


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("everywhere", [False, True])
def test_infinities_are_what_they_are_to_the_plain_operations(bad: float, everywhere: bool) -> None:
    x = room(2, 20, torch.float32)
    x[0, slice(None) if everywhere else 9] = bad
    plain = x.clone()
    expected = softmax._part(PLAIN, softmax._kept_powers)(plain, None, torch.ones(2), None)
    found = triton_kernel.softmax_rows(x, None, torch.ones(2), None, PLAIN)
    torch.testing.assert_close(found, expected, equal_nan=True)
    torch.testing.assert_close(x, plain, equal_nan=True)


@pytest.mark.parametrize("bad", [0.0, torch.inf, torch.nan])
def test_a_row_that_nothing_comes_back_for_gets_none_whatever_it_holds(bad: float) -> None:
    x, of_loss = room(2, 20, torch.float32), torch.tensor([0.0, 1.0])
    x[0] = bad
    triton_kernel.softmax_rows(x, None, of_loss, None, PLAIN)
    assert not x[0].any() and x[1].any()


# --- where it is chosen -----------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Rule]:
    """The rules that the kernel was called with, and chunks of three rows for everything."""
    found: list[Rule] = []

    def counted(*args: Any) -> Any:
        found.append(args[-1])
        return triton_kernel.softmax_rows(*args)

    monkeypatch.setattr(softmax, "_kernel", lambda device: counted)
    monkeypatch.setattr(sweep, "fits_in_place", lambda *_: False, raising=False)
    return found


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("reduction", "with_lse"), [("mean", False), ("none", True)])
def test_loss_and_gradients_are_the_references(
    options: dict[str, Any], reduction: Any, with_lse: bool, calls: list[Rule]
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


def test_it_is_not_for_float64_nor_where_nothing_may_be_compiled(calls: list[Rule]) -> None:
    hidden, weight, labels, _ = case()
    linear_cross_entropy(hidden, weight, labels, backend="chunked")
    with resources(compiler=False):
        linear_cross_entropy(hidden.float(), weight.float(), labels, backend="chunked")
    assert calls == []


def test_it_is_found_where_triton_is() -> None:
    assert softmax._kernel("cpu") is triton_kernel.softmax_rows
    assert softmax.triton_runs_on(torch.device("cpu"))
