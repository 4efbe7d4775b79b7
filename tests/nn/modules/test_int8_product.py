"""A decoding step's product with the int8 table: as exact as the float product, which it leaves to gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from bowline.nn.modules import int8_product
from bowline.nn.modules.quantized_table import QuantizedTable

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def table_of(rows: int, width: int, dtype: torch.dtype) -> QuantizedTable:
    generator = torch.Generator().manual_seed(0)
    return QuantizedTable(torch.randn(rows, width, generator=generator).to(dtype))


def exact(hidden: torch.Tensor, table: QuantizedTable) -> torch.Tensor:
    return F.linear(hidden.double(), table.values.double() * table.scale.double()[:, None])


@pytest.mark.parametrize("vnni", [True, False], ids=["vnni", "plain"])
@pytest.mark.parametrize("states", [1, 3, 40])
@pytest.mark.parametrize("shape", [(40_000, 32), (50, 5), (1, 1), (3000, 577), (333, 64)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_way_is_as_exact_as_the_float_product(
    dtype: torch.dtype, shape: tuple[int, int], states: int, vnni: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if vnni and not int8_product._multiplies_int8():
        pytest.skip("this processor has no int8 products")
    monkeypatch.setattr(int8_product, "_multiplies_int8", lambda: vnni)
    table = table_of(*shape, dtype)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(states, shape[1], generator=generator)
    hidden[0, 0] = 30  # one large entry, as trained models have
    hidden = hidden.to(dtype)
    with torch.no_grad():
        found = table.product(hidden)
    wanted = exact(hidden, table)
    assert found.dtype is dtype
    assert found.shape == (states, shape[0])
    summed = hidden.double().abs().sum(1, keepdim=True) * table.scale.double() * 127
    rounding = wanted.abs() * torch.finfo(dtype).eps + summed * (1e-6 if dtype is not torch.float64 else 1e-15)
    assert bool(((found.double() - wanted).abs() <= rounding).all())


def test_the_shape_of_the_states_is_kept_and_zero_states_give_zero_logits() -> None:
    table = table_of(50, 8, torch.float32)
    with torch.no_grad():
        assert table.product(torch.zeros(2, 2, 8)).shape == (2, 2, 50)
        assert not table.product(torch.zeros(1, 8)).any()
        assert table.product(torch.zeros(0, 8)).shape == (0, 50)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_state_that_is_not_finite_gives_no_finite_logit(dtype: torch.dtype) -> None:
    table = table_of(50, 8, dtype)
    for number in (torch.nan, torch.inf):
        hidden = torch.ones(1, 8, dtype=dtype)
        hidden[0, 3] = number
        with torch.no_grad():
            logits = table.product(hidden)
        hit = table.values[:, 3] != 0
        assert not torch.isfinite(logits[0, hit]).any()


def test_a_gradient_goes_through_the_float_product() -> None:
    table = table_of(50, 8, torch.float32)
    hidden = torch.randn(1, 8, requires_grad=True)
    assert int8_product.fast_product(hidden, table.values, table.scale) is None
    table.product(hidden).sum().backward()
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad[0], table.rows().sum(0))


@pytest.mark.filterwarnings(  # torch's own, of forward derivatives; torch 2.14 warns by FutureWarning
    "ignore:`torch.jit.script`:DeprecationWarning", "ignore:`torch.jit.script`:FutureWarning:torch.jit._script"
)
def test_forward_derivatives_and_vmap_go_through_the_float_product() -> None:
    table = table_of(50, 32, torch.float32)
    hidden, direction = torch.randn(3, 32), torch.randn(3, 32)
    with torch.no_grad():
        plain = table.product(hidden)
        batched = torch.func.vmap(table.product)(hidden)
    torch.testing.assert_close(batched, plain, rtol=1e-5, atol=1e-4)
    with torch.autograd.forward_ad.dual_level():
        dual = table.product(torch.autograd.forward_ad.make_dual(hidden, direction))
        derivative = torch.autograd.forward_ad.unpack_dual(dual).tangent
    torch.testing.assert_close(derivative, direction @ table.rows().T)


def test_another_default_device_does_not_matter() -> None:
    table = table_of(50, 8, torch.float32)
    for states in (1, 9):
        with torch.no_grad(), torch.device("meta"):
            assert table.product(torch.ones(states, 8, device="cpu")).device.type == "cpu"


def test_autocast_decides_the_dtype_of_the_logits() -> None:
    table = table_of(50, 8, torch.float32)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert table.product(torch.randn(1, 8)).dtype is torch.bfloat16


def test_a_compiled_head_gives_the_same_logits() -> None:
    table = table_of(50, 8, torch.float32)
    hidden = torch.randn(1, 8)
    with torch.no_grad():
        compiled = torch.compile(table.product, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(hidden), table.product(hidden), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.trace.*:DeprecationWarning",
    "ignore:`torch.jit.trace`:FutureWarning:torch.jit._trace",
    "ignore::torch.jit.TracerWarning",
)
def test_a_traced_head_does_not_keep_the_size_of_the_state_that_it_was_traced_with() -> None:
    table = table_of(50, 8, torch.float32)
    with torch.no_grad():
        traced = torch.jit.trace(lambda states: table.product(states), torch.ones(1, 8))
        hidden = 40 * torch.randn(1, 8)
        torch.testing.assert_close(traced(hidden), table.product(hidden), rtol=1e-5, atol=1e-4)
