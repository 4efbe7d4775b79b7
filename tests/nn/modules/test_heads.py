"""A head that multiplies rows is `nn.Linear` in everything but the shape of its product."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bowline.nn import check_ties, find_ties
from bowline.nn.modules.heads import LMHead


def pair(bias: bool = False, dtype: torch.dtype = torch.float32) -> tuple[LMHead, nn.Linear]:
    torch.manual_seed(0)
    head = LMHead(4, 9, bias=bias, dtype=dtype)
    plain = nn.Linear(4, 9, bias=bias, dtype=dtype)
    plain.load_state_dict(head.state_dict())
    return head, plain


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (2, 5, 3, 4), (0, 3, 4), (2, 0, 4)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_values_and_gradients_are_those_of_linear(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    head, plain = pair(bias, dtype)
    hidden = torch.randn(shape, dtype=dtype, requires_grad=True)
    other = hidden.detach().clone().requires_grad_()
    ours, torchs = head(hidden), plain(other)
    torch.testing.assert_close(ours, torchs)
    assert ours.shape == (*shape[:-1], 9)
    ours.sum().backward()
    torchs.sum().backward()
    torch.testing.assert_close(hidden.grad, other.grad)
    torch.testing.assert_close(head.weight.grad, plain.weight.grad)


@pytest.mark.parametrize("hidden", [torch.randn(4, 3, 2).mT.mT.transpose(0, 2), torch.randn(2, 3, 8)[..., ::2]])
def test_hidden_states_may_lie_in_memory_as_they_like(hidden: torch.Tensor) -> None:
    head, plain = pair()
    assert not hidden.is_contiguous()
    torch.testing.assert_close(head(hidden), plain(hidden))


def test_names_copies_and_ties_are_those_of_linear() -> None:
    model = nn.ModuleDict({"wte": nn.Embedding(9, 4), "lm_head": LMHead(4, 9, bias=False)})
    model["lm_head"].weight = model["wte"].weight
    assert isinstance(model["lm_head"], nn.Linear)
    assert list(model.state_dict()) == ["wte.weight", "lm_head.weight"]
    again = copy.deepcopy(model)
    assert again["lm_head"].weight is again["wte"].weight
    assert check_ties(again, find_ties(again))


def test_the_logits_of_the_last_position_alone_are_those_of_all() -> None:
    head, _ = pair(dtype=torch.float64)
    hidden = torch.randn(2, 3, 4, dtype=torch.float64)
    torch.testing.assert_close(head(hidden[:, -1]), head(hidden)[:, -1])
