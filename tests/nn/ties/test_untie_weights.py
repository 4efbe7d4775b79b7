"""Undoing ties: each end owns its matrix, the model computes what it did, and all that states the tie is told."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tools.tiny import build, load_class, tiny_config
from torch import nn

from bowline import Tie, TieState
from bowline.errors import TieError, UsageError
from bowline.nn import check_ties, declared_ties, find_ties, tie_weights, untie_weights
from tests.nn.models import HEAD, BertLike, EncoderDecoder, Flagged, TinyLM, backward, flag_levels, tied

pytestmark = pytest.mark.usefixtures("quiet_transformers")

IDS = torch.tensor([[1, 2, 3, 9], [4, 1, 0, 5]])


def tie_all(model: nn.Module) -> nn.Module:
    tie_weights(model, on_conflict="source")
    return model


# --- what becomes of the ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [TinyLM, BertLike, EncoderDecoder, Flagged])
def test_an_untied_model_computes_what_it_did_and_shares_nothing(make: Callable[[], nn.Module]) -> None:
    model = tie_all(make())
    before = model(IDS)
    undone = untie_weights(model)
    assert undone == declared_ties(model, flag=True)
    assert torch.equal(model(IDS), before)
    assert str(find_ties(model)) == "nothing is shared"


def test_the_source_keeps_its_parameter_and_the_target_gets_a_copy() -> None:
    model = tied(TinyLM())
    shared = model.emb.weight
    assert untie_weights(model) == (Tie(*HEAD),)
    assert model.emb.weight is shared
    assert model.head.weight is not shared
    assert torch.equal(model.head.weight, shared)
    with torch.no_grad():
        model.head.weight.add_(1.0)
    assert not torch.equal(model.head.weight, shared)


def test_a_bias_is_copied_as_well() -> None:
    model = tie_all(BertLike())
    assert isinstance(model, BertLike)
    untie_weights(model)
    assert model.decoder.bias is not model.bias
    assert torch.equal(model.decoder.bias, model.bias)


def test_only_the_ties_that_are_given_are_undone() -> None:
    model = tie_all(EncoderDecoder())
    assert isinstance(model, EncoderDecoder)
    assert untie_weights(model, [("head.weight", "shared.weight")]) == (Tie("head.weight", "shared.weight"),)
    assert model.encoder.weight is model.decoder.weight is model.shared.weight
    assert model.head.weight is not model.shared.weight


def test_a_declared_tie_that_does_not_hold_is_nothing_to_undo() -> None:
    model = TinyLM()
    head = model.head.weight
    assert untie_weights(model) == ()
    assert model.head.weight is head


def test_where_nothing_is_declared_the_ties_on_an_embedding_are_undone() -> None:
    model: Any = nn.ModuleDict({name: nn.Linear(4, 9, bias=False) for name in ("head", "a", "b")})
    model["emb"] = nn.Embedding(9, 4)
    model["head"].weight = model["emb"].weight
    model["b"].weight = model["a"].weight
    assert untie_weights(model) == (Tie(*HEAD),)
    assert model["b"].weight is model["a"].weight


def test_requires_grad_is_the_sources() -> None:
    model = tied(TinyLM())
    model.emb.requires_grad_(False)
    untie_weights(model)
    assert not model.head.weight.requires_grad


def test_on_meta_a_copy_is_another_parameter_on_meta() -> None:
    model = tied(TinyLM()).to("meta")
    tie_weights(model)
    untie_weights(model)
    assert model.head.weight.is_meta
    assert model.head.weight is not model.emb.weight


# --- a fresh head ----------------------------------------------------------------------------------------------------


def ones(table: torch.Tensor) -> None:
    table.fill_(1.0)


def test_a_recipe_draws_the_head_afresh_and_nothing_else() -> None:
    model = tied(TinyLM())
    embedding = model.emb.weight.detach().clone()
    untie_weights(model, head=ones)
    assert torch.equal(model.head.weight, torch.ones(11, 4))
    assert torch.equal(model.emb.weight, embedding)


def test_torchs_own_initialisers_are_recipes() -> None:
    model = tied(TinyLM())
    torch.manual_seed(3)
    untie_weights(model, head=nn.init.xavier_uniform_)
    torch.manual_seed(3)
    assert torch.equal(model.head.weight, nn.init.xavier_uniform_(torch.empty(11, 4)))


def test_biases_and_tables_are_copied_even_then() -> None:
    bert, t5 = tie_all(BertLike()), tie_all(EncoderDecoder())
    assert isinstance(bert, BertLike)
    assert isinstance(t5, EncoderDecoder)
    untie_weights(bert, head=ones)
    untie_weights(t5, head=ones)
    assert torch.equal(bert.decoder.weight, torch.ones(11, 4))
    assert torch.equal(bert.decoder.bias, bert.bias)
    assert torch.equal(t5.head.weight, torch.ones(11, 4))
    assert torch.equal(t5.encoder.weight, t5.shared.weight)
    assert torch.equal(t5.decoder.weight, t5.shared.weight)


@pytest.mark.parametrize("layer", [lambda: nn.Linear(4, 4), lambda: nn.Conv2d(3, 4, 2)], ids=["linear", "conv"])
def test_two_layers_of_one_kind_are_no_embedding_and_its_head(layer: Callable[[], nn.Module]) -> None:
    """A DETR's repeated heads, UDOP's patches: they are copied, whatever recipe the head gets."""
    model: Any = nn.ModuleDict({"one": layer(), "other": layer()})
    model["other"].weight = model["one"].weight
    untie_weights(model, [("other.weight", "one.weight")], head=ones)
    assert torch.equal(model["other"].weight, model["one"].weight)


# --- shared modules --------------------------------------------------------------------------------------------------


def test_a_module_under_two_names_becomes_two_modules() -> None:
    layer = nn.Linear(3, 3)
    model: Any = nn.ModuleDict({"a": layer, "b": layer})
    untie_weights(model, [("b.weight", "a.weight"), ("b.bias", "a.bias")])
    assert model["a"] is layer
    assert model["b"] is not layer
    assert str(find_ties(model)) == "nothing is shared"
    assert torch.equal(model["b"].weight, layer.weight)


def test_one_parameter_of_a_shared_module_leaves_the_others_shared() -> None:
    layer = nn.Linear(3, 3)
    model: Any = nn.ModuleDict({"a": layer, "b": layer})
    untie_weights(model, [("b.weight", "a.weight")])
    assert find_ties(model).ties == (Tie("b.bias", "a.bias"),)


def test_a_block_under_two_names_is_taken_apart_above_the_tie() -> None:
    block = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model: Any = nn.ModuleDict({"a": block, "b": block})
    before = model["b"](torch.ones(3))
    untie_weights(model, [("b.0.weight", "a.0.weight")])
    assert model["b"][0].weight is not model["a"][0].weight
    assert model["b"][1].weight is model["a"][1].weight
    assert torch.equal(model["b"](torch.ones(3)), before)


def test_a_table_that_is_the_encoders_and_the_decoders_by_module_is_undone_too() -> None:
    """transformers 4's T5 hangs `shared` itself at each end."""
    model = EncoderDecoder()
    model.encoder = model.decoder = model.shared
    model.head.weight = model.shared.weight
    before = model(IDS)
    assert len(untie_weights(model)) == 3
    assert str(find_ties(model)) == "nothing is shared"
    assert torch.equal(model(IDS), before)


