"""The three products by every library, in blocks that do not divide the vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bowline.errors import UsageError
from bowline.functional.loss import full_logits, linear_cross_entropy, resources
from bowline.functional.loss.chunks import matmul_choice
from bowline.functional.loss.chunks.chunk_size import chunk_rows
from bowline.functional.loss.chunks.cpu_matmul import LIBRARIES
from bowline.functional.loss.resource_limits import Resources, current


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 4, 70, 130])
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_those_of_float64(name: str, dtype: torch.dtype, size: int, bias: bool) -> None:
    if name == "onednn" and dtype != torch.float32:
        pytest.skip("torch.mm itself takes oneDNN for these")
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 5).to(dtype), torch.randn(size, 5).to(dtype)
    added = torch.randn(size).to(dtype) if bias else None
    by = LIBRARIES[name]
    x = by.room(6, weight)
    by.make_logits(by.ready(hidden), weight, added, x)
    exact = hidden.double() @ weight.double().t() + (0 if added is None else added.double())
    near: dict[str, Any] = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps}
    torch.testing.assert_close(x.double(), exact, **near)
    given = x.clone()
    grad_hidden = by.make_grad_hidden(x, weight)
    assert grad_hidden.dtype == torch.float32
    wide = given.double().abs() @ weight.double().abs()
    assert ((grad_hidden - given.double() @ weight.double()).abs() <= 4 * torch.finfo(dtype).eps * wide + 1e-6).all()
    gradient = torch.full_like(weight, torch.nan)  # the first product overwrites what was there
    by.add_grad_weight(gradient, x, by.ready(hidden), first=True)
    by.add_grad_weight(gradient, x, by.ready(hidden), first=False)
    bound = 8 * torch.finfo(dtype).eps * (given.double().abs().t() @ hidden.double().abs()) + 1e-6
    assert ((gradient.double() - 2 * given.double().t() @ hidden.double()).abs() <= bound).all()


@pytest.mark.parametrize("name", LIBRARIES)
def test_the_loss_is_the_same_by_every_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_choice, "WORTH_TIMING", 0)
    monkeypatch.setattr(matmul_choice, "_timed", lambda *_: name)
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 5, requires_grad=True), torch.randn(11, 5, requires_grad=True)
    labels, bias = torch.randint(0, 11, (7,)), torch.randn(11)
    found = []
    for backend in ("chunked", "reference"):
        loss = linear_cross_entropy(hidden, weight, labels, bias=bias, backend=backend)
        found.append([loss, *torch.autograd.grad(loss, (hidden, weight))])
    torch.testing.assert_close(*found)


# --- chunks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "size", "dtype", "expected"),
    [
        (2048, 50257, torch.float32, 256),
        (2048, 50257, torch.bfloat16, 512),
        (1024, 128256, torch.bfloat16, 208),  # five chunks, four of them equal
        (128, 128256, torch.bfloat16, 128),
        (8192, 256000, torch.float32, 64),  # the least
        (8192, 1000, torch.float32, 1024),  # the most
        (1, 50257, torch.float32, 1),
        (0, 50257, torch.float32, 1),
    ],
)
@pytest.mark.usefixtures("real_chunks")
def test_rows_of_a_chunk_fit_the_budget(rows: int, size: int, dtype: torch.dtype, expected: int) -> None:
    assert chunk_rows(rows, size, dtype, torch.device("cpu"), 64 * 2**20) == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"budget": 0}, "budget=0: expected a number of bytes above 0, or None"),
        ({"bugdet": 1}, "'bugdet': expected budget"),
        ({"compiler": None}, "compiler=None: expected True or False"),
        ({"onednn": "no"}, "onednn='no': expected True or False"),
    ],
)
def test_resources_that_mean_nothing_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words), resources(**changes):
        pass


def test_resources_add_up_inside_and_are_what_they_were_outside() -> None:
    with resources(budget=5, compiler=False), resources(onednn=False) as inner:
        assert inner == current() == Resources(budget=5, compiler=False, onednn=False)
    with pytest.raises(ZeroDivisionError), resources(budget=1):
        raise ZeroDivisionError
    assert current() == Resources()


@pytest.mark.usefixtures("real_chunks")
def test_rows_of_a_gpus_chunk_are_whole_tiles() -> None:
    gpu = torch.device("cuda")
    assert chunk_rows(8192, 151936, torch.bfloat16, gpu, 2**30) == 2816  # three chunks
    assert chunk_rows(8192, 50257, torch.bfloat16, gpu, 2**30) == 4096
    assert chunk_rows(130, 151936, torch.bfloat16, gpu, 2**30) == 130  # one
    assert chunk_rows(1040, 50304, torch.bfloat16, gpu, 520 * 50304 * 2) == 384  # 640 would be over the budget


@pytest.mark.usefixtures("real_chunks")
def test_the_sums_of_chunks_come_off_the_budget_and_are_not_needed_for_one() -> None:
    gpu, half = torch.device("cuda"), torch.bfloat16
    qwen, llama = 151936 * 1024 * 2, 128256 * 4096 * 2
    assert chunk_rows(8192, 151936, half, gpu, 2**30, sums=qwen) == 2048  # four chunks
    assert chunk_rows(8192, 128256, half, gpu, 2 * llama, sums=llama) == 8192  # one
    assert chunk_rows(8320, 128256, half, gpu, 2 * llama, sums=llama) == 2816
    assert chunk_rows(0, 128256, half, gpu, 2**30, sums=llama) == 1


def test_on_a_gpu_too_the_losses_of_kept_logits_are_computed_some_rows_at_a_time() -> None:
    logits = torch.empty(8192, 151936, dtype=torch.bfloat16, device="meta")
    assert 1 < full_logits._rows(logits) <= 2**26 // 151936  # 256 MiB in float32
