"""Models on a GPU: the numbers of the CPU, and transformers' models with the tied loss in place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bowline.nn.modules.tied_loss import use_tied_loss
from tests.models.sizes import CLASSES, configs


@pytest.fixture(autouse=True)
def whole_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's LSTM would round its factors to 10 bits."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def batch(family: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 60, (3, 12), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, ::4] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("family", list(CLASSES))
@pytest.mark.parametrize("loss_only", [False, True])
def test_losses_and_gradients_are_those_of_the_cpu(family: str, loss_only: bool) -> None:
    torch.manual_seed(0)
    model: Any = CLASSES[family](configs(60, 16, 2)[family]).train(family == "lstm")  # cuDNN's has no gradients else
    for part in model.modules():
        part.p = 0.0  # of dropout
    model.loss_only = loss_only
    there = copy.deepcopy(model).to("cuda")
    here = batch(family)
    one = model(**here).loss
    other = there(**{name: tensor.cuda() for name, tensor in here.items()}).loss
    one.backward()
    other.backward()
    torch.testing.assert_close(other.cpu(), one, rtol=1e-5, atol=1e-6)
    theirs = dict(there.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(theirs[name].grad.cpu(), parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "lstm", "t5"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=str)
def test_the_likeliest_tokens_are_those_of_the_cpu(family: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    spread = {"initializer_range": 1.0} if family == "lstm" else {}  # or all tokens are as good as each other
    model: Any = CLASSES[family](configs(60, 16, 2)[family].updated(**spread)).eval()
    ids = batch(family)["input_ids"][:, :5]
    options = {"max_new_tokens": 8, "do_sample": False, **options}
    expected = model.generate(ids, **options)
    found = copy.deepcopy(model).to("cuda").generate(ids.cuda(), **options)
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_gpt2_trains_to_the_same_losses_with_less_memory(
    dtype: torch.dtype, compiled: bool, peak: Callable[..., float], quiet_transformers: None
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=256, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    plain = transformers.GPT2LMHeadModel(config).to("cuda", dtype)
    ours = copy.deepcopy(plain)
    use_tied_loss(ours)
    ids = torch.randint(0, 50257, (4, 512), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    losses, peaks = [], []
    for model in (plain, ours):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        call = torch.compile(model, backend="aot_eager") if compiled else model

        def step(call: Any = call, optimizer: Any = optimizer) -> torch.Tensor:
            loss: torch.Tensor = call(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        losses.append(torch.stack([step() for _ in range(20)]))
        peaks.append(peak(step))
    near = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(losses[1].float(), losses[0].float(), rtol=near, atol=near)
    assert peaks[1] < 0.7 * peaks[0]
