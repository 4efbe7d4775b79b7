"""The ties on entry are the ties on exit, whatever was done inside; or an error says what happened to which end."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bowline.errors import CheckpointError, TieError, UsageError
from bowline.nn import check_ties, find_ties, tie_weights
from bowline.nn.guards.keep_tied import keep_tied
from tests.nn.models import HEAD, BertLike, TinyLM, is_tied, linear, seq2seq, tied

IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def lm(seed: int = 0) -> TinyLM:
    return tied(TinyLM(seed=seed))


# --- conversions ------------------------------------------------------------------------------------------------------

CONVERSIONS: dict[str, Callable[[nn.Module], Any]] = {
    "to-meta": lambda model: model.to("meta"),
    "meta-to-empty": lambda model: model.to("meta").to_empty(device="cpu"),
    "meta-and-cast": lambda model: model.to("meta").half(),
    "bfloat16": lambda model: model.bfloat16(),
    "each-child-to-meta": lambda model: [child.to("meta") for child in model.children()],
    "one-child-cast": lambda model: next(model.children()).double(),
}


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=list(CONVERSIONS))
@pytest.mark.parametrize("build", [lm, seq2seq], ids=["language-model", "encoder-decoder"])
def test_every_conversion_keeps_every_tie(build: Callable[[], nn.Module], convert: Callable[[nn.Module], Any]) -> None:
    model = build()
    before = find_ties(model)
    with keep_tied(model) as same:
        assert same is model
        convert(model)
    assert find_ties(model) == before


def test_a_bias_tie_is_kept_beside_its_weight() -> None:
    model = BertLike()
    tie_weights(model, on_conflict="source")
    with keep_tied(model):
        model.to("meta").to_empty(device="cpu")
    assert model.decoder.bias is model.bias
    assert model.decoder.weight is model.emb.weight


@pytest.mark.parametrize("end", ["emb", "head"])
def test_an_end_that_goes_to_meta_alone_takes_back_the_values_of_the_other(end: str) -> None:
    model = lm()
    expected = model(IDS).detach()
    with keep_tied(model):
        model.get_submodule(end).to("meta")
    assert is_tied(model)
    assert torch.equal(model(IDS), expected)


def test_a_child_that_comes_back_from_meta_without_its_values_is_a_conflict() -> None:
    model = lm()
    with pytest.raises(TieError, match=r"cannot be restored.*rows differ"), keep_tied(model):
        model.head.to("meta").to_empty(device="cpu")
        nn.init.zeros_(model.head.weight)


def test_a_child_that_is_cast_beyond_the_other_no_longer_fits() -> None:
    model = lm()
    with pytest.raises(TieError, match=r"head\.weight has dtype torch\.float16, emb\.weight has torch\.float32"):  # noqa: SIM117
        with keep_tied(model):
            model.head = linear(model.head.weight).half()


@pytest.mark.parametrize("wrap", [nn.Sequential, nn.DataParallel, lambda model: nn.ModuleDict({"inner": model})])
def test_a_conversion_by_a_wrapper_keeps_the_tie(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = lm()
    wrapper = wrap(model)
    with keep_tied(model):
        wrapper.to("meta").to_empty(device="cpu")
        assert is_tied(model)
    assert is_tied(model)


def test_a_tie_of_the_wrapper_is_kept_by_its_own_names() -> None:
    wrapper = nn.Sequential(lm())
    with keep_tied(wrapper, [("0.head.weight", "0.emb.weight")]):
        wrapper.to("meta").to_empty(device="cpu")
    assert [(tie.target, tie.source) for tie in find_ties(wrapper)] == [("0.head.weight", "0.emb.weight")]


def test_a_tie_that_came_apart_before_a_conversion_is_not_settled_by_it() -> None:
    """A conversion converts: that the head was given other values before is still a conflict after."""
    model = lm()
    with pytest.raises(TieError, match="11 of 11 rows differ"), keep_tied(model):
        model.head.weight = nn.Parameter(torch.zeros(11, 4))
        model.to(torch.float64)


# --- loading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropped", [(), HEAD[:1], HEAD[1:]], ids=["both-keys", "source-alone", "target-alone"])
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_a_load_inside_loads_both_ends(dropped: tuple[str, ...], assign: bool) -> None:
    model, other = lm(), lm(seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {name: value for name, value in other.state_dict().items() if name not in dropped}
    with keep_tied(model):
        assert str(model.load_state_dict(state, assign=assign)) == "<All keys matched successfully>"
        assert is_tied(model)
    assert is_tied(model)
    assert torch.equal(model(IDS), other(IDS))
    assert check_ties(model, optimizer=optimizer)


def test_missing_and_unexpected_names_are_returned_as_torch_returns_them() -> None:
    model, plain = lm(), lm()
    state = {"emb.weight": torch.ones(11, 4), "what.is.this": torch.ones(1)}
    with keep_tied(model):
        found = model.load_state_dict(state, strict=False)
        with pytest.raises(CheckpointError, match=r"what\.is\.this"):
            model.load_state_dict(state)
    expected = plain.load_state_dict(state, strict=False)
    assert set(found.unexpected_keys) == set(expected.unexpected_keys)
    assert set(found.missing_keys) == set(expected.missing_keys) - {"head.weight"}, "the embedding stands for it"


def test_an_untied_checkpoint_is_refused_inside() -> None:
    model, before = lm(), lm().state_dict()
    with keep_tied(model):
        with pytest.raises(TieError, match="rows differ"):
            model.load_state_dict(TinyLM(seed=1).state_dict())
        assert torch.equal(model.emb.weight, before["emb.weight"])


@pytest.mark.parametrize(("policy", "kept"), [("source", "emb.weight"), ("target", "head.weight")])
def test_the_policy_holds_for_a_load_inside(policy: Any, kept: str) -> None:
    model, state = lm(), TinyLM(seed=1).state_dict()
    with keep_tied(model, on_conflict=policy):
        model.load_state_dict(state)
    assert is_tied(model)
    assert torch.equal(model.emb.weight, state[kept])


def test_a_load_by_a_wrapper_is_mended_on_exit_or_refused() -> None:
    model, state = lm(), nn.Sequential(lm(seed=1)).state_dict()
    wrapper = nn.Sequential(model)
    with keep_tied(model):
        wrapper.load_state_dict(state, assign=True)
        assert not is_tied(model)
    assert is_tied(model)
    assert torch.equal(model(IDS), lm(seed=1)(IDS))

    model = lm()
    del state["0.head.weight"]
    with pytest.raises(TieError, match="11 of 11 rows differ"), keep_tied(model):
        nn.Sequential(model).load_state_dict(state, assign=True, strict=False)


# --- errors and nesting -----------------------------------------------------------------------------------------------


def test_an_exception_in_the_body_goes_on_and_the_tie_is_restored() -> None:
    model = lm()
    with pytest.raises(KeyError, match="body") as caught, keep_tied(model):
        model.head = linear(model.head.weight)
        raise KeyError("body")
    assert is_tied(model)
    assert not hasattr(caught.value, "__notes__")


def test_an_exception_out_of_a_broken_tie_says_both() -> None:
    model = lm()
    with pytest.raises(KeyError, match="body") as caught, keep_tied(model):
        model.head = linear(torch.zeros(11, 4))
        raise KeyError("body")
    (note,) = caught.value.__notes__
    assert re.match(r"a tie was broken too: head\.weight <- emb\.weight: .*was replaced", note)


def test_an_interrupt_leaves_a_tied_model() -> None:
    model = lm()
    with pytest.raises(KeyboardInterrupt), keep_tied(model):
        model.to("meta")
        raise KeyboardInterrupt
    assert is_tied(model)


def test_a_tie_that_was_not_there_cannot_be_kept() -> None:
    with pytest.raises(TieError, match=r"head\.weight <- emb\.weight: not tied"), keep_tied(TinyLM(), [HEAD]):
        pytest.fail("the body must not run")


def test_a_name_that_is_not_there_cannot_be_kept() -> None:
    with pytest.raises(TieError, match="has no such tensor"), keep_tied(lm(), [("hat.weight", "emb.weight")]):
        pytest.fail("the body must not run")


def test_an_unknown_policy_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="on_conflict='newest'"), keep_tied(lm(), on_conflict="newest"):  # type: ignore[arg-type]
        pytest.fail("the body must not run")


def test_nested_each_keeps_its_own() -> None:
    model = lm()
    with keep_tied(model):
        with keep_tied(model):
            model.to("meta")
            assert is_tied(model)
        model.load_state_dict(lm(seed=1).state_dict(), assign=True)
        assert is_tied(model)
        with pytest.raises(TieError), keep_tied(model):
            model.head = linear(torch.zeros(11, 4))
        model.head = linear(model.emb.weight)
    assert is_tied(model)
    assert torch.equal(model(IDS), lm(seed=1)(IDS))


def test_a_declared_tie_that_does_not_hold_is_refused_at_the_door() -> None:
    model = TinyLM()
    with (
        pytest.raises(TieError, match=r"head\.weight <- emb\.weight: not tied, so it cannot be kept"),
        keep_tied(model),
    ):
        raise AssertionError("the body is not entered")


def test_afterwards_the_model_is_a_plain_one_again() -> None:
    model = lm()
    before = set(vars(model))
    with keep_tied(model):
        pass
    with pytest.raises(KeyError), keep_tied(model):
        raise KeyError
    assert set(vars(model)) == before
    model.to("meta")
    assert not is_tied(model), "torch unties outside"


@pytest.mark.parametrize(
    "copying", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_a_copy_that_is_made_inside_is_a_model_of_its_own(copying: Callable[[TinyLM], TinyLM]) -> None:
    """An average of weights, a checkpoint of the whole module: what is done to it is not done to the original."""
    model = lm()
    with keep_tied(model):
        again = copying(model)
        again.to(torch.float64)
    assert again.emb.weight.dtype is torch.float64
    assert model.emb.weight.dtype is torch.float32
    again.load_state_dict(lm(seed=1).state_dict())
    assert torch.equal(model(IDS), lm()(IDS))
    assert torch.equal(again.emb.weight.float(), lm(seed=1).emb.weight)
    assert is_tied(again)


def test_training_goes_on_inside_and_after() -> None:
    model, plain = lm(), lm()
    one, other = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain))
    with keep_tied(model):
        for _ in range(3):
            for trained, optimizer in ((model, one), (plain, other)):
                optimizer.zero_grad()
                trained(IDS).square().sum().backward()
                optimizer.step()
    assert check_ties(model, optimizer=one)
    assert torch.equal(model(IDS), plain(IDS))
