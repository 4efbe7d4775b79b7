"""How each tie stands, what else is wrong with it, and what the report says of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, weight_norm

from bowline import Tie, TieState
from bowline.errors import TieError
from bowline.nn import check_ties, tie_weights
from tests.nn.models import BertLike, EncoderDecoder, Flagged, TinyLM, tied


def state(model: nn.Module) -> TieState:
    return check_ties(model)["head.weight"].state


def kinds(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, bool]:
    """Each remark on the head's tie, and whether it breaks it."""
    return {remark.kind: remark.breaks for remark in check_ties(model, optimizer=optimizer)["head.weight"].remarks}


def apart(change: Callable[[torch.Tensor], Any]) -> TinyLM:
    """A model whose head is a clone of its embedding, changed."""
    model = TinyLM()
    head = model.emb.weight.detach().clone()
    change(head)
    model.head.weight = nn.Parameter(head)
    return model


# --- states ----------------------------------------------------------------------------------------------------------


def test_one_parameter_is_shared() -> None:
    report = check_ties(tied(TinyLM()))
    assert report
    assert len(report) == 1
    assert report["head.weight"].state is TieState.SHARED
    assert str(report) == "head.weight <- emb.weight SHARED"
    report.raise_if_broken()


def test_two_parameters_on_one_memory_are_an_alias() -> None:
    model = TinyLM()
    model.head.weight = nn.Parameter(model.emb.weight.detach())
    assert state(model) is TieState.ALIAS
    assert not check_ties(model)


def test_a_copy_is_equal_and_not_shared() -> None:
    model = apart(lambda head: None)
    assert state(model) is TieState.EQUAL
    assert not check_ties(model)


def test_other_values_are_diverged_and_say_where() -> None:
    model = apart(lambda head: head[3:5].add_(0.25))
    check = check_ties(model)["head.weight"]
    assert check.state is TieState.DIVERGED
    assert check.difference is not None
    assert (check.difference.rows, check.difference.of) == (2, 11)
    assert check.difference.largest == pytest.approx(0.25)
    assert str(check) == "head.weight <- emb.weight DIVERGED: 2 of 11 rows differ, by at most 0.25"


@pytest.mark.parametrize(
    "head",
    [torch.zeros(12, 4), torch.zeros(4, 11), torch.zeros(11, 4, dtype=torch.bfloat16), torch.zeros(11, 4).to_sparse()],
    ids=["rows", "transposed", "dtype", "sparse"],
)
def test_what_cannot_be_one_matrix_is_incompatible(head: torch.Tensor) -> None:
    model = TinyLM()
    model.head.weight = nn.Parameter(head)
    assert state(model) is TieState.INCOMPATIBLE


def test_one_end_on_meta_is_incompatible_and_both_are_equal() -> None:
    model = TinyLM()
    model.head.to("meta")
    assert state(model) is TieState.INCOMPATIBLE
    assert state(model.to("meta")) is TieState.EQUAL


@pytest.mark.parametrize(
    ("tie", "expected"),
    [
        (("gone.weight", "emb.weight"), TieState.TARGET_MISSING),
        (("head.weight", "gone.weight"), TieState.SOURCE_MISSING),
        (("gone.weight", "gone.too"), TieState.BOTH_MISSING),
    ],
)
def test_a_name_that_is_not_there_is_missing(tie: tuple[str, str], expected: TieState) -> None:
    check = check_ties(TinyLM(), [tie])[tie[0]]
    assert check.state is expected
    assert {remark.kind for remark in check.remarks} == {"missing_tensor"}


def test_without_a_declaration_there_is_nothing_to_check() -> None:
    report = check_ties(nn.Linear(2, 2))
    assert report
    assert str(report) == "no ties"


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_a_lazy_head_is_incompatible_until_it_has_a_shape() -> None:
    model = TinyLM()
    model.head = nn.LazyLinear(11)
    assert state(model) is TieState.INCOMPATIBLE


