"""A call that fails changes nothing: not a bit, not a `Parameter`, not a flag, not a size, not an optimizer's group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, weight_norm

from bowline.errors import BowlineError, TieError, UsageError
from bowline.nn import check_ties, declared_ties, find_ties, tie_weights, untie_weights
from bowline.nn.tree.slots import slots
from tests.nn.models import HEAD, Flagged, TinyLM, flag_levels, tied

Change = Callable[["Model"], None]


class Model(Flagged):
    """A flagged model with a second pair of names that can be tied without any trouble."""

    ties = (HEAD, ("good.target", "good.source"))

    def __init__(self) -> None:
        super().__init__(False)
        self.good = nn.ParameterDict({name: nn.Parameter(torch.ones(3)) for name in ("source", "target")})
        self.head.weight = nn.Parameter(self.emb.weight.detach().clone())
        self.head.out_features = 5  # misstated: a successful tie would correct it


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that a tie may touch."""
    return {
        "ids": {name: (id(slot.tensor), id(slot.module)) for name, slot in slots(model).items()},
        "bits": {
            name: slot.tensor.detach().to_dense().clone()
            for name, slot in slots(model).items()
            if type(slot.tensor) is nn.Parameter and not slot.tensor.is_meta and not slot.tensor.is_quantized
        },
        "grad": {name: parameter.requires_grad for name, parameter in model.named_parameters(remove_duplicate=False)},
        "flags": flag_levels(model),
        "sizes": {
            (name, key): getattr(module, key)
            for name, module in model.named_modules()
            for key in ("in_features", "out_features", "num_embeddings", "embedding_dim")
            if hasattr(module, key)
        },
        "groups": [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups],
        "state": {
            id(parameter): {key: id(value) for key, value in s.items()} for parameter, s in optimizer.state.items()
        },
        "modules": {name: id(module) for name, module in model.named_modules(remove_duplicate=False)},
    }


def assert_same(before: Any, after: Any) -> None:
    if isinstance(before, Mapping):
        assert before.keys() == after.keys()
        for key in before:
            assert_same(before[key], after[key])
    elif isinstance(before, torch.Tensor):
        assert torch.equal(before, after)
    else:
        assert before == after


