"""`load_state`: which ends a state may hold, what becomes of the model's objects, and what is refused untouched."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bowline.errors import BowlineError, CheckpointError, TieError, UsageError
from bowline.nn import check_ties, load_state, tie_weights
from bowline.nn.ties.shared_parameters import find_ties
from tests.nn.models import HEAD, BertLike, EncoderDecoder, Flagged, TinyLM, backward, flag_levels, tied
from tests.nn.state.snapshots import snapshot

IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])
NAMES = ("emb.weight", "norm.weight", "norm.bias", "head.weight")
State = dict[str, torch.Tensor]


def flagged(flag: bool) -> Flagged:
    model = Flagged(flag)
    if flag:
        tied(model)
    return model


def trained(*, equal: bool) -> State:
    """Another model's state, in tensors of its own."""
    state = {name: value.clone() for name, value in TinyLM(seed=1).state_dict().items()}
    if equal:
        state["head.weight"] = state["emb.weight"].clone()
    return state


# --- every subset of keys, against an oracle --------------------------------------------------------------------------


def oracle(before: State, given: State, *, is_tied: bool, policy: str, strict: bool) -> tuple[State, bool] | type:
    """What the model's tensors are afterwards and whether it is tied; or what is raised. In a few plain rules."""
    held = [name for name in reversed(HEAD) if name in given]
    differ = len(held) == 2 and not torch.equal(given[held[0]], given[held[1]])
    if is_tied and differ and policy == "raise":
        return TieError
    lacking = [name for name in NAMES if name not in given and not (is_tied and held and name in HEAD)]
    if strict and lacking:
        return TieError if not is_tied and HEAD[0] in lacking and HEAD[1] in given else CheckpointError
    after = before | given
    if not is_tied or (differ and policy == "untie"):
        return after, False
    if held:
        winner = given[HEAD[0]] if differ and policy == "target" else given[held[0]]
        after |= dict.fromkeys(HEAD, winner)
    return after, True


@given(
    keys=st.sets(st.sampled_from(NAMES)),
    is_tied=st.booleans(),
    equal=st.booleans(),
    strict=st.booleans(),
    assign=st.booleans(),
    policy=st.sampled_from(["raise", "source", "target", "untie"]),
    turned=st.booleans(),
)
@settings(max_examples=300)
def test_any_subset_of_keys_does_what_a_few_plain_rules_say(
    keys: set[str], is_tied: bool, equal: bool, strict: bool, assign: bool, policy: Any, turned: bool
) -> None:
    model = flagged(is_tied)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    before, untouched = {name: value.clone() for name, value in model.state_dict().items()}, snapshot(model)
    state = {name: value for name, value in trained(equal=equal).items() if name in keys}
    state = dict(reversed(state.items())) if turned else state
    expected = oracle(before, state, is_tied=is_tied, policy=policy, strict=strict)
    if isinstance(expected, type):
        with pytest.raises(expected):
            load_state(model, state, assign=assign, on_conflict=policy, strict=strict)
        assert snapshot(model) == untouched
        return
    report = load_state(model, state, assign=assign, on_conflict=policy, strict=strict)
    tensors, stays_tied = expected
    assert all(torch.equal(value, tensors[name]) for name, value in model.state_dict().items())
    assert (model.head.weight is model.emb.weight) is stays_tied
    assert bool(report.untied) is (is_tied and not stays_tied)
    assert set(flag_levels(model).values()) == ({True, False} if stays_tied else {False})
    kept = NAMES if stays_tied or not is_tied else NAMES[:3]
    assert all(model.get_parameter(name) is parameters[name] for name in kept), "optimizers hold these objects"


def test_a_state_may_hold_neither_end_of_a_tie() -> None:
    model = flagged(True)
    before = model.emb.weight.detach().clone()
    report = load_state(model, {"norm.weight": torch.full((4,), 2.0)}, strict=False)
    assert not report
    assert report.missing == ("emb.weight", "norm.bias", "head.weight")
    assert torch.equal(model.emb.weight, before)
    assert model.head.weight is model.emb.weight


