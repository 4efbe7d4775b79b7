"""Making ties: one `Parameter` at both ends, the values that were asked for, and everything that states them told."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bowline import Tie, TieState
from bowline.errors import TieError
from bowline.nn import find_ties, tie_weights, untie_weights
from tests.nn.models import HEAD, BertLike, EncoderDecoder, Flagged, TinyLM, backward, flag_levels, tied

IDS = torch.tensor([[1, 2, 3, 9], [4, 1, 0, 5]])


def clone(model: TinyLM) -> TinyLM:
    """The model with its head a copy of its embedding."""
    model.head.weight = nn.Parameter(model.emb.weight.detach().clone())
    return model


# --- what becomes of the ends ----------------------------------------------------------------------------------------


def test_after_tying_both_ends_are_the_sources_parameter() -> None:
    model = clone(TinyLM())
    source = model.emb.weight
    report = tie_weights(model)
    assert model.head.weight is source
    assert model.emb.weight is source
    assert report
    assert report["head.weight"].state is TieState.SHARED


def test_a_tied_model_computes_what_an_untied_one_with_equal_ends_did() -> None:
    model = clone(TinyLM())
    before = model(IDS)
    tie_weights(model)
    assert torch.equal(model(IDS), before)


@pytest.mark.parametrize(
    "ties", [[HEAD], dict([HEAD]), [Tie(*HEAD)], iter([HEAD])], ids=["pairs", "mapping", "ties", "iterator"]
)
def test_ties_may_be_given_in_any_plain_way(ties: Any) -> None:
    model: Any = nn.ModuleDict({"emb": nn.Embedding(9, 4), "head": nn.Linear(4, 9, bias=False)})
    tie_weights(model, ties, on_conflict="source")
    assert model["head"].weight is model["emb"].weight


def test_tying_twice_is_tying_once() -> None:
    model = clone(TinyLM())
    tie_weights(model)
    shared = model.emb.weight
    assert tie_weights(model)
    assert model.emb.weight is model.head.weight is shared


def test_an_alias_becomes_a_tie() -> None:
    model = TinyLM()
    model.load_state_dict(tied(TinyLM()).state_dict(), assign=True)
    assert find_ties(model).aliases
    tie_weights(model)
    assert find_ties(model).ties == (Tie(*HEAD),)
    assert not find_ties(model).aliases


def test_a_model_on_meta_is_tied_by_identity() -> None:
    model = TinyLM().to("meta")
    tie_weights(model)
    assert model.head.weight is model.emb.weight


def test_bias_ties_are_made_too() -> None:
    model = BertLike()
    tie_weights(model, on_conflict="source")
    assert model.decoder.weight is model.emb.weight
    assert model.decoder.bias is model.bias


def test_four_names_become_one_parameter() -> None:
    model = EncoderDecoder()
    tie_weights(model, on_conflict="source")
    assert len({id(module.weight) for module in (model.shared, model.encoder, model.decoder, model.head)}) == 1


def test_a_name_that_was_tied_to_a_target_already_comes_along() -> None:
    """`spare` is the head's parameter, so it stays the head's parameter."""
    model = clone(TinyLM())
    model.spare = nn.Linear(4, 11, bias=False)
    model.spare.weight = model.head.weight
    tie_weights(model)
    assert model.spare.weight is model.head.weight is model.emb.weight


def test_ties_that_meet_in_a_parameter_that_is_shared_already_have_one_owner() -> None:
    """`b` and `c` are one parameter: `d` borrows from it, it borrows from `a`, and `a`'s values stay."""
    model: Any = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in "abcd"})
    model["c"].weight = model["b"].weight
    owner = model["a"].weight.detach().clone()
    tie_weights(model, [("b.weight", "a.weight"), ("d.weight", "c.weight")], on_conflict="source")
    assert len({id(module.weight) for module in model.values()}) == 1
    assert torch.equal(model["a"].weight, owner)


# --- conflicts -------------------------------------------------------------------------------------------------------


def test_two_trained_ends_are_refused_by_default() -> None:
    with pytest.raises(TieError) as caught:
        tie_weights(TinyLM())
    assert caught.value.message.startswith(
        "head.weight <- emb.weight: the two ends hold different values (11 of 11 rows differ, by at most "
    )
    assert (
        caught.value.help
        == 'on_conflict="source" keeps the embedding, "target" the head; leave them untied to keep both'
    )