# --- flags -----------------------------------------------------------------------------------------------------------


def test_the_flag_becomes_false_at_every_level_that_states_it() -> None:
    model = Flagged(True)
    tied(model)
    model.config.vision_config.tie_word_embeddings = True
    untie_weights(model)
    assert flag_levels(model) == {
        "config": False,
        "config.text_config": False,
        "config.vision_config": False,
    }


def test_a_tie_that_no_class_declares_is_no_flags_business() -> None:
    """The declared tie holds on, so a false flag would be untrue."""
    model = tied(Flagged(True))
    model.extra = nn.Linear(4, 11, bias=False)
    model.extra.weight = model.emb.weight
    untie_weights(model, [("extra.weight", "emb.weight")])
    assert model.head.weight is model.emb.weight
    assert flag_levels(model)["config"]


def test_untying_one_of_two_declared_ties_makes_the_flag_false() -> None:
    """Under a true flag the next load would tie it again."""
    model = tie_all(BertLike())
    model.config = {"tie_word_embeddings": True}  # type: ignore[assignment]
    untie_weights(model, [("decoder.bias", "bias")])
    assert model.config == {"tie_word_embeddings": False}


def test_a_flag_that_is_true_of_an_untied_model_is_corrected() -> None:
    model = Flagged(True)
    assert untie_weights(model) == ()
    assert not flag_levels(model)["config"]


