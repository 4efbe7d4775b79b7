"""A head whose weight is computed from others is no longer the embedding: refused, said, and guarded against."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, weight_norm

from bowline.errors import TieError
from bowline.nn import check_ties, find_ties, tie_weights
from bowline.nn.guards.keep_tied import keep_tied
from bowline.nn.guards.tie_guard import TieGuard
from tests.nn.models import TinyLM, tied

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")  # old, and still in use

WAYS: dict[str, tuple[Callable[[nn.Module], nn.Module], str, str]] = {
    "weight_norm": (weight_norm, "weight_norm from weight_g and weight_v", "remove_weight_norm"),
    "parametrizations.weight_norm": (
        parametrizations.weight_norm,
        r"a parametrization \(_WeightNorm\)",
        "remove_parametrizations",
    ),
}
NORMED = pytest.mark.parametrize(("norm", "reason", "way_out"), WAYS.values(), ids=list(WAYS))


@NORMED
def test_weight_norm_unties_without_a_word(norm: Callable[[nn.Module], nn.Module], reason: str, way_out: str) -> None:
    model = tied(TinyLM())
    norm(model.head)
    rest = [p for name, p in model.named_parameters() if name.startswith("head.")]
    assert sorted(p.numel() for p in rest) == [11, 44], "a length for each row, and a second table of directions"
    assert not any(p is model.emb.weight for p in rest)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.arange(6)[None]
    model(ids).square().sum().backward()
    optimizer.step()
    model(ids)
    assert not torch.equal(model.head.weight, model.emb.weight)


@NORMED
def test_tying_such_a_head_is_refused_with_the_reason_and_the_way_out(
    norm: Callable[[nn.Module], nn.Module], reason: str, way_out: str
) -> None:
    model = TinyLM()
    norm(model.head)
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(TieError, match=rf"head\.weight: is computed by {reason}.*{way_out}"):
        tie_weights(model, on_conflict="source")
    assert [name for name, _ in model.named_parameters()] == names


@NORMED
def test_a_check_says_it(norm: Callable[[nn.Module], nn.Module], reason: str, way_out: str) -> None:
    model = tied(TinyLM())
    norm(model.head)
    with pytest.raises(TieError, match=rf"head\.weight <- emb\.weight TARGET_MISSING.*{reason}"):
        check_ties(model).raise_if_broken()


@NORMED
def test_keep_tied_raises_on_exit_and_names_it(
    norm: Callable[[nn.Module], nn.Module], reason: str, way_out: str
) -> None:
    model = tied(TinyLM())
    with (
        pytest.raises(TieError, match=rf"head\.weight <- emb\.weight: broken inside keep_tied.*{reason}.*{way_out}"),
        keep_tied(model),
    ):
        norm(model.head)


@NORMED
def test_the_way_out_is_one(norm: Callable[[nn.Module], nn.Module], reason: str, way_out: str) -> None:
    model = tied(TinyLM())
    norm(model.head)
    if way_out == "remove_weight_norm":
        torch.nn.utils.remove_weight_norm(model.head)
    else:
        parametrize.remove_parametrizations(model.head, "weight")
    assert tie_weights(model, on_conflict="source")
    assert model.head.weight is model.emb.weight


# --- parametrize one side ---------------------------------------------------------------------------------------------


class Positive(nn.Module):
    """A weight that is the exponential of its parameter; `right_inverse` turns a given weight into that parameter."""

    def forward(self, original: torch.Tensor) -> torch.Tensor:
        return original.exp()

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.abs().add(1e-3).log()


def positive_head(model: TinyLM) -> None:
    parametrize.register_parametrization(model.head, "weight", Positive())


def test_parametrizing_the_head_rewrites_the_embedding() -> None:
    model = tied(TinyLM())
    before = model.emb.weight.detach().clone()
    positive_head(model)
    torch.testing.assert_close(model.emb.weight.detach(), before.abs().add(1e-3).log())
    assert (model.emb.weight < 0).sum() > (before < 0).sum(), "the table now holds logarithms"


def test_what_is_shared_then_is_the_original_and_the_declared_tie_is_broken() -> None:
    model = tied(TinyLM())
    positive_head(model)
    assert [tie.target for tie in find_ties(model)] == ["head.parametrizations.weight.original"]
    report = check_ties(model)
    assert not report
    assert {remark.kind for remark in report["head.weight"].remarks} == {"parametrized"}


def test_keep_tied_raises_on_exit_and_names_the_parametrization() -> None:
    model = tied(TinyLM())
    with pytest.raises(TieError, match=r"broken inside keep_tied: head\.weight: .*Positive"), keep_tied(model):
        positive_head(model)


def test_a_guard_stops_the_run_and_names_the_parametrization() -> None:
    model = tied(TinyLM())
    guard = TieGuard(model)
    positive_head(model)
    with pytest.raises(TieError, match=r"head\.weight <- emb\.weight TARGET_MISSING.*Positive"):
        guard.check()