def trained(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that has a state for each parameter that trains."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad and not p.is_meta], lr=0.1)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


# --- models that cannot be tied --------------------------------------------------------------------------------------


def head_is(tensor: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(model: Model) -> None:
        model.head.weight = nn.Parameter(tensor(model.emb.weight.detach()), requires_grad=False)

    return change


def buffer(model: Model) -> None:
    del model.head.weight
    model.head.register_buffer("weight", model.emb.weight.detach().clone())


def not_a_leaf(model: Model) -> None:
    del model.head.weight
    model.head.weight = model.emb.weight * 1


def a_plain_tensor(model: Model) -> None:
    del model.head.weight
    model.head.weight = model.emb.weight.detach().clone()


def none(model: Model) -> None:
    model.head.weight = None  # type: ignore[assignment]


def gone(model: Model) -> None:
    del model.head


def parametrized(model: Model) -> None:
    parametrizations.orthogonal(model.head)


def parametrized_source(model: Model) -> None:
    parametrizations.weight_norm(model.emb)


def old_weight_norm(model: Model) -> None:
    weight_norm(model.head)


def bias_that_does_not_fit(model: Model) -> None:
    model.head.bias = nn.Parameter(torch.zeros(7))


class Wrapped(torch.Tensor):
    """A subclass, as quantisation libraries and sharding have them."""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (head_is(lambda t: t[:-1].clone()), "has shape (10, 4), emb.weight has (11, 4); one matrix has one shape"),
        (head_is(lambda t: t.t().contiguous()), "has shape (4, 11), emb.weight has (11, 4)"),
        (head_is(lambda t: t.bfloat16()), "has dtype torch.bfloat16, emb.weight has torch.float32"),
        (head_is(lambda t: t.to("meta")), "has device meta, emb.weight has cpu"),
        (head_is(lambda t: t.to_sparse()), "head.weight is torch.sparse_coo, expected a plain dense parameter"),
        (head_is(lambda t: t.as_subclass(Wrapped)), "head.weight is a Wrapped, expected a plain dense parameter"),
        (head_is(lambda t: t + 1), "the two ends hold different values (11 of 11 rows differ"),
        (buffer, "head.weight is a buffer, expected a parameter"),
        (not_a_leaf, "head.weight: is a plain tensor attribute, and not a leaf, expected a parameter"),
        (a_plain_tensor, "head.weight: is a plain tensor attribute, expected a parameter"),
        (none, "head.weight: is None, expected a parameter"),
        (gone, "head.weight: Model has no such tensor"),
        (parametrized, "head.weight: is computed by a parametrization (_Orthogonal)"),
        (parametrized_source, "emb.weight: is computed by a parametrization (_WeightNorm)"),
        (old_weight_norm, "head.weight: is computed by weight_norm from weight_g and weight_v"),
        (bias_that_does_not_fit, "head.weight: its bias has 7 entries, but the shared matrix has 11 rows"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("order", ["bad-first", "good-first"])
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_model_that_cannot_be_tied_is_left_as_it_was(change: Change, words: str, order: str) -> None:
    """Also where one tie of two could have been made."""
    model = Model()
    change(model)
    optimizer = trained(model)
    before = snapshot(model, optimizer)
    ties = list(Model.ties) if order == "bad-first" else list(reversed(Model.ties))
    with pytest.raises(TieError) as caught:
        tie_weights(model, ties, optimizer=optimizer)
    assert words in caught.value.message
    assert caught.value.help
    assert_same(before, snapshot(model, optimizer))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_quantised_head_is_refused() -> None:
    model = Model()
    head_is(lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8))(model)
    optimizer = trained(model)
    before = snapshot(model, optimizer)
    with pytest.raises(TieError, match=r"head.weight is quantised \(torch.qint8\)"):
        tie_weights(model, optimizer=optimizer)
    assert_same(before, snapshot(model, optimizer))


# --- ties that mean nothing ------------------------------------------------------------------------------------------

GOOD = ("good.target", "good.source")


@pytest.mark.parametrize(
    ("ties", "words"),
    [
        ([GOOD, ("head.weight", "emb.wieght")], "emb.wieght: Model has no such tensor; the nearest are emb.weight"),
        ([GOOD, ("nowhere.weight", "emb.weight")], "nowhere.weight: Model has no such tensor"),
        ([GOOD, ("", "emb.weight")], "has no such tensor"),
        ([GOOD, ("emb.weight", "emb.weight")], "emb.weight <- emb.weight: ties a tensor to itself"),
        ([GOOD, ("head.weight", "emb.weight"), ("emb.weight", "head.weight")], "a cycle"),
        ([GOOD, ("head.weight", "emb.weight"), ("head.weight", "norm.weight")], "two sources"),
        ([GOOD, ("norm.weight", "emb.weight")], "has shape (4,), emb.weight has (11, 4)"),
        ([GOOD, "head.weight"], "'head.weight': expected a tie"),
        ([GOOD, ("head.weight", 3)], "('head.weight', 3): expected a tie"),
        ([], "Model declares no ties"),
    ],
)
def test_ties_that_mean_nothing_are_refused(ties: Any, words: str) -> None:
    model = Model()
    optimizer = trained(model)
    before = snapshot(model, optimizer)
    with pytest.raises(BowlineError) as caught:
        tie_weights(model, ties, optimizer=optimizer)
    if ties:
        assert words in caught.value.message
    assert caught.value.help
    assert_same(before, snapshot(model, optimizer))


def test_a_model_that_declares_nothing_is_told_how_to_name_ties() -> None:
    with pytest.raises(TieError, match="Linear declares no ties") as caught:
        tie_weights(nn.Linear(2, 2))
    assert caught.value.help == "name the ties: tie_weights(model, [(target, source)])"


def test_an_unknown_policy_is_a_usage_error() -> None:
    model = Model()
    with pytest.raises(UsageError, match="on_conflict='average'"):
        tie_weights(model, on_conflict="average")  # type: ignore[arg-type]
    assert model.head.weight is not model.emb.weight


class ReadOnly:
    """A config whose text level can be written and whose root cannot."""

    @property
    def tie_word_embeddings(self) -> bool:
        return self.stated

    def __init__(self, stated: bool) -> None:
        self.stated = stated


@pytest.mark.parametrize("flag", [True, False])
def test_a_config_that_cannot_be_written_undoes_it_all(flag: bool) -> None:
    """The last thing that can fail: by then the parameters hang elsewhere."""
    model = Model()
    if flag:
        tied(model)
    model.config.late = ReadOnly(flag)
    model.config.tie_word_embeddings = flag
    model.config.get_text_config = lambda decoder: model.config.late
    optimizer = trained(model)
    before = snapshot(model, optimizer)
    with pytest.raises(AttributeError):
        if flag:
            untie_weights(model, optimizer=optimizer)
        else:
            tie_weights(model, optimizer=optimizer)
    assert_same(before, snapshot(model, optimizer))


# --- untying ---------------------------------------------------------------------------------------------------------


def refuse(table: torch.Tensor) -> None:
    raise ValueError("this recipe wants another shape")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"ties": [HEAD, ("nowhere.weight", "emb.weight")]}, TieError),
        ({"ties": [HEAD, ("good.target", "good.source")]}, TieError),  # they are not shared
        ({"ties": [HEAD, ("emb.weight", "emb.weight")]}, TieError),
        ({"head": "random"}, UsageError),
        ({"head": refuse}, ValueError),
    ],
    ids=["unknown", "not-shared", "onto-itself", "no-such-head", "a-recipe-that-fails"],
)
def test_untying_that_fails_changes_nothing(arguments: Any, error: type[Exception]) -> None:
    model = Model()
    tied(model)
    optimizer = trained(model)
    before = snapshot(model, optimizer)
    with pytest.raises(error):
        untie_weights(model, **arguments, optimizer=optimizer)
    assert_same(before, snapshot(model, optimizer))


@pytest.mark.parametrize("call", [tie_weights, untie_weights])
@pytest.mark.parametrize(
    ("optimizer", "kind", "words"),
    [
        (lambda model: "adam", UsageError, "optimizer is a str"),
        (lambda model: torch.optim.LBFGS(model.parameters()), TieError, "LBFGS does not keep its state per parameter"),
    ],
)
def test_an_optimizer_that_cannot_follow_is_refused_before_anything_is_done(
    call: Any, optimizer: Any, kind: type[Exception], words: str
) -> None:
    model = TinyLM() if call is tie_weights else tied(TinyLM())
    before = find_ties(model)
    with pytest.raises(kind, match=words):
        call(model, optimizer=optimizer(model), **({"on_conflict": "source"} if call is tie_weights else {}))
    assert find_ties(model) == before


@pytest.mark.parametrize("call", [find_ties, declared_ties, check_ties, tie_weights, untie_weights])
@pytest.mark.parametrize("model", [None, "gpt2", {}])
def test_what_is_no_model_is_a_usage_error(call: Any, model: Any) -> None:
    with pytest.raises(UsageError, match=r"expected a torch\.nn\.Module"):
        call(model)
