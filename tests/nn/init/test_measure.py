"""The measured loss: the plain cross entropy of each kind of model, on tokens and labels drawn apart."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bowline import models
from bowline.errors import UsageError
from bowline.nn.init import init_weights, measure_loss
from bowline.recipes import expected_loss
from tests.nn.init.tiny import bowlines, transformers_model
from tests.nn.models import TinyLM

pytestmark = pytest.mark.usefixtures("quiet_transformers")


class Keeping(nn.Module):
    """Gives the logits it is told to, and keeps the tokens it was asked about."""

    def __init__(self, rows: int = 50, padding: int | None = None) -> None:
        super().__init__()
        self.wte = nn.Embedding(rows, 4)
        self.logits: torch.Tensor = torch.linspace(-1, 1, rows).repeat(8, 32, 1)
        self.config = SimpleNamespace(pad_token_id=padding)
        self.seen: list[torch.Tensor] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        assert not self.training and not torch.is_grad_enabled()
        self.seen.append(ids)
        return self.logits


def test_it_is_the_mean_cross_entropy_of_uniform_labels() -> None:
    model = Keeping()
    measured = measure_loss(model, batches=40)
    each = torch.linspace(-1, 1, 50).double()
    losses = each.logsumexp(0) - each  # of the 50 labels, which are as likely as each other
    assert measured.tokens == 40 * 8 * 32
    assert abs(measured.loss - float(losses.mean())) < 5 * measured.error  # once in 1.7 million
    assert measured.spread == pytest.approx(float(losses.std(correction=0)), rel=0.05)
    assert measured.error == pytest.approx(measured.spread / math.sqrt(measured.tokens))
    ids = torch.stack(model.seen)
    assert ids.shape == (40, 8, 32) and set(ids.unique().tolist()) == set(range(50))


@pytest.mark.parametrize("padding", [0, 7, 49])
def test_padding_is_neither_token_nor_label(padding: int) -> None:
    model = Keeping(padding=padding)
    model.logits[..., padding] = -math.inf  # a label there would make the loss infinite
    assert math.isfinite(measure_loss(model, batches=20).loss)
    assert set(torch.stack(model.seen).unique().tolist()) == set(range(50)) - {padding}


def test_seeds_modes_and_the_global_generator() -> None:
    model = TinyLM(50, 8)
    model.norm.eval()
    state = torch.get_rng_state()
    first = measure_loss(model, seed=0)
    assert torch.equal(state, torch.get_rng_state())
    assert (model.training, model.norm.training, model.emb.training) == (True, False, True)
    assert measure_loss(model, seed=0) == first != measure_loss(model, seed=1)


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "mt5", "bart", "llama", "gemma", "roberta"])
def test_every_kind_of_transformers_model_is_measured(name: str) -> None:
    model = transformers_model(name)
    assert measure_loss(model, length=8).loss == pytest.approx(math.log(40), abs=1.0 if name != "mt5" else 30)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["bert", "gpt2", "t5", "lstm"])
def test_a_familys_measured_loss_is_its_cross_entropy(family: str, tied: bool) -> None:
    model, _ = bowlines(tied=tied)[family]
    measured = measure_loss(model, batch=4, length=10, seed=2)
    generator = torch.Generator().manual_seed(2)
    padding = getattr(model.config, "pad_token_id", None)

    def draw() -> torch.Tensor:
        ids = torch.randint(40 if padding is None else 39, (4, 10), generator=generator)
        return ids if padding is None else torch.where(ids >= padding, ids + 1, ids)

    inputs: dict[str, Any] = {"input_ids": draw()}
    if family == "t5":
        inputs["decoder_input_ids"] = draw()
    output = model.eval()(**inputs)
    logits = getattr(output, "prediction_logits", None)
    logits = output.logits if logits is None else logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), draw().flatten())
    assert measured.loss == pytest.approx(float(loss), rel=1e-5)


def test_a_drawn_model_has_the_loss_that_its_recipe_predicts() -> None:
    config = models.GPT2Config(vocab_size=4000, n_embd=128, n_layer=2, n_head=4, n_positions=64)
    model = models.GPT2LMHeadModel(config.updated(bos_token_id=0, eos_token_id=0))
    for recipe in ("transformers-gpt2", "vaswani", "t5-mesh"):
        init_weights(model, recipe, seed=0)
        expected = expected_loss(model, recipe).loss
        measured = measure_loss(model, batches=4)
        assert abs(measured.loss - expected) < max(0.05 * expected, 3 * measured.error), recipe


def test_what_has_no_logits_is_refused() -> None:
    with pytest.raises(UsageError, match=r"expected logits \(8, 4, 'V'\)"):
        measure_loss(models.BertModel(bowlines()["bert"][0].config), length=4)
    with pytest.raises(UsageError, match="has only 12 positions"):
        measure_loss(transformers_model("gpt2", n_positions=12))
    for options in ({"batch": 0}, {"length": -1}, {"batches": True}):
        with pytest.raises(UsageError, match="expected a whole number from 1"):
            measure_loss(TinyLM(), **options)