# --- optimizers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build",
    [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.AdamW(p, lr=0.1)],
    ids=["sgd", "adamw"],
)
def test_the_new_parameter_joins_its_sources_group_with_a_copy_of_its_state(build: Any) -> None:
    model = tied(TinyLM())
    optimizer = build([{"params": model.norm.parameters(), "lr": 0.5}, {"params": [model.emb.weight]}])
    backward(model(IDS).square().mean())
    optimizer.step()
    untie_weights(model, optimizer=optimizer)
    group = optimizer.param_groups[1]["params"]
    assert [id(parameter) for parameter in group] == [id(model.emb.weight), id(model.head.weight)]
    assert check_ties(model, [], optimizer=optimizer)
    one, other = optimizer.state[model.emb.weight], optimizer.state[model.head.weight]
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other[key])
            assert value is not other[key]
    before = copy.deepcopy(one)
    model.zero_grad()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    optimizer.step()
    assert all(
        torch.equal(torch.as_tensor(before[key]), torch.as_tensor(one[key]))
        for key in before
        if before[key] is not None
    )


def test_an_optimizer_that_does_not_hold_the_source_is_left_alone() -> None:
    model = tied(TinyLM())
    optimizer = torch.optim.AdamW(model.norm.parameters())
    untie_weights(model, optimizer=optimizer)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2]


# --- there and back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [TinyLM, BertLike, EncoderDecoder, Flagged])
def test_tying_what_was_untied_restores_parameters_values_flags_and_optimizer(make: Callable[[], nn.Module]) -> None:
    model = tie_all(make())
    optimizer = torch.optim.AdamW(model.parameters())
    backward(model(IDS).square().mean())
    optimizer.step()
    ids = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    bits = {name: value.clone() for name, value in model.state_dict().items()}
    flags, held = flag_levels(model), [id(p) for p in optimizer.param_groups[0]["params"]]
    untie_weights(model, optimizer=optimizer)
    assert tie_weights(model, optimizer=optimizer)
    assert {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)} == ids
    assert all(torch.equal(value, bits[name]) for name, value in model.state_dict().items())
    assert (flag_levels(model), [id(p) for p in optimizer.param_groups[0]["params"]]) == (flags, held)
    assert set(optimizer.state) == set(model.parameters())


# --- transformers' models --------------------------------------------------------------------------------------------

BART_TABLES = {"model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"}
HEADS = {
    "GPT2LMHeadModel": {"lm_head.weight"},
    "BertForMaskedLM": {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"},
    "BartForConditionalGeneration": {"lm_head.weight", *BART_TABLES},
    "LlavaForConditionalGeneration": {"lm_head.weight"},
    "MT5ForConditionalGeneration": {"lm_head.weight"},
    "UMT5ForConditionalGeneration": {"lm_head.weight"},
    "UdopForConditionalGeneration": {"lm_head.weight"},
}
"""What is untied of each. The last three force their flag true at every load, so only the head's tie ends with it: the
tables stay one, and UDOP's convolutions too."""

SCALED = ("T5ForConditionalGeneration", "SwitchTransformersForConditionalGeneration")
"""Here untying also takes the factor d_model^-1/2 from the model and gives it to the head."""


def tiny(name: str) -> Any:
    """A tiny random model of the class, its flag true at every level."""

    cls = load_class(name)
    config = tiny_config(cls)
    config.tie_word_embeddings = True
    return build(cls, config)


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(1, 9)[None]
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    more |= {"bbox": torch.zeros(1, 8, 4)} if model.config.model_type == "udop" else {}
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids, **more).logits
    return found