@pytest.mark.parametrize(("policy", "kept"), [("source", "emb"), ("target", "head")])
def test_a_policy_names_the_end_whose_values_and_parameter_stay(policy: Any, kept: str) -> None:
    model = TinyLM()
    winner = getattr(model, kept).weight
    values = winner.detach().clone()
    tie_weights(model, on_conflict=policy)
    assert model.emb.weight is model.head.weight is winner
    assert torch.equal(winner, values)


@pytest.mark.parametrize("policy", ["raise", "source", "target"])
def test_equal_ends_keep_the_sources_parameter_under_every_policy(policy: Any) -> None:
    model = clone(TinyLM())
    source = model.emb.weight
    tie_weights(model, on_conflict=policy)
    assert model.emb.weight is model.head.weight is source


def shifted(model: TinyLM) -> None:
    table = torch.randn(12, 4)
    model.emb.weight, model.head.weight = nn.Parameter(table[:11]), nn.Parameter(table[1:])


def transposed(model: TinyLM) -> None:
    table = torch.randn(5, 5)
    model.emb, model.head = nn.Embedding(5, 5, _weight=table), nn.Linear(5, 5, bias=False)
    model.head.weight = nn.Parameter(table.t())


@pytest.mark.parametrize("overlapping", [shifted, transposed])
def test_views_of_one_memory_that_hold_different_values_are_a_conflict(overlapping: Callable[[TinyLM], None]) -> None:
    """They overlap, but making them one would silently drop what the head computes with."""
    model = TinyLM()
    overlapping(model)
    with pytest.raises(TieError, match="different values"):
        tie_weights(model)


def test_one_bit_is_a_conflict() -> None:
    model = clone(TinyLM())
    with torch.no_grad():
        model.head.weight[0, 0], model.emb.weight[0, 0] = 0.0, -0.0
    with pytest.raises(TieError, match="1 of 11 rows differ, by at most 0"):
        tie_weights(model)


def test_nan_at_both_ends_is_no_conflict() -> None:
    model = TinyLM()
    with torch.no_grad():
        model.emb.weight.fill_(torch.nan)
    assert tie_weights(clone(model))


def test_two_targets_that_differ_cannot_both_stay() -> None:
    with pytest.raises(TieError, match=r"are both tied to shared.weight and differ from each other"):
        tie_weights(EncoderDecoder(), on_conflict="target")


def test_two_targets_that_agree_can() -> None:
    model = EncoderDecoder()
    head = model.head.weight
    for module in (model.encoder, model.decoder):
        module.weight = nn.Parameter(head.detach().clone())
    values = head.detach().clone()
    tie_weights(model, on_conflict="target")
    assert model.shared.weight is model.head.weight
    assert torch.equal(model.shared.weight, values)


# --- sizes and flags -------------------------------------------------------------------------------------------------


def test_sizes_that_were_misstated_follow_the_matrix() -> None:
    model = clone(TinyLM())
    model.head.out_features, model.emb.num_embeddings, model.emb.embedding_dim = 5, 7, 3
    assert tie_weights(model)
    assert (model.head.in_features, model.head.out_features) == (4, 11)
    assert (model.emb.num_embeddings, model.emb.embedding_dim) == (11, 4)


def test_the_flag_becomes_true_at_the_root_and_the_text_decoder_and_not_at_the_vision_tower() -> None:
    model = Flagged(False)
    tie_weights(model, on_conflict="source")
    assert flag_levels(model) == {
        "config": True,
        "config.text_config": True,
        "config.vision_config": False,
    }


def test_a_config_that_says_nothing_is_left_to_say_nothing() -> None:
    model = Flagged(True)
    del model.config.tie_word_embeddings
    tie_weights(model, on_conflict="source")
    assert "tie_word_embeddings" not in vars(model.config)


def test_ties_that_no_class_declares_are_no_flags_business() -> None:
    model = Flagged(False)
    model.extra = nn.Linear(4, 11, bias=False)
    tie_weights(model, [("extra.weight", "emb.weight")], on_conflict="source")
    assert set(flag_levels(model).values()) == {False}


