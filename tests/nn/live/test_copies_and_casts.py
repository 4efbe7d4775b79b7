"""What keeps a tie by itself, and must go on doing so: copies, casts, averages. What an alias does under the same."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from bowline.nn import check_ties, find_ties, tie_weights
from tests.nn.models import HEAD, BertLike, EncoderDecoder, TinyLM, tied

IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])

MODELS: dict[str, Callable[[], Any]] = {
    "language-model": TinyLM,
    "weight-and-bias": BertLike,
    "encoder-decoder": EncoderDecoder,
}


def whole_module(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "whole-module-save": whole_module,
    "AveragedModel": lambda model: AveragedModel(model).module,
}
CASTS: dict[str, Callable[[Any], Any]] = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "to-float64": lambda model: model.to(torch.float64),
    "to-cpu": lambda model: model.to("cpu"),
    "share-memory": lambda model: model.share_memory(),
    "float-again": lambda model: model.double().float(),
}


@pytest.fixture(params=MODELS.values(), ids=list(MODELS))
def model(request: pytest.FixtureRequest) -> Any:
    made = request.param()
    tie_weights(made, on_conflict="source")
    return made


def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(IDS)
    return found.detach()


@pytest.mark.parametrize("way", [*COPIES.values(), *CASTS.values()], ids=[*COPIES, *CASTS])
def test_every_tie_is_there_afterwards(model: Any, way: Callable[[Any], Any]) -> None:
    before = find_ties(model)
    after = way(model)
    assert find_ties(after) == before
    assert check_ties(after)
    for tie in before:
        assert after.get_parameter(tie.target) is after.get_parameter(tie.source)


@pytest.mark.parametrize("copying", COPIES.values(), ids=list(COPIES))
def test_a_copy_computes_the_same_and_shares_nothing_with_the_original(
    model: Any, copying: Callable[[Any], Any]
) -> None:
    after = copying(model)
    assert torch.equal(logits(after), logits(model))
    both = find_ties(nn.ModuleDict({"model": model, "copy": after}))
    assert not both.aliases
    assert all(tie.target.partition(".")[0] == tie.source.partition(".")[0] for tie in both)


@pytest.mark.parametrize("cast", CASTS.values(), ids=list(CASTS))
def test_a_cast_leaves_an_optimizer_right(model: Any, cast: Callable[[Any], Any]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cast(model)
    assert check_ties(model, optimizer=optimizer)


@pytest.mark.parametrize(
    "way",
    [copy.deepcopy, lambda model: AveragedModel(model).module, lambda model: model.to(torch.float64)],
    ids=["deepcopy", "AveragedModel", "to-float64"],
)
def test_an_alias_comes_apart_where_a_tie_holds(way: Callable[[Any], Any]) -> None:
    """Same memory passes for a tie until it is copied; of the tie that `tie_weights` makes of it, one is copied."""
    model = TinyLM()
    model.head.weight = nn.Parameter(model.emb.weight.detach())
    aliased = way(copy.copy(model))
    assert aliased.head.weight.data_ptr() != aliased.emb.weight.data_ptr()

    model = TinyLM()
    model.head.weight = nn.Parameter(model.emb.weight.detach())
    assert model.head.weight.data_ptr() == model.emb.weight.data_ptr()
    assert [(tie.target, tie.source) for tie in find_ties(model).aliases] == [HEAD]
    tie_weights(model)
    again = way(model)
    assert again.head.weight is again.emb.weight


@pytest.mark.parametrize(
    "make",
    [
        lambda table: nn.Embedding(11, 4, _weight=table),
        lambda table: nn.Embedding.from_pretrained(table, freeze=False),
    ],
    ids=["_weight", "from_pretrained"],
)
def test_an_embedding_made_of_the_heads_parameter_is_an_alias_and_told_so(
    make: Callable[[torch.Tensor], nn.Embedding],
) -> None:
    model = TinyLM()
    model.emb = make(model.head.weight)
    assert model.emb.weight is not model.head.weight
    assert model.emb.weight.data_ptr() == model.head.weight.data_ptr()
    assert not find_ties(model).ties
    assert check_ties(model)["head.weight"].state == "ALIAS"
    tie_weights(model)
    assert model.emb.weight is model.head.weight


def test_assigning_data_makes_an_alias_that_two_moments_of_adam_pull_apart() -> None:
    model = TinyLM()
    model.head.weight.data = model.emb.weight.data
    assert check_ties(model)["head.weight"].state == "ALIAS"
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(IDS).square().sum().backward()
    optimizer.step()
    assert len([p for p in optimizer.state if p.shape == model.emb.weight.shape]) == 2, "two moments for one matrix"

    model = tied(TinyLM())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(IDS).square().sum().backward()
    optimizer.step()
    assert len([p for p in optimizer.state if p.shape == model.emb.weight.shape]) == 1
    assert check_ties(model, optimizer=optimizer)
