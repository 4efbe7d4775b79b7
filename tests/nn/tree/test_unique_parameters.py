"""A shared matrix is drawn once and counted once, in whatever way it is shared, listed and drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from bowline.nn import check_ties, find_ties, tie_weights
from bowline.nn.init.apply_once import apply_once
from bowline.nn.tree.unique_parameters import unique_parameters
from tests.nn.models import BertLike, EncoderDecoder, TinyLM, tied

IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def lm(**options: Any) -> TinyLM:
    return tied(TinyLM(**options))


def constant(values: dict[type[nn.Module], float]) -> Callable[[nn.Module], None]:
    """Each weight and bias becomes its kind's number: who drew last is read off the matrix."""

    def init(module: nn.Module) -> None:
        for parameter in module._parameters.values():
            if type(module) in values and parameter is not None:
                nn.init.constant_(parameter, values[type(module)])

    return init


BY_KIND = constant({nn.Embedding: 1.0, nn.Linear: 2.0, nn.LayerNorm: 3.0})


# --- apply_once -------------------------------------------------------------------------------------------------------


def test_the_source_draws_the_matrix_and_everything_else_is_drawn_as_ever() -> None:
    model, plain = lm(bias=True), lm(bias=True)
    assert apply_once(model, BY_KIND) is model
    plain.apply(BY_KIND)
    assert set(plain.emb.weight.detach().unique().tolist()) == {2.0}
    assert set(model.emb.weight.detach().unique().tolist()) == {1.0}
    for name in ("norm.weight", "norm.bias", "head.bias"):
        assert torch.equal(model.get_parameter(name), plain.get_parameter(name))


def test_every_target_of_a_table_and_of_a_bias_borrows() -> None:
    for model in (EncoderDecoder(), BertLike()):
        tie_weights(model, on_conflict="source")
        ties = find_ties(model)
        apply_once(model, BY_KIND)
        assert find_ties(model) == ties
    assert set(model.get_parameter("emb.weight").detach().unique().tolist()) == {1.0}


def test_an_untied_model_is_drawn_as_apply_draws_it() -> None:
    model, plain = TinyLM(bias=True), TinyLM(bias=True)
    apply_once(model, BY_KIND)
    plain.apply(BY_KIND)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_module_under_two_names_is_drawn_once_as_apply_does() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4)})
    model["b"] = model["a"]
    seen: list[nn.Module] = []
    apply_once(model, seen.append)
    assert [type(module) for module in seen] == [nn.Linear, nn.ModuleDict]
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_parameters_and_optimizers_stay_the_same_objects() -> None:
    model = lm()
    table, optimizer = model.emb.weight, torch.optim.SGD(model.parameters(), lr=0.1)
    apply_once(model, BY_KIND)
    assert model.emb.weight is model.head.weight is table
    assert check_ties(model, optimizer=optimizer)


@pytest.mark.parametrize(
    "init",
    [
        nn.init.orthogonal_,
        nn.init.xavier_uniform_,
        nn.init.kaiming_normal_,
        nn.init.trunc_normal_,
        lambda weight: nn.init.sparse_(weight, 0.1),
        lambda weight: weight.data.normal_(0.0, 0.02),
        lambda weight: weight.data.copy_(torch.randn(weight.shape)),
    ],
    ids=["orthogonal", "xavier", "kaiming", "trunc-normal", "sparse", "data-normal", "data-copy"],
)
def test_the_usual_draws_work_on_a_head_that_borrows(init: Callable[[torch.Tensor], Any]) -> None:
    model = lm()
    before = model.emb.weight.detach().clone()
    apply_once(model, lambda module: init(module.weight) if isinstance(module, nn.Linear) else None)
    assert torch.equal(model.emb.weight, before), "the head does not draw, and the embedding was not asked to"


def test_a_modules_own_reset_is_a_draw_like_any_other() -> None:
    model = lm()
    torch.manual_seed(0)
    apply_once(model, lambda module: getattr(module, "reset_parameters", lambda: None)())
    torch.manual_seed(0)
    assert torch.equal(model.emb.weight, nn.Embedding(11, 4).weight)