def test_one_of_two_declared_ties_does_not_make_the_flag_true() -> None:
    """A true flag would tie the weight as well at the next load, and drop one of two trained matrices."""
    model = BertLike()
    model.config = {"tie_word_embeddings": False}  # type: ignore[assignment]
    tie_weights(model, [("decoder.bias", "bias")], on_conflict="source")
    assert model.config == {"tie_word_embeddings": False}
    tie_weights(model, [("decoder.weight", "emb.weight")], on_conflict="source")
    assert model.config == {"tie_word_embeddings": True}


def test_what_the_flag_says_now_does_not_hinder() -> None:
    model = clone(Flagged(False))
    assert tie_weights(model)


def test_the_parameter_that_stays_keeps_its_own_requires_grad() -> None:
    model = clone(TinyLM())
    model.emb.requires_grad_(False)
    tie_weights(model)
    assert not model.head.weight.requires_grad


# --- optimizers ------------------------------------------------------------------------------------------------------

Build = Callable[[Any], torch.optim.Optimizer]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05, weight_decay=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        backward(nn.functional.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten()))
        optimizer.step()


def held(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]


@pytest.mark.parametrize("build", [sgd, adamw])
def test_training_after_tying_is_training_a_model_that_was_tied_from_the_start(build: Build) -> None:
    late, early = clone(TinyLM()), tied(TinyLM())
    optimizer = build(late.parameters())
    tie_weights(late, optimizer=optimizer)
    train(late, optimizer)
    train(early, build(early.parameters()))
    for (name, one), other in zip(late.named_parameters(), early.parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("build", [sgd, adamw])
@pytest.mark.parametrize(("policy", "kept"), [("source", "emb"), ("target", "head")])
def test_the_state_and_the_group_are_those_of_the_end_that_stays(build: Build, policy: Any, kept: str) -> None:
    model = TinyLM()
    groups = [{"params": list(module.parameters())} for module in (model.emb, model.norm, model.head)]
    optimizer = build(groups)
    train(model, optimizer)
    winner = getattr(model, kept).weight
    state = copy.deepcopy(optimizer.state[winner])
    sizes = [1, 2, 0] if kept == "emb" else [0, 2, 1]
    assert tie_weights(model, on_conflict=policy, optimizer=optimizer)
    assert [len(ids) for ids in held(optimizer)] == sizes
    assert set(optimizer.state) == set(model.parameters())
    assert optimizer.state[winner].keys() == state.keys()
    for key, value in state.items():
        torch.testing.assert_close(optimizer.state[winner][key], value, rtol=0, atol=0)
    train(model, optimizer, steps=1)


def test_an_end_that_was_not_held_takes_the_place_of_the_one_that_was() -> None:
    model = clone(TinyLM())
    optimizer = adamw([*model.norm.parameters(), *model.head.parameters()])
    assert tie_weights(model, optimizer=optimizer)
    assert held(optimizer) == [[id(p) for p in (*model.norm.parameters(), model.emb.weight)]]


def test_the_names_that_an_optimizer_holds_stay_beside_their_parameters() -> None:
    model = clone(TinyLM())
    optimizer = adamw(model.named_parameters())
    tie_weights(model, optimizer=optimizer)
    group = optimizer.param_groups[0]
    assert group["param_names"] == [name for name, _ in model.named_parameters()]
    assert held(optimizer) == [[id(parameter) for parameter in model.parameters()]]
    untie_weights(model, optimizer=optimizer)
    names = dict(zip(map(id, group["params"]), group["param_names"], strict=True))
    assert names == {id(parameter): name for name, parameter in model.named_parameters()}


def test_an_optimizers_state_survives_being_saved_and_loaded_after_tying() -> None:
    model = clone(TinyLM())
    optimizer = adamw(model.parameters())
    train(model, optimizer)
    tie_weights(model, on_conflict="source", optimizer=optimizer)
    again = adamw(model.parameters())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    one = copy.deepcopy(model)
    train(model, again)
    for parameter, other in zip(model.parameters(), one.parameters(), strict=True):
        assert not torch.equal(parameter, other)