def test_ends_are_compared_by_bits_so_a_nan_equals_itself_and_zero_has_a_sign() -> None:
    state = trained(equal=True)
    state["emb.weight"][0, 0] = state["head.weight"][0, 0] = torch.nan
    assert load_state(flagged(True), state)
    state["emb.weight"][1, 1], state["head.weight"][1, 1] = 0.0, -0.0
    with pytest.raises(TieError, match="1 of 11 rows differ"):
        load_state(flagged(True), state)


@pytest.mark.parametrize(
    ("head", "seen"),
    [
        (torch.zeros(11, 4, dtype=torch.bfloat16), r"dtype torch\.bfloat16 and torch\.float32"),
        (torch.zeros(12, 4), r"shape \(12, 4\) and \(11, 4\)"),
    ],
)
def test_ends_that_could_not_be_one_matrix_are_a_conflict_too(head: torch.Tensor, seen: str) -> None:
    with pytest.raises(TieError, match=seen):
        load_state(flagged(True), trained(equal=True) | {"head.weight": head})
    model = flagged(True)
    load_state(model, trained(equal=True) | {"head.weight": head}, on_conflict="source")
    assert torch.equal(model.head.weight, trained(equal=True)["emb.weight"])


def test_a_knot_of_four_names_is_loaded_by_any_of_them() -> None:
    for name in ("shared.weight", "encoder.weight", "decoder.weight", "head.weight"):
        model = EncoderDecoder()
        tie_weights(model, on_conflict="source")
        load_state(model, {name: torch.full((11, 4), 3.0)})
        assert (model.head.weight == 3).all()
        assert len(find_ties(model)) == 3


def test_of_two_targets_that_differ_none_can_be_kept_for_all() -> None:
    model = EncoderDecoder()
    tie_weights(model, on_conflict="source")
    state = {name: torch.full((11, 4), float(at)) for at, name in enumerate(model.state_dict())}
    with pytest.raises(TieError, match=r"are both tied to shared\.weight and differ from each other"):
        load_state(model, state, on_conflict="target")
    report = load_state(model, state, on_conflict="untie")
    assert len(report.untied) == 3
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_bias_tie_is_a_tie() -> None:
    model = BertLike()
    tie_weights(model, on_conflict="source")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["decoder.bias"] += 1
    with pytest.raises(TieError, match=r"two different ones, decoder\.bias and bias: 11 of 11 rows differ"):
        load_state(model, state)
    report = load_state(model, state, on_conflict="untie")
    assert [tie.target for tie in report.untied] == ["decoder.bias"]
    assert model.decoder.weight is model.emb.weight
    assert torch.equal(model.decoder.bias, model.bias + 1)


def test_a_tie_that_nobody_declares_is_compared_and_kept_too() -> None:
    class Undeclared(TinyLM):
        ties: ClassVar[object] = ()

    model = tied(Undeclared())
    with pytest.raises(TieError):
        load_state(model, trained(equal=False))
    assert load_state(model, trained(equal=True), assign=True)
    assert model.head.weight is model.emb.weight


# --- objects: parameters, gradients, optimizers -----------------------------------------------------------------------


@pytest.mark.parametrize("assign", [False, True])
def test_what_is_frozen_stays_frozen(assign: bool) -> None:
    model = flagged(True)
    model.norm.requires_grad_(False)
    load_state(model, trained(equal=True), assign=assign)
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == [
        "norm.weight",
        "norm.bias",
    ]


def test_a_gradient_stays_where_it_fits_and_goes_where_it_does_not() -> None:
    model = flagged(True)
    backward(model(IDS).square().sum())
    gradient = model.emb.weight.grad
    load_state(model, trained(equal=True), assign=True)
    assert model.emb.weight.grad is gradient is not None
    load_state(model, {name: value.double() for name, value in trained(equal=True).items()}, assign=True)
    assert model.emb.weight.dtype is torch.float64
    assert model.emb.weight.grad is None
    backward(model(IDS).square().sum())
    assert model.emb.weight.grad is not None
    assert model.emb.weight.grad.dtype is torch.float64