# --- remarks on the structure ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "size"), [("emb", "num_embeddings"), ("emb", "embedding_dim"), ("head", "out_features")]
)
def test_a_size_that_its_module_misstates_is_remarked_on(end: str, size: str) -> None:
    model = tied(TinyLM())
    setattr(getattr(model, end), size, 99)
    assert kinds(model) == {"size": False}
    assert f"states {size}=99" in str(check_ties(model))


def test_a_bias_of_another_length_breaks_the_tie() -> None:
    model = tied(TinyLM(bias=True))
    model.head.bias = nn.Parameter(torch.zeros(3))
    assert kinds(model) == {"bias": True}


def test_a_buffer_breaks_the_tie() -> None:
    model = TinyLM()
    del model.head.weight
    model.head.register_buffer("weight", model.emb.weight.detach())
    assert kinds(model)["not_a_parameter"]


def test_a_parametrized_end_is_named_as_such() -> None:
    model = TinyLM()
    parametrizations.orthogonal(model.head)
    assert kinds(model) == {"parametrized": True}
    assert state(model) is TieState.TARGET_MISSING


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_the_old_weight_norm_is_named_as_such() -> None:
    model = tied(TinyLM())
    weight_norm(model.head)
    check = check_ties(model)["head.weight"]
    assert check.state is TieState.TARGET_MISSING
    assert "weight_norm" in check.remarks[0].message


def test_freezing_one_end_of_a_tie_is_said_to_freeze_the_other() -> None:
    model = tied(TinyLM())
    model.head.requires_grad_(False)
    assert kinds(model) == {"frozen": False}
    assert check_ties(model)


def test_a_model_that_is_all_frozen_is_frozen_on_purpose() -> None:
    assert kinds(tied(TinyLM()).requires_grad_(False)) == {}


def test_one_frozen_end_of_an_untied_pair_is_said() -> None:
    model = apart(lambda head: None)
    model.emb.requires_grad_(False)
    assert kinds(model) == {"frozen": False}
    assert "only emb.weight is frozen" in str(check_ties(model))


# --- remarks on the optimizer ----------------------------------------------------------------------------------------


def test_an_optimizer_that_was_built_on_the_tied_model_is_right() -> None:
    model = tied(TinyLM())
    assert kinds(model, torch.optim.AdamW(model.parameters())) == {}


def test_an_optimizer_that_was_built_before_tying_holds_a_stale_parameter() -> None:
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters())
    tied(model)
    assert kinds(model, optimizer) == {"stale": True}
    assert not check_ties(model, optimizer=optimizer)
    assert check_ties(model)


def test_an_optimizer_without_the_shared_parameter_will_not_train_it() -> None:
    model = tied(TinyLM())
    optimizer = torch.optim.AdamW(model.norm.parameters())
    assert kinds(model, optimizer) == {"missing": True}
    model.emb.requires_grad_(False)
    assert kinds(model, optimizer) == {"frozen": False}


def test_after_an_assigning_load_the_old_optimizer_is_stale_and_misses_both_ends() -> None:
    model = tied(TinyLM())
    optimizer = torch.optim.AdamW(model.parameters())
    model.load_state_dict(model.state_dict(), assign=True)
    remarks = check_ties(model, optimizer=optimizer)["head.weight"].remarks
    assert [remark.kind for remark in remarks] == ["stale", "missing", "missing"]


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate:UserWarning")
def test_a_parameter_that_is_listed_twice_takes_each_step_twice() -> None:
    model = tied(TinyLM())
    optimizer = torch.optim.SGD([model.emb.weight, model.head.weight, *model.norm.parameters()], lr=1.0)
    assert kinds(model, optimizer) == {"duplicate": True}
    before = model.emb.weight.detach().clone()
    model.emb.weight.grad = torch.ones_like(before)
    optimizer.step()
    torch.testing.assert_close(before - model.emb.weight.detach(), torch.full_like(before, 2.0))


