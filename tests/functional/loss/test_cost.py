"""What the loss saves for the backward pass, what it allocates, and whether it compiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bowline.functional.loss import linear_cross_entropy
from tests.functional.loss.cases import BACKENDS, OPTIONS, case, gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("options", "also"),
    [
        ({}, 0),
        ({"label_smoothing": 0.1, "z_loss": 0.01, "mask_ids": [0], "logit_scale": 0.5}, 0),
        ({"softcap": 3.0}, 0),  # tanh keeps what it gave
    ],
)
def test_for_the_backward_pass_only_the_logits_are_kept_of_all_that_is_as_large(
    dtype: torch.dtype, options: dict[str, Any], also: int
) -> None:
    rows, size = 16, 400
    hidden = torch.randn(rows, 4, dtype=dtype, requires_grad=True)
    weight = torch.randn(size, 4, dtype=dtype, requires_grad=True)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def large(backend: str) -> int:
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            alive = linear_cross_entropy(hidden, weight, torch.randint(1, size, (rows,)), backend=backend, **options)
        assert alive.requires_grad
        return sum(bytes_ for bytes_ in kept.values() if bytes_ >= rows * size * dtype.itemsize)

    assert large("logits") == (1 + also) * rows * size * dtype.itemsize
    assert large("reference") >= large("logits")


def test_of_frozen_hidden_states_there_is_one_product_in_the_backward_pass() -> None:
    weight = torch.randn(400, 4, requires_grad=True)
    loss = linear_cross_entropy(torch.randn(16, 4), weight, torch.arange(16), backend="logits")
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    assert counter.get_total_flops() == 2 * 16 * 400 * 4


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, while it traces
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[-1]])
def test_it_compiles_into_one_graph(backend: str, options: dict[str, Any]) -> None:
    hidden, weight, labels, bias = case()

    def loss_of(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        return linear_cross_entropy(hidden, weight, labels, bias=bias, backend=backend, **options)

    torch.compiler.reset()
    compiled, plain = torch.compile(loss_of, fullgraph=True, backend="eager"), loss_of(hidden, weight, bias)
    loss = compiled(hidden, weight, bias)
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(gradients(loss, hidden, weight, bias), gradients(plain, hidden, weight, bias))
