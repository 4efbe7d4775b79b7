"""What an optimizer remembers of old tokens it still knows afterwards, and of new ones nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adam, AdamW

from bowline.nn.vocabulary.resize import resize_vocab
from tests.nn.vocabulary.models import LM, VOCAB, WIDTH, seeded

BATCHES = torch.tensor([[[1, 2, 3]], [[4, 3, 9]], [[1, 9, 10]]])


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    optimizer.zero_grad()
    logits = model(ids[:, :-1])
    loss: Any = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()


def adam_by_hand(
    parameter: torch.Tensor, gradient: torch.Tensor, first: torch.Tensor, second: torch.Tensor, steps: int, rate: float
) -> torch.Tensor:
    """Kingma and Ba 2015, algorithm 1."""
    first = 0.9 * first + 0.1 * gradient
    second = 0.999 * second + 0.001 * gradient**2
    return parameter - rate * (first / (1 - 0.9**steps)) / ((second / (1 - 0.999**steps)).sqrt() + 1e-8)


@pytest.mark.parametrize("n", [15, [9, 1, 2, 3, 10]])
def test_an_adam_step_afterwards_has_old_moments_for_old_rows_and_none_for_new(n: Any) -> None:
    model = seeded(LM(tied=True)).double()
    optimizer = Adam(model.parameters(), lr=0.1)
    for ids in BATCHES:
        step(model, optimizer, ids)
    moments = {key: optimizer.state[model.wte.weight][key].clone() for key in ("exp_avg", "exp_avg_sq")}
    change = resize_vocab(model, n, optimizer=optimizer, pad_to_multiple_of=8)
    first, second = (torch.zeros(change.new_size, WIDTH, dtype=torch.float64) for _ in range(2))
    first[: len(change.kept)] = moments["exp_avg"][change.kept]
    second[: len(change.kept)] = moments["exp_avg_sq"][change.kept]
    before = model.wte.weight.detach().clone()
    step(model, optimizer, torch.tensor([[0, 1, 3]]))
    expected = adam_by_hand(before, model.wte.weight.grad, first, second, len(BATCHES) + 1, 0.1)
    torch.testing.assert_close(model.wte.weight.detach(), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("tied", [True, False])
def test_momentum_follows_each_tensor_once(tied: bool) -> None:
    model = seeded(LM(tied=tied, bias=True))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, optimizer, BATCHES[0])
    old = {name: optimizer.state[p]["momentum_buffer"].clone() for name, p in model.named_parameters()}
    resize_vocab(model, [5, 2], optimizer=optimizer)
    for name, parameter in model.named_parameters():
        buffer = optimizer.state[parameter]["momentum_buffer"]
        assert torch.equal(buffer, old[name] if "layer" in name else old[name][[5, 2]])
    step(model, optimizer, torch.tensor([[0, 1]]))


@pytest.mark.parametrize(
    "make", [lambda ps: AdamW(ps, amsgrad=True), lambda ps: Adafactor(ps), lambda ps: SGD(ps, momentum=0.9)]
)
def test_training_goes_on(make: Any) -> None:
    model = seeded(LM(tied=True, bias=True))
    optimizer = make(model.parameters())
    step(model, optimizer, BATCHES[0])
    resize_vocab(model, VOCAB + 5, optimizer=optimizer)
    step(model, optimizer, torch.tensor([[VOCAB + 4, 1, VOCAB]]))
    assert torch.isfinite(model.wte.weight).all()
    assert optimizer.param_groups[0]["params"][0] is model.wte.weight


def test_an_optimizer_that_has_not_stepped_has_nothing_to_resize() -> None:
    model = seeded(LM())
    optimizer = Adam(model.parameters())
    resize_vocab(model, 15, optimizer=optimizer)
    step(model, optimizer, torch.tensor([[14, 1]]))
    assert optimizer.state[model.wte.weight]["exp_avg"].shape == (15, WIDTH)
