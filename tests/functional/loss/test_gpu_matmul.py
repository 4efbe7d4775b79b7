"""The products of a GPU: sums tested on a CPU, and GPU-only calls on tensors with shape and dtype only."""

from __future__ import annotations

import pytest
import torch

from bowline.functional.loss import linear_cross_entropy
from bowline.functional.loss.chunks import chunk_loop, chunk_size, gpu_matmul
from bowline.functional.loss.chunks.gpu_loop import run_on_gpu
from bowline.functional.loss.chunks.gpu_matmul import GpuProducts


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunks", [1, 3])
def test_chunks_are_summed_in_float32_and_rounded_once(
    dtype: torch.dtype, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_matmul, "_widens", lambda _: False)  # a CPU does not
    torch.manual_seed(0)
    by, weight = GpuProducts(), torch.randn(70, 8).to(dtype)
    hidden, x = torch.randn(6 * chunks, 8).to(dtype), torch.randn(6 * chunks, 70).to(dtype)
    sums = by.sums(weight, chunks).fill_(torch.nan)
    for at, (some, rows) in enumerate(zip(hidden.split(6), x.split(6), strict=True)):
        by.add_grad_weight(sums, rows, by.ready(some), first=at == 0)
        assert by.make_grad_hidden(rows, weight).dtype == torch.promote_types(dtype, torch.float32)
    exact = x.double().t() @ hidden.double()
    assert sums.dtype == (dtype if chunks == 1 else torch.promote_types(dtype, torch.float32))
    torch.testing.assert_close(sums.double(), exact, rtol=0, atol=8 * torch.finfo(dtype).eps * float(exact.abs().max()))


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-6), (torch.bfloat16, 0.004)])
@pytest.mark.parametrize("rows", [3, 40])
def test_a_sweep_with_them_gives_the_gradients(
    dtype: torch.dtype, near: float, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_matmul, "_widens", lambda _: False)
    monkeypatch.setattr(chunk_loop, "run_on_cpu", run_on_gpu)
    monkeypatch.setattr(chunk_size, "ROOFLINE", {"cpu": (rows, rows), "cuda": (rows, rows)})
    torch.manual_seed(0)
    ends = [torch.randn(*shape).to(dtype) for shape in ((40, 16), (70, 16))]
    labels = torch.randint(0, 70, (40,))
    found = []
    for backend, wide in (("chunked", dtype), ("reference", torch.float64)):
        hidden, weight = (end.to(wide).requires_grad_() for end in ends)
        loss = linear_cross_entropy(hidden, weight, labels, backend=backend)
        found.append(torch.autograd.grad(loss, (hidden, weight)))
    for ours, exact in zip(*found, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - exact).norm() <= near * exact.norm()


@pytest.mark.parametrize("chunks", [1, 3])
def test_what_this_torch_widens_has_the_shape_and_the_dtype(chunks: int) -> None:
    if chunks > 1 and torch.__version__ < "2.12":
        pytest.skip("torch 2.11 cannot trace addmm with out_dtype")
    x, hidden, weight = (
        torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((6, 70), (6, 8), (70, 8))
    )
    by = GpuProducts()
    sums = by.sums(weight, chunks)
    for first in (True, False):
        by.add_grad_weight(sums, x, by.ready(hidden), first)
    if not gpu_matmul._widens(x.device):
        pytest.skip("this torch has no product of half precision to float32")
    found = by.make_grad_hidden(x, weight)
    assert found.shape == (6, 8) and found.dtype == torch.float32