def test_an_init_that_assigns_new_parameters_leaves_a_tied_model() -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, (nn.Embedding, nn.Linear)):
            module.weight = nn.Parameter(torch.full(module.weight.shape, 1.0 + isinstance(module, nn.Linear)))

    model = lm()
    apply_once(model, init)
    assert model.head.weight is model.emb.weight
    assert set(model.emb.weight.detach().unique().tolist()) == {1.0}


def test_an_alias_is_one_memory_and_drawn_once() -> None:
    model = TinyLM()
    model.head.weight = nn.Parameter(model.emb.weight.detach())
    apply_once(model, BY_KIND)
    assert set(model.emb.weight.detach().unique().tolist()) == {1.0}
    assert check_ties(model)["head.weight"].state == "ALIAS", "drawing does not tie"


def test_an_init_that_raises_leaves_the_tie() -> None:
    model = lm()

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            raise KeyError("init")

    with pytest.raises(KeyError, match="init"):
        apply_once(model, init)
    assert model.head.weight is model.emb.weight
    assert not model.head.weight.is_meta


def test_a_model_on_meta_stays_tied_and_on_meta() -> None:
    with torch.device("meta"):
        model = lm()
    apply_once(model, BY_KIND)
    assert model.head.weight is model.emb.weight
    assert model.head.weight.is_meta


# --- unique_parameters ------------------------------------------------------------------------------------------------


def listed(model: nn.Module) -> list[torch.Tensor]:
    return [p for module in model.modules() for p in module._parameters.values() if p is not None]


def same(found: Any, expected: Sequence[torch.Tensor]) -> bool:
    return [id(p) for p in found] == [id(p) for p in expected]


def test_of_a_tied_model_it_gives_what_parameters_gives() -> None:
    model = lm()
    assert same(unique_parameters(listed(model)), list(model.parameters()))
    assert same(unique_parameters(model), list(model.parameters()))
    assert same(unique_parameters(p for p in listed(model)), list(model.parameters()))


def test_of_an_alias_the_first_is_enough() -> None:
    model = TinyLM()
    model.head.weight = nn.Parameter(model.emb.weight.detach())
    assert len(list(model.parameters())) == 4
    assert same(unique_parameters(model), [model.emb.weight, *model.norm.parameters()])


def test_equal_values_are_two_parameters() -> None:
    model = TinyLM()
    model.head.weight = nn.Parameter(model.emb.weight.detach().clone())
    assert same(unique_parameters(model), list(model.parameters()))


def test_of_a_fused_matrix_and_its_views_the_whole_is_kept_and_of_views_alone_all() -> None:
    whole = nn.Parameter(torch.zeros(12, 4))
    query, key = (nn.Parameter(whole.detach()[at : at + 4]) for at in (0, 4))
    assert same(unique_parameters([query, key]), [query, key])
    for order in ([whole, query, key], [query, whole, key], [query, key, whole]):
        assert same(unique_parameters(order), [whole])


def test_no_memory_is_nobodys_alias() -> None:
    empty = [nn.Parameter(torch.zeros(0, 4)) for _ in range(2)]
    assert same(unique_parameters(empty), empty)
    meta = [nn.Parameter(torch.zeros(3, 4, device="meta")) for _ in range(2)]
    assert same(unique_parameters(meta), meta)
    assert list(unique_parameters([])) == []


def test_one_parameter_is_one_as_clip_grad_norm_takes_it() -> None:
    table = nn.Parameter(torch.ones(3, 2))
    assert same(unique_parameters(table), [table])


@pytest.mark.parametrize("build", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_built_from_it_trains_a_listed_model_as_a_plain_one(build: Any) -> None:
    ours, plain = lm(), lm()
    one, other = build(unique_parameters(listed(ours)), lr=0.1), build(plain.parameters(), lr=0.1)
    for _ in range(3):
        for model, optimizer in ((ours, one), (plain, other)):
            optimizer.zero_grad()
            model(IDS).square().sum().backward()
            nn.utils.clip_grad_norm_(unique_parameters(listed(model)), 1.0)
            optimizer.step()
    assert torch.equal(ours.emb.weight, plain.emb.weight)
