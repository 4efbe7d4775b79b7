"""A torch tensor gives the same figures as a numpy array; a tensor without plain values is refused."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bowline import geometry
from bowline.errors import UsageError
from tests.geometry.tables import SCALE_FREE, gaussian

FIGURES: tuple[Callable[..., Any], ...] = (
    *SCALE_FREE,
    geometry.isotropy,
    geometry.row_norm_quantiles,
    geometry.describe,
)
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def drawn(dtype: torch.dtype = torch.float32, rows: int = 80, hidden_size: int = 7) -> torch.Tensor:
    return torch.from_numpy(gaussian(rows, hidden_size)).to(dtype)


@pytest.mark.parametrize("shape", [(80, 7), (5, 12)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_every_figure_is_that_of_the_same_numbers_in_numpy(
    shape: tuple[int, int], dtype: torch.dtype, requires_grad: bool
) -> None:
    tensor = drawn(dtype, *shape)
    array = tensor.double().numpy() if dtype is torch.float64 else tensor.float().numpy()
    tensor.requires_grad_(requires_grad)
    for figure in FIGURES:
        assert figure(tensor) == figure(array), figure.__name__
    assert geometry.self_decoding_failures(tensor).tolist() == geometry.self_decoding_failures(array).tolist()
    for found, expected in zip(geometry.nearest_rows(tensor), geometry.nearest_rows(array), strict=True):
        assert found.tolist() == expected.tolist()
    assert tensor.requires_grad is requires_grad
    assert tensor.grad is None


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.int64])
def test_dtypes_that_no_table_is_trained_in_are_read_too(dtype: torch.dtype) -> None:
    tensor = (4 * drawn()).to(dtype)
    assert geometry.describe(tensor) == geometry.describe(tensor.double().numpy())


def test_float64_is_not_narrowed() -> None:
    table = torch.tensor([[1.0, 0.0], [1 + 1e-12, 0.0]], dtype=torch.float64)
    assert geometry.self_decoding_failures(table).tolist() == [0]


def test_a_parameter_of_a_module_is_a_table() -> None:
    embedding = torch.nn.Embedding(40, 6)
    assert geometry.describe(embedding.weight) == geometry.describe(embedding.weight.detach().numpy())


def test_a_view_is_read_where_it_lies() -> None:
    wide = drawn(rows=20, hidden_size=30)
    for view in (wide.t(), wide[::2, 1:25:3], wide[:1].expand(5, 30)):
        assert geometry.describe(view) == geometry.describe(view.numpy())


def test_bfloat16_rows_that_are_not_finite_are_left_out() -> None:
    table = drawn(torch.bfloat16)
    table[3, 2] = torch.nan
    table[5, 0] = torch.inf
    assert geometry.describe(table).left_out_rows == 2


def test_a_sample_of_a_tensor_is_a_sample() -> None:
    table = drawn(torch.bfloat16, 500, 6)
    chosen = geometry.sample_rows(500, 6, budget_bytes=2400)
    assert chosen is not None
    report = geometry.describe(table[chosen], rows=500)
    assert report == geometry.describe(table.float().numpy()[chosen], rows=500)
    assert report.sampled_rows == 100


def test_row_numbers_may_be_a_tensor() -> None:
    table = drawn()
    assert (
        geometry.nearest_rows(table, torch.tensor([3, 1]))[0].tolist()
        == geometry.nearest_rows(table, [3, 1])[0].tolist()
    )


def quantised() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(drawn(), 0.1, 0, torch.qint8)


def compressed() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return drawn().to_sparse_csr()


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3, 2)


@pytest.mark.parametrize(
    ("make", "seen", "way_out"),
    [
        (lambda: torch.ones(3, 2, device="meta"), "on the meta device", "load its values"),
        (lambda: drawn().to_sparse(), "layout torch.sparse_coo", "to_dense"),
        (compressed, "layout torch.sparse_csr", "to_dense"),
        (quantised, "a quantised one (torch.qint8)", "dequantize"),
        (fake, "a FakeTensor", "plain tensor"),
    ],
)
def test_a_tensor_without_plain_values_is_refused_by_name(
    make: Callable[[], torch.Tensor], seen: str, way_out: str
) -> None:
    with pytest.raises(UsageError, match="table: expected a tensor that holds its values") as caught:
        geometry.describe(make())
    assert seen in caught.value.message
    assert way_out in str(caught.value.help)


@pytest.mark.parametrize(
    "tensor", [torch.zeros(3), torch.zeros(2, 2, 2), torch.ones(2, 2) > 0, torch.ones(2, 2) * 1j, torch.tensor(1.0)]
)
def test_a_tensor_that_is_no_table_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(UsageError, match=r"table: expected (two dimensions|floats)"):
        geometry.describe(tensor)


def test_torch_is_not_imported_for_numpy() -> None:
    use = "import numpy\nfrom bowline import geometry\ngeometry.describe(numpy.eye(3))"
    code = f"import sys\n{use}\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


def test_what_is_only_named_like_a_tensor_is_read_by_numpy() -> None:
    class Tensor:
        def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
            return np.eye(3)

    assert geometry.describe(Tensor()) == geometry.describe(np.eye(3))  # type: ignore[arg-type]
