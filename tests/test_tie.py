"""The record that every stage reads."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from bowline import Tie, TieState
from bowline.tie import owner_chain

HEAD_ON_WTE = Tie("lm_head.weight", "transformer.wte.weight")


def test_a_tie_reads_from_borrower_to_owner() -> None:
    assert (HEAD_ON_WTE.target, HEAD_ON_WTE.source) == ("lm_head.weight", "transformer.wte.weight")
    assert str(HEAD_ON_WTE) == "lm_head.weight <- transformer.wte.weight"


def test_a_tie_is_a_value() -> None:
    same = Tie(target="lm_head.weight", source="transformer.wte.weight")
    assert same == HEAD_ON_WTE
    assert len({same, HEAD_ON_WTE}) == 1
    assert Tie(HEAD_ON_WTE.source, HEAD_ON_WTE.target) != HEAD_ON_WTE


def test_a_tie_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        HEAD_ON_WTE.target = "other"  # type: ignore[misc]
    with pytest.raises((AttributeError, TypeError)):
        HEAD_ON_WTE.other = "other"  # type: ignore[attr-defined]


def test_ties_sort_by_their_target() -> None:
    assert sorted([Tie("b", "a"), Tie("a", "z"), Tie("a", "b")]) == [Tie("a", "b"), Tie("a", "z"), Tie("b", "a")]


def test_the_states_are_those_of_the_design() -> None:
    assert [state.value for state in TieState] == [
        "SHARED", "ALIAS", "EQUAL", "DIVERGED", "INCOMPATIBLE", "TARGET_MISSING", "SOURCE_MISSING", "BOTH_MISSING"
    ]  # fmt: skip
    assert all(state.name == state.value for state in TieState)


def test_a_chain_ends_with_the_owner() -> None:
    sources = {"a": "b", "b": "c"}
    assert [owner_chain(name, sources)[-1] for name in ("a", "b", "c", "elsewhere")] == ["c", "c", "c", "elsewhere"]


@pytest.mark.parametrize(
    ("sources", "chain"),
    [
        ({"a": "a"}, ("a", "a")),
        ({"a": "b", "b": "a"}, ("a", "b", "a")),
        ({"a": "b", "b": "c", "c": "b"}, ("a", "b", "c", "b")),
    ],
)
def test_a_cycle_ends_the_chain_where_it_closes(sources: dict[str, str], chain: tuple[str, ...]) -> None:
    assert owner_chain("a", sources) == chain
