"""Half precision on a processor without it: the products of float32, rounded once."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from bowline.functional.kernels import half_precision_emulation as module
from bowline.functional.kernels.half_precision_emulation import WideProducts, emulated, wide_products
from tests.functional.multiplied import Multiplied

HALVES = [torch.bfloat16, torch.float16]
SHAPES: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[int, ...]]]] = {
    "mm": (torch.mm, [(5, 7), (7, 3)]),
    "addmm": (torch.addmm, [(3,), (5, 7), (7, 3)]),
    "bmm": (torch.bmm, [(2, 5, 7), (2, 7, 3)]),
    "baddbmm": (lambda a, b, c: torch.baddbmm(a, b, c, beta=0.5, alpha=2.0), [(2, 5, 3), (2, 5, 7), (2, 7, 3)]),
    "linear": (F.linear, [(2, 5, 7), (3, 7), (3,)]),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), [(2, 2, 5, 8)] * 3),
}


def of(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def results(call: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """What it gives, and the gradient of each input."""
    found = call(*inputs)
    weights = torch.linspace(-1, 1, found.numel()).view(found.shape).to(found.dtype)
    return [found.detach(), *torch.autograd.grad((found * weights).sum(), inputs)]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", SHAPES)
def test_both_ways_are_in_float32_and_as_near_the_truth_as_one_rounding(name: str, dtype: torch.dtype) -> None:
    call, shapes = SHAPES[name]
    inputs = of(shapes, dtype)
    with Multiplied() as seen, WideProducts(dtype):
        found = results(call, inputs)
    assert seen.dtypes == {torch.float32}
    truth = results(call, [tensor.detach().double().requires_grad_() for tensor in inputs])
    for mine, exact in zip(found, truth, strict=True):
        assert mine.dtype == dtype
        unit = torch.finfo(dtype).eps * exact.abs().max()
        assert (mine.double() - exact).abs().max() <= 2 * unit  # attention's backward reads a rounded output


def test_what_is_not_of_that_dtype_is_left_alone() -> None:
    a, b = of([(4, 4), (4, 4)], torch.float32)
    half = a.detach().half()
    with Multiplied() as seen, WideProducts(torch.bfloat16):
        assert torch.equal(a @ b, torch.mm(a, b))
        assert (half @ half).dtype == torch.float16
    assert seen.dtypes == {torch.float32, torch.float16}


def test_a_factor_of_another_dtype_is_torchs_error_as_ever() -> None:
    a, b = of([(4, 4), (4, 4)], torch.float32)
    for one, other in ((a, b.bfloat16()), (a.bfloat16(), b), (a.half(), b.bfloat16())):
        with WideProducts(torch.bfloat16), pytest.raises(RuntimeError, match="dtype"):
            one @ other
    bias = torch.zeros(4).bfloat16()
    with WideProducts(torch.bfloat16), pytest.raises(RuntimeError, match="dtype"):
        torch.addmm(bias, a.bfloat16(), b)


def test_what_is_not_on_the_cpu_is_left_alone() -> None:
    a = torch.ones(4, 4, dtype=torch.bfloat16, device="meta")
    with Multiplied() as seen, WideProducts(torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
    assert seen.dtypes == {torch.bfloat16}


def test_the_weights_of_a_module_and_their_gradients_stay_float32_under_autocast() -> None:
    linear, x = torch.nn.Linear(6, 4), torch.randn(3, 6)
    with Multiplied() as seen, WideProducts(torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16):
            out = linear(x)
        out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert linear.weight.grad is not None
    assert linear.weight.grad.dtype == torch.float32
    assert seen.dtypes == {torch.float32}


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_computed_again_for_a_backward_pass_is_computed_so_too(reentrant: bool) -> None:
    (x,), (w,) = of([(3, 4)], torch.bfloat16), of([(4, 4)], torch.bfloat16)
    with Multiplied() as seen, WideProducts(torch.bfloat16):
        out = torch.utils.checkpoint.checkpoint(lambda x: torch.tanh(x @ w), x, use_reentrant=reentrant)
        out.sum().backward()
    assert seen.dtypes == {torch.float32}


def test_it_is_for_a_processor_that_has_none_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    module._say.cache_clear()
    monkeypatch.setattr(module, "emulated", lambda dtype: dtype == torch.bfloat16)
    cpu = torch.device("cpu")
    for _ in range(2):
        assert isinstance(wide_products(torch.bfloat16, cpu), WideProducts)
    assert [record.message for record in caplog.records] == [
        "this processor has no products of torch.bfloat16: they are made in float32, and rounded"
    ]
    for dtype, device in ((torch.float16, cpu), (torch.bfloat16, torch.device("meta"))):
        assert not isinstance(wide_products(dtype, device), WideProducts)


@pytest.mark.parametrize(
    ("machine", "bf16", "amx", "expected"),
    [
        ("x86_64", False, False, True),
        ("AMD64", False, False, True),
        ("x86_64", False, None, False),
        ("x86_64", True, False, False),
        ("x86_64", False, True, False),
        ("aarch64", False, False, False),
    ],
)
def test_a_processor_has_bf16_where_either_of_two_sets_of_instructions_does(
    machine: str, bf16: bool, amx: bool | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx, raising=False)
    if amx is None:  # a torch that cannot say
        monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported")
    emulated.cache_clear()
    try:
        assert emulated(torch.bfloat16) is expected
    finally:
        emulated.cache_clear()


@pytest.mark.parametrize("known", [True, False])
def test_float16_has_instructions_of_its_own(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: not known, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: not known, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_fp16_supported", lambda: known, raising=False)
    emulated.cache_clear()
    try:
        assert emulated(torch.float16) is not known
    finally:
        emulated.cache_clear()