@pytest.mark.parametrize(("name", "heads"), HEADS.items(), ids=list(HEADS))
def test_a_transformers_model_computes_the_same_bits_untied_and_tied_again(name: str, heads: set[str]) -> None:
    model = tiny(name)
    before, told = logits(model), dict(model.all_tied_weights_keys)
    undone = untie_weights(model)
    assert {tie.target for tie in undone} == heads
    assert set(model.all_tied_weights_keys) == set(told) - heads == {tie.target for tie in find_ties(model)}
    assert torch.equal(logits(model), before)
    assert tie_weights(model)
    assert set(model.all_tied_weights_keys) == set(told)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("name", SCALED)
def test_where_the_model_scales_the_output_the_head_takes_the_factor_upon_itself(name: str) -> None:
    model = tiny(name)
    table, before = model.shared.weight.detach().clone(), logits(model)
    untie_weights(model)
    assert not model.config.tie_word_embeddings
    assert torch.equal(model.lm_head.weight, table * model.config.d_model**-0.5)
    torch.testing.assert_close(logits(model), before, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", SCALED)
def test_the_head_of_such_a_model_that_stays_tied_is_not_rescaled(name: str) -> None:
    """Its matrix is the table's too. Where nothing but the flag scales, and the flag must go, it is refused."""
    model = tiny(name)
    table, before = model.shared.weight.detach().clone(), logits(model)
    ties = [("encoder.embed_tokens.weight", "shared.weight")]
    if name.startswith("Switch"):
        with pytest.raises(TieError, match=r"lm_head.weight <- shared.weight: would stay tied"):
            untie_weights(model, ties)
    else:
        untie_weights(model, ties)
    assert model.lm_head.weight is model.shared.weight
    assert torch.equal(model.shared.weight, table)
    assert torch.equal(logits(model), before)


def test_where_the_flag_is_false_already_it_scales_nothing() -> None:
    """Tied by hand under a false flag: the model does not scale, so neither does the copy."""
    model = tiny("SwitchTransformersForConditionalGeneration")
    model.config.tie_word_embeddings = False
    before = logits(model)
    untie_weights(model)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize(
    "name",
    ["GPT2LMHeadModel", "T5ForConditionalGeneration", "UMT5ForConditionalGeneration", "UdopForConditionalGeneration"],
)
def test_an_untied_model_that_is_saved_and_loaded_computes_the_same(name: str, tmp_path: Any) -> None:
    """Trained apart, stored by transformers, read by transformers: also where every load makes the flag true."""
    model = tiny(name)
    untie_weights(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    assert torch.equal(logits(again), logits(model))


def test_an_alias_is_parted_too() -> None:
    model = tied(TinyLM())
    model.load_state_dict(
        TinyLM().state_dict() | {"head.weight": (w := torch.ones(11, 4)), "emb.weight": w}, assign=True
    )
    assert check_ties(model, [HEAD]).checks[0].state is TieState.ALIAS
    assert untie_weights(model) == (Tie(*HEAD),)
    model.head.weight.data.zero_()
    assert bool((model.emb.weight == 1).all())


def test_what_hangs_on_the_parameter_hangs_on_the_copy() -> None:
    model = tied(TinyLM())
    model.emb.weight._no_weight_decay = True  # type: ignore[attr-defined]
    untie_weights(model)
    assert model.head.weight._no_weight_decay  # type: ignore[attr-defined]


def test_a_head_function_that_returns_a_new_tensor_is_refused() -> None:
    model = tied(TinyLM())
    with pytest.raises(UsageError, match="returned a new tensor"):
        untie_weights(model, head=lambda weight: torch.zeros_like(weight))
    assert Tie(*HEAD) in find_ties(model)


def test_a_wrapper_without_a_config_changes_nothing_about_the_scale() -> None:
    model = build(load_class("SwitchTransformersForConditionalGeneration"))
    ids = torch.arange(14).reshape(2, 7)
    with torch.no_grad():
        before = model(input_ids=ids, decoder_input_ids=ids).logits
        untie_weights(nn.ModuleDict({"inner": model}))
        assert torch.allclose(model(input_ids=ids, decoder_input_ids=ids).logits, before, atol=1e-7)
    assert model.config.tie_word_embeddings is False
