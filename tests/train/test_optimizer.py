"""Which parameters decay, and what the tied matrix counts as."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bowline.errors import UsageError
from bowline.models import (
    BertConfig,
    BertForMaskedLM,
    LSTMConfig,
    LSTMLMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)
from bowline.train import Trainer
from bowline.train.loop.adamw import adamw, decay_groups, untie
from tests.train.runs import Counting, settings, tiny

MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": tiny,
    "bert": lambda: BertForMaskedLM(
        BertConfig(vocab_size=23, hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)
    ),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=23, d_model=12, d_kv=6, d_ff=24, num_layers=1, num_decoder_layers=1, num_heads=2)
    ),
    "lstm": lambda: LSTMLMHeadModel(LSTMConfig(vocab_size=23, hidden_size=12, num_layers=1)),
}


@pytest.mark.parametrize("family", MODELS)
def test_every_parameter_is_in_one_group_once(family: str) -> None:
    model = MODELS[family]()
    optimizer = adamw(decay_groups(model), settings())
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(held) == sorted({id(parameter) for parameter in model.parameters()})


@pytest.mark.parametrize("family", MODELS)
def test_matrices_decay_and_biases_and_norms_do_not(family: str) -> None:
    groups = decay_groups(MODELS[family]())
    assert all(parameter.ndim == 2 for parameter in groups.decayed.values())
    assert all(parameter.ndim == 1 for parameter in groups.plain.values())
    assert not [name for name in groups.decayed if name.endswith("bias") or "norm" in name.lower() or ".ln_" in name]


@pytest.mark.parametrize("family", MODELS)
def test_the_tied_matrix_is_one_parameter_that_decays_and_the_log_says_so(family: str) -> None:
    model = MODELS[family]()
    groups = decay_groups(model)
    head, table = (f"{name}.weight" for name in (model.output_embeddings, model.input_embeddings))
    names = next(names for names in groups.tied if table in names)
    assert {head, table} <= set(names)
    assert [name for name in names if name in groups.decayed] == [names[0]]
    assert f"{names[0]} (also {', '.join(names[1:])}) is one parameter, with weight decay" in str(groups)


def test_an_untied_head_is_a_parameter_of_its_own() -> None:
    groups = decay_groups(tiny(tie_word_embeddings=False))
    assert {"lm_head.weight", "transformer.wte.weight"} <= set(groups.decayed)
    assert groups.tied == ()


def test_what_does_not_train_is_in_no_group() -> None:
    model = tiny()
    model.transformer.wpe.weight.requires_grad_(False)
    assert "transformer.wpe.weight" not in decay_groups(model).decayed


def test_a_step_is_that_of_the_paper_in_float64() -> None:
    """w - lr (m / (sqrt(v) + eps) + decay w), with both moments corrected for their start at 0."""
    torch.manual_seed(0)
    layer = nn.Linear(5, 3)
    wanted = {name: parameter.detach().double() for name, parameter in layer.named_parameters()}
    chosen = settings(weight_decay=0.3, learning_rate=0.01, betas=(0.8, 0.9), eps=1e-6)
    optimizer = adamw(decay_groups(layer), chosen)
    first = {name: torch.zeros_like(value) for name, value in wanted.items()}
    second = {name: torch.zeros_like(value) for name, value in wanted.items()}
    for step in range(1, 6):
        for name, parameter in layer.named_parameters():
            parameter.grad = torch.randn_like(parameter)
            gradient = parameter.grad.double()
            first[name] = 0.8 * first[name] + 0.2 * gradient
            second[name] = 0.9 * second[name] + 0.1 * gradient**2
            m, v = first[name] / (1 - 0.8**step), second[name] / (1 - 0.9**step)
            decay = 0.3 if name == "weight" else 0.0
            wanted[name] = wanted[name] - 0.01 * (m / (v.sqrt() + 1e-6) + decay * wanted[name])
        optimizer.step()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.double(), wanted[name], rtol=1e-5, atol=1e-6)


def test_a_table_drawn_larger_by_a_factor_learns_the_same_at_a_rate_larger_by_it() -> None:
    """T5's parametrisation and that of the Transformer: one function, and with `embedding_rate` one training."""
    ours = {"steps": 6, "clip": 0.0, "eps": 1e-30, "log_every": 1}
    small = tiny(embed_scale=4.0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).double()
    large = tiny(logit_scale=0.25, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).double()
    with torch.no_grad():
        large.transformer.wte.weight.mul_(4.0)
    wanted = Trainer(small, Counting(), settings(**ours)).train()
    found = Trainer(large, Counting(), settings(**ours, embedding_rate=4.0)).train()
    losses = [[record["loss"] for record in result.history] for result in (found, wanted)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-10, atol=0.0)
    torch.testing.assert_close(large.transformer.wte.weight, 4.0 * small.transformer.wte.weight, rtol=1e-8, atol=1e-12)
    slow = tiny(logit_scale=0.25, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).double()
    with torch.no_grad():
        slow.transformer.wte.weight.mul_(4.0)
    assert abs(Trainer(slow, Counting(), settings(**ours)).train().loss - wanted.loss) > 1e-3


def test_the_embedding_has_a_group_of_its_own_where_its_rate_is_another() -> None:
    groups = decay_groups(tiny(), embedding_rate=3.0)
    assert groups.rates == {"transformer.wte.weight": 3.0}
    assert "transformer.wte.weight learns at 3 times the rate" in str(groups)
    optimizer = adamw(groups, settings(weight_decay=0.3))
    assert [(group["rate"], group["weight_decay"], len(group["params"])) for group in optimizer.param_groups] == [
        (1.0, 0.3, len(groups.decayed) - 1),
        (3.0, pytest.approx(0.1), 1),
        (1.0, 0.0, len(groups.plain)),
    ]


def test_a_rate_of_the_embedding_needs_a_model_that_says_which_that_is() -> None:
    with pytest.raises(UsageError, match="embedding_rate: Linear has no get_input_embeddings"):
        decay_groups(nn.Linear(3, 2), embedding_rate=2.0)


@pytest.mark.parametrize("family", MODELS)
def test_a_head_that_is_untied_takes_the_steps_that_the_table_would_have_taken(family: str) -> None:
    """Of a T5 it becomes the table times d^-1/2: its gradient, its moments, its rate and its decay follow from that."""
    torch.manual_seed(0)
    chosen = settings(embedding_rate=12**0.5)
    model = MODELS[family]()
    optimizer = adamw(decay_groups(model, chosen.embedding_rate), chosen)
    table = model.get_input_embeddings().weight

    def step(optimizer: Any, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        for group in optimizer.param_groups:
            group["lr"] = chosen.learning_rate * group["rate"]
        optimizer.zero_grad()
        parameter.grad = gradient
        optimizer.step()

    for _ in range(3):
        step(optimizer, table, torch.randn_like(table))
    other, its_optimizer = copy.deepcopy((model, optimizer))
    untie(other, its_optimizer)
    head = other.get_output_embeddings().weight
    assert head is not other.get_input_embeddings().weight
    scale = 12**-0.5 if family == "t5" else 1.0
    for _ in range(3):
        gradient = torch.randn_like(table)
        step(optimizer, table, gradient.clone())
        step(its_optimizer, head, gradient / scale)
    torch.testing.assert_close(head, table * scale, rtol=1e-5, atol=1e-6)
    held = [id(parameter) for group in its_optimizer.param_groups for parameter in group["params"]]
    assert sorted(held) == sorted({id(parameter) for parameter in other.parameters()})