@pytest.mark.parametrize("assign", [False, True])
def test_an_optimizer_goes_on_as_it_would_with_a_plain_copy(assign: bool) -> None:
    def run(model: TinyLM, how: str) -> torch.Tensor:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for at in range(4):
            if at == 2:
                state = trained(equal=True)
                if how == "torch":
                    model.load_state_dict(state)
                else:
                    load_state(model, state, assign=assign)
            optimizer.zero_grad()
            backward(model(IDS).square().mean())
            optimizer.step()
        assert check_ties(model, optimizer=optimizer)
        return cast(torch.Tensor, model(IDS).detach())

    assert torch.equal(run(flagged(True), "bowline"), run(flagged(True), "torch"))


def test_copying_casts_to_the_models_dtype_and_assigning_takes_the_states() -> None:
    state = {name: value.to(torch.bfloat16) for name, value in trained(equal=True).items()}
    copied, taken = flagged(True), flagged(True)
    load_state(copied, state)
    load_state(taken, state, assign=True)
    assert copied.head.weight.dtype is torch.float32
    assert taken.head.weight.dtype is torch.bfloat16
    assert torch.equal(copied.head.weight, taken.head.weight.float())
    assert taken.head.weight is taken.emb.weight


def test_a_model_on_meta_takes_memory_and_refuses_copies() -> None:
    with torch.device("meta"):
        model = flagged(True)
    untouched = snapshot(model)
    with pytest.raises(CheckpointError, match=r"on meta in the model, so values cannot be copied into it.*assign=True"):
        load_state(model, trained(equal=True))
    assert snapshot(model) == untouched
    state = trained(equal=True)
    del state["emb.weight"]
    assert load_state(model, state, assign=True)
    assert model.head.weight is model.emb.weight
    assert model.head.weight.data_ptr() == state["head.weight"].data_ptr()


def test_on_meta_both_ends_are_kept_apart_on_request() -> None:
    with torch.device("meta"):
        model = flagged(True)
    state = trained(equal=False)
    load_state(model, state, assign=True, on_conflict="untie")
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert set(flag_levels(model).values()) == {False}


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"norm.weight": torch.ones(5)}, CheckpointError, r"norm\.weight is \(5,\), the model's is \(4,\)"),
        ({"extra.weight": torch.ones(5)}, CheckpointError, r"unexpected extra\.weight"),
        ({"norm.weight": None}, CheckpointError, r"norm\.weight"),
        ({"norm.bias": 1.0}, CheckpointError, r"norm\.bias"),
        ({"norm.bias": torch.zeros(4).numpy()}, CheckpointError, r"norm\.bias"),
        ({"head.weight": torch.zeros(11, 4).numpy()}, CheckpointError, r"head\.weight"),
        ({"head.weight": torch.zeros(11, 4)}, TieError, "11 of 11 rows differ"),
    ],
)
@pytest.mark.parametrize("assign", [False, True])
def test_a_refusal_names_the_tensor_and_leaves_everything_as_it_was(
    change: dict[str, Any], error: type[BowlineError], says: str, assign: bool
) -> None:
    model = flagged(True)
    backward(model(IDS).square().sum())
    untouched = snapshot(model)
    with pytest.raises(error, match=says):
        load_state(model, trained(equal=True) | change, assign=assign)
    assert snapshot(model) == untouched


def test_an_untied_models_missing_head_is_not_left_as_it_happens_to_be() -> None:
    model = flagged(False)
    state = trained(equal=False)
    del state["head.weight"]
    with pytest.raises(TieError, match=r"head\.weight: not in the state, which holds emb\.weight"):
        load_state(model, state)
    assert load_state(model, state, strict=False).missing == ("head.weight",)


def test_a_policy_that_means_nothing_is_refused() -> None:
    policy: Any = "average"
    with pytest.raises(UsageError, match="on_conflict='average'"):
        load_state(flagged(True), {}, on_conflict=policy)


def test_a_tie_to_a_buffer_is_not_made_by_loading() -> None:
    class WithBuffer(nn.Module):
        ties: ClassVar[object] = {"head": "emb.weight"}

        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(5, 2)
            self.register_buffer("head", torch.zeros(5, 2))

    model = WithBuffer()
    state = {name: torch.ones(5, 2) for name in ("emb.weight", "head")}
    load_state(model, state)
    assert list(model._buffers) == ["head"]
    assert list(model._parameters) == []
    assert torch.equal(model.get_buffer("head"), torch.ones(5, 2))
