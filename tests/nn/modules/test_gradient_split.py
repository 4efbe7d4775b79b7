"""The shared gradient's two ends, against the same model untied, whose ends have gradients of their own."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import transformers

from bowline.errors import UsageError
from bowline.models import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LSTMConfig,
    LSTMLMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)
from bowline.nn import find_ties, split_gradient, untie_weights

V = 37
MODELS: dict[str, Any] = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=V, n_embd=16, n_layer=1, n_head=2, n_positions=12)),
    "bert": lambda: BertForMaskedLM(
        BertConfig(vocab_size=V, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    ),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=V, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    ),
    "lstm": lambda: LSTMLMHeadModel(LSTMConfig(vocab_size=V, hidden_size=16)),
    "transformers' gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=V, n_embd=16, n_layer=1, n_head=2, n_positions=12)
    ),
    "transformers' bart": lambda: transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=V,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
            max_position_embeddings=12,
            scale_embedding=True,
        )
    ),
}


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, V, (2, 8), generator=torch.Generator().manual_seed(seed))
    ids[0, -2:] = 0  # looked up twice, and padding for some
    return {"input_ids": ids, "labels": ids.roll(1, 1)}


def untied_norms(model: Any, batches: list[dict[str, torch.Tensor]]) -> tuple[float, float, float]:
    """Of a copy with a head of its own: the head's norm, the table's, and their cosine, in float64."""
    apart = copy.deepcopy(model).double()
    head = apart.get_output_embeddings()
    (name,) = (name for name, module in apart.named_modules() if module is head)
    (tie,) = (tie for tie in find_ties(apart) if tie.target == f"{name}.weight")
    untie_weights(apart, {tie.target: tie.source})
    for one in batches:
        apart(**one).loss.backward()
    head, table = (end.weight.grad for end in (apart.get_output_embeddings(), apart.get_input_embeddings()))
    if model.config.model_type == "t5":
        head = head * 16**-0.5  # an untied T5's head has taken on the scale of what a tied one is given
    return head.norm().item(), table.norm().item(), ((head * table).sum() / (head.norm() * table.norm())).item()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("micro", [1, 3])
def test_the_two_parts_are_the_gradients_of_an_untied_copy(name: str, micro: int) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    batches = [batch(seed) for seed in range(micro)]
    with split_gradient(model) as meter:
        for one in batches:
            model(**one).loss.backward()
        split = meter.read()
    assert split is not None
    output, input_, cosine = untied_norms(model, batches)
    assert split.output == pytest.approx(output, rel=1e-4)
    assert split.input == pytest.approx(input_, rel=1e-4)
    assert split.cosine == pytest.approx(cosine, abs=1e-4)
    assert split.total == pytest.approx(model.get_input_embeddings().weight.grad.norm().item(), rel=1e-5)
    parts = split.output**2 + split.input**2 + 2 * split.output * split.input * split.cosine
    assert math.sqrt(parts) == pytest.approx(split.total, rel=1e-4)


def test_of_half_precision_the_norms_are_taken_in_float32() -> None:
    torch.manual_seed(0)
    model = MODELS["gpt2"]().eval()
    exact = untied_norms(model.bfloat16(), [batch()])
    with split_gradient(model) as meter:
        model(**batch()).loss.backward()
        split = meter.read()
    assert split is not None
    assert (split.output, split.input) == pytest.approx(exact[:2], rel=0.03)


def test_an_untied_model_has_no_split_and_neither_has_one_without_gradients() -> None:
    model = MODELS["gpt2"]()
    with split_gradient(model) as meter:
        with torch.no_grad():
            model(**batch())
        assert meter.read() is None
    untie_weights(model)
    with split_gradient(model) as meter:
        model(**batch()).loss.backward()
        assert meter.read() is None


def test_a_tie_without_a_second_module_is_named_by_its_embedding() -> None:
    torch.manual_seed(0)
    table = torch.nn.Embedding(9, 4)
    with split_gradient(table) as meter:
        assert meter.weight is None
    with split_gradient(table, embedding=table) as meter:
        hidden = table(torch.tensor([1, 2, 1])).tanh()
        hidden.retain_grad()
        (hidden @ table.weight.t()).logsumexp(-1).sum().backward()
        split = meter.read()
    assert split is not None and split.input > 0 and split.output > 0


@pytest.mark.parametrize("way", ["one buffer, filled again", "by name"])
def test_ids_count_as_they_were_looked_up(way: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"table": torch.nn.Embedding(9, 4), "head": torch.nn.Linear(4, 9, bias=False)})
    model["head"].weight = model["table"].weight
    buffer = torch.zeros(3, dtype=torch.long)

    def split(way: str) -> Any:
        model.zero_grad()
        with split_gradient(model) as meter:
            for batch in (torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])):
                ids = buffer.copy_(batch) if way == "one buffer, filled again" else batch
                rows = model["table"](input=ids) if way == "by name" else model["table"](ids)
                model["head"](rows.tanh()).logsumexp(-1).sum().backward()
            return meter.read()

    assert split(way) == split("plainly")


def test_a_batch_of_no_tokens_has_no_gradient_to_split() -> None:
    table = torch.nn.Embedding(9, 4)
    with split_gradient(table, embedding=table) as meter:
        (table(torch.zeros(0, dtype=torch.long)).sum() + (table.weight * 2).sum()).backward()
        split = meter.read()
    assert split is not None and split.input == 0 and split.output == pytest.approx(12.0)


def test_what_cannot_be_split_is_refused() -> None:
    model = MODELS["gpt2"]()
    model(**batch()).loss.backward()
    with pytest.raises(UsageError, match="has a gradient already"), split_gradient(model):
        pass
    with pytest.raises(UsageError, match="embedding is a Dropout"), split_gradient(model, torch.nn.Dropout()):
        pass
    two = torch.nn.ModuleList([MODELS["gpt2"](), MODELS["gpt2"]()])
    with pytest.raises(UsageError, match="2 matrices are tied"), split_gradient(two):
        pass


def test_after_it_the_model_is_as_it_was() -> None:
    model = MODELS["gpt2"]()
    with split_gradient(model):
        pass
    with pytest.raises(ZeroDivisionError), split_gradient(model):
        raise ZeroDivisionError
    assert not any(module._forward_hooks for module in model.modules())


def tied_ends() -> torch.nn.Sequential:
    torch.manual_seed(0)
    table, head = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9, bias=False)
    head.weight = table.weight
    return torch.nn.Sequential(table, head)


def test_a_plain_embedding_is_not_scaled_whatever_it_is_given() -> None:
    """An attribute that its forward does not read."""
    found = []
    for scale in (None, 3.0):
        model: Any = tied_ends()
        model[0].embed_scale = scale
        with split_gradient(model) as meter:
            model(torch.tensor([1, 2, 1])).logsumexp(-1).sum().backward()
            found.append(meter.read())
    assert found[0] == found[1] is not None


def test_a_gradient_that_was_set_to_0_is_none() -> None:
    model: Any = tied_ends()
    model[0].weight.grad = torch.zeros(9, 4)
    with split_gradient(model) as meter:
        model(torch.tensor([1])).logsumexp(-1).sum().backward()
        assert meter.read() is not None


def test_what_rounding_leaves_of_a_head_that_gives_nothing_has_a_norm() -> None:
    """The difference of two equal sums may be less than 0."""
    for seed in range(100):
        torch.manual_seed(seed)
        table, ids = torch.nn.Embedding(100, 7), torch.randperm(100)[:60]
        with split_gradient(table, embedding=table) as meter:
            (table(ids) * torch.randn(60, 7)).sum().backward()
            split = meter.read()
        assert split is not None and split.output <= 1e-3 * split.input
