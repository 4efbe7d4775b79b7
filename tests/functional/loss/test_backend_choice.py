"""The backend that `auto` chooses and `chosen_backend` names; the module form of the function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from bowline.errors import UsageError
from bowline.functional.loss import chosen_backend, linear_cross_entropy, resources
from bowline.nn import LinearCrossEntropy
from tests.functional.loss.cases import V, case, gradients


@pytest.mark.parametrize(
    ("rows", "options", "expected"),
    [
        (64, {}, "logits"),  # 64 x 8192 float32: 2 MiB
        (1024, {}, "chunked"),
        (1024, {"reduction": "sum"}, "chunked"),
        (1024, {"reduction": "none"}, "logits"),  # 32 MiB, and chunks would cost a fourth product
        (4096, {"reduction": "none"}, "chunked"),
        (4096, {"return_lse": True}, "chunked"),
        (1024, {"return_logits": True}, "logits"),
        (1024, {"return_logits": True, "backend": "chunked"}, "logits"),
        (4, {"backend": "chunked"}, "chunked"),
        (4096, {"backend": "logits"}, "logits"),
        (4096, {"backend": "reference"}, "reference"),
        (4, {"backend": "torch"}, "torch"),
    ],
)
def test_the_choice_follows_what_is_asked_for_and_the_shape(rows: int, options: dict[str, Any], expected: str) -> None:
    assert chosen_backend(torch.empty(rows, 4), torch.empty(8192, 4), **options) == expected


def test_the_choice_follows_the_budget() -> None:
    with resources(budget=2**20):
        assert chosen_backend(torch.empty(1024, 4), torch.empty(8192, 4), reduction="none") == "chunked"


def test_where_functions_are_transformed_or_compiled_auto_is_what_allows_it() -> None:
    hidden, weight = torch.randn(1024, 4), torch.randn(8192, 4)
    seen: list[str] = []

    def loss_of(weight: torch.Tensor) -> Any:
        seen.append(chosen_backend(hidden, weight))
        return linear_cross_entropy(hidden, weight, torch.ones(1024, dtype=torch.long))

    gradient = torch.func.grad(loss_of)(weight)
    assert seen == ["reference"] and gradient.shape == weight.shape


class Another(torch.Tensor):
    """A subclass such as DTensor multiplies itself."""


def test_the_products_are_left_to_a_subclass() -> None:
    hidden, weight = torch.empty(1024, 4), torch.empty(8192, 4)
    for ends in ((hidden.as_subclass(Another), weight), (hidden, weight.as_subclass(Another))):
        assert chosen_backend(*ends) == chosen_backend(*ends, backend="chunked") == "logits"


def test_a_bias_of_a_subclass_is_added_by_itself() -> None:
    torch.manual_seed(0)
    hidden, weight, bias, labels = torch.randn(200, 8), torch.randn(6000, 8), torch.randn(6000), torch.arange(200)
    found = linear_cross_entropy(hidden, weight, labels, bias=TwoTensor(bias, bias + 1), backend="chunked")
    assert type(found) is TwoTensor
    torch.testing.assert_close(found.a, linear_cross_entropy(hidden, weight, labels, bias=bias))


def test_a_backend_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="backend='fast'"):
        chosen_backend(torch.empty(1, 4), torch.empty(2, 4), backend="fast")


# --- the module -------------------------------------------------------------------------------------------------------


def test_the_module_is_the_function_with_its_options_given_once() -> None:
    hidden, weight, labels, bias = case()
    factors = torch.rand(V, dtype=torch.float64)
    options: dict[str, Any] = {"z_loss": 0.01, "softcap": 3.0, "reduction": "sum", "class_weight": factors}
    module = LinearCrossEntropy(**options)
    ours, expected = (
        module(hidden, weight, labels, bias),
        linear_cross_entropy(hidden, weight, labels, bias=bias, **options),
    )
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(gradients(ours, hidden, weight, bias), gradients(expected, hidden, weight, bias))
    assert list(module.parameters()) == [] and module.state_dict() == {}


def test_a_shifted_loss_is_that_of_the_next_tokens() -> None:
    hidden, weight, labels, _ = case()
    shifted = LinearCrossEntropy(shift=True, ignore_index=-1)(hidden, weight, labels.masked_fill(labels < 0, -1))
    expected = linear_cross_entropy(hidden[:, :-1], weight, labels[:, 1:])
    torch.testing.assert_close(shifted, expected)
    torch.testing.assert_close(gradients(shifted, hidden), gradients(expected, hidden))


def test_an_option_that_is_none_is_refused_when_the_module_is_made() -> None:
    with pytest.raises(UsageError, match=r"'smoothing': expected an option .*label_smoothing"):
        LinearCrossEntropy(smoothing=0.1)