def test_weight_decay_that_the_two_ends_want_differently_is_worth_knowing() -> None:
    model = tied(TinyLM())
    model.pos, model.mlp = nn.Embedding(5, 4), nn.Linear(4, 4, bias=False)
    decayed = [model.mlp.weight, model.emb.weight]
    other = [model.pos.weight, *model.norm.parameters()]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}]
    report = check_ties(model, optimizer=torch.optim.AdamW(groups))
    assert report
    assert str(report["head.weight"].remarks[0]) == (
        "note: weight decay is 0.0 for the other embeddings and 0.1 for the other matrices; "
        "emb.weight, which is both, has 0.1 "
        "(help: choose one value for the shared matrix: one parameter is in one group)"
    )
    assert kinds(model, torch.optim.AdamW(model.parameters(), weight_decay=0.1)) == {}


# --- the report ------------------------------------------------------------------------------------------------------


def test_the_report_reads_as_it_is_pinned_here() -> None:
    model = EncoderDecoder()
    model.encoder.weight = model.shared.weight
    model.decoder.weight = nn.Parameter(model.shared.weight.detach())
    model.head.weight = nn.Parameter(model.shared.weight.detach().clone())
    model.head.weight.data[2, 0] += 0.5
    model.head.out_features = 12
    assert str(check_ties(model)) == (
        "encoder.weight <- shared.weight SHARED\n"
        "decoder.weight <- shared.weight ALIAS\n"
        "head.weight <- shared.weight DIVERGED: 1 of 11 rows differ, by at most 0.5\n"
        "  note: the module of head.weight states out_features=12, but the weight has 11 "
        "(help: the module computes the same; tie_weights and resize_vocab keep this size correct)"
    )


def test_a_broken_report_raises_with_every_broken_tie() -> None:
    model = BertLike()
    model.decoder.weight = model.emb.weight
    report = check_ties(model)
    assert [check.tie for check in report.broken] == [Tie("decoder.bias", "bias")]
    with pytest.raises(TieError) as caught:
        report.raise_if_broken()
    assert caught.value.message.startswith("1 of 2 ties does not hold: decoder.bias <- bias DIVERGED: 11 of 11 rows")
    assert caught.value.help == "tie_weights(model, optimizer=...) makes the ties; untie_weights(model) undoes them"


def test_two_broken_ties_do_not_hold() -> None:
    with pytest.raises(TieError, match=r"2 of 2 ties do not hold: decoder.weight.*; decoder.bias"):
        check_ties(BertLike()).raise_if_broken()


def test_a_tie_that_was_not_checked_is_not_in_the_report() -> None:
    with pytest.raises(KeyError):
        check_ties(tied(TinyLM()))["other.weight"]


def test_the_flag_decides_what_is_checked_and_given_ties_are_checked_anyway() -> None:
    assert len(check_ties(Flagged(False))) == 0
    assert len(check_ties(Flagged(False), [("head.weight", "emb.weight")])) == 1


def test_checking_changes_nothing() -> None:
    model = apart(lambda head: head.add_(1.0))
    optimizer = torch.optim.AdamW(model.parameters())
    ids = [id(parameter) for parameter in model.parameters()]
    check_ties(model, optimizer=optimizer)
    assert [id(parameter) for parameter in model.parameters()] == ids
    assert [id(parameter) for parameter in optimizer.param_groups[0]["params"]] == ids


def test_what_tie_weights_makes_every_check_passes() -> None:
    model = EncoderDecoder()
    optimizer = torch.optim.AdamW(model.parameters())
    assert not check_ties(model, optimizer=optimizer)
    assert tie_weights(model, on_conflict="source", optimizer=optimizer)
    assert check_ties(model, optimizer=optimizer)


def test_a_tie_that_the_flag_denies_is_remarked_on() -> None:
    model = Flagged(False)
    model.head.weight = model.emb.weight
    report = check_ties(model)
    assert report
    assert [remark.kind for check in report.checks for remark in check.remarks] == ["flag"]


def test_an_optimizer_of_two_models_is_not_stale_for_either() -> None:
    one, other = tied(TinyLM()), tied(TinyLM())
    optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)
    report = check_ties(one, optimizer=optimizer)
    assert report
    assert [(remark.kind, remark.breaks) for remark in report.checks[0].remarks] == [("stale", False)]
