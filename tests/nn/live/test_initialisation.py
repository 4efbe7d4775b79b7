"""Drawing the matrix: module by module it is drawn twice and the last writer wins; with Bowline once, by its source."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from bowline.nn import find_ties
from bowline.nn.init.apply_once import apply_once
from tests.nn.models import TinyLM, tied

STD = {nn.Embedding: 1.0, nn.Linear: 0.02}


def draw(module: nn.Module) -> None:
    """As most training code has it: a scale for each kind of module."""
    if type(module) in STD:
        nn.init.normal_(module.weight, std=STD[type(module)])  # type: ignore[arg-type]


class HeadFirst(nn.Module):
    """The head is registered before the embedding, which so has the last word."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, rows, bias=False)
        self.emb = nn.Embedding(rows, width)
        self.head.weight = self.emb.weight


BUILDS: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "head-last": (lambda: tied(TinyLM(500, 40)), 0.02),
    "head-first": (lambda: HeadFirst(500, 40), 1.0),
}
BUILD = pytest.mark.parametrize(("build", "winning"), BUILDS.values(), ids=list(BUILDS))


@contextmanager
def draws_of(parameter: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The scales with which `torch.nn.init.normal_` draws that storage."""
    plain, seen = nn.init.normal_, []

    def counted(tensor: torch.Tensor, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
        if not tensor.is_meta and tensor.data_ptr() == parameter.data_ptr():
            seen.append(std)
        return plain(tensor, mean, std)

    with monkeypatch.context() as patched:
        patched.setattr(nn.init, "normal_", counted)
        yield seen


@BUILD
def test_apply_draws_the_matrix_twice_and_the_last_writer_wins(
    build: Callable[[], nn.Module], winning: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    table = model.get_parameter("emb.weight")
    with draws_of(table, monkeypatch) as seen:
        model.apply(draw)
    assert sorted(seen) == [0.02, 1.0]
    assert float(table.detach().std()) == pytest.approx(winning, rel=0.05)


@BUILD
def test_apply_once_draws_it_once_by_its_source_whatever_the_order(
    build: Callable[[], nn.Module], winning: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    table, before = model.get_parameter("emb.weight"), find_ties(model)
    with draws_of(table, monkeypatch) as seen:
        apply_once(model, draw)
    assert seen == [1.0]
    assert float(table.detach().std()) == pytest.approx(1.0, rel=0.05)
    assert find_ties(model) == before
    assert model.get_parameter("emb.weight") is table


def test_a_tied_model_drawn_once_computes_what_an_untied_one_drawn_so_and_tied_would() -> None:
    ids = torch.tensor([[1, 2, 3]])
    model, other = tied(TinyLM(50, 8)), TinyLM(50, 8)
    torch.manual_seed(0)
    apply_once(model, draw)
    torch.manual_seed(0)
    other.apply(draw)
    other.head.weight = other.emb.weight
    assert torch.equal(model(ids), other(ids))
