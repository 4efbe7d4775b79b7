"""The records of what no generator can read off a family."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bowline.families.quirks import BY_FAMILY, FusedOrder, Quirks, quirks_of
from bowline.families.transformers_table import load_table


@pytest.mark.parametrize("family", sorted(BY_FAMILY))
def test_each_record_belongs_to_a_family_of_the_table_and_says_something(family: str) -> None:
    assert quirks_of(family) != Quirks()
    assert load_table().family(family) is not None


@pytest.mark.parametrize("family", [None, 1, [], "", "no such family"])
def test_what_is_no_family_has_no_quirks(family: object) -> None:
    assert quirks_of(family) == Quirks()


@pytest.mark.parametrize(
    ("new", "multi_query", "order"),
    [
        (True, True, FusedOrder.BY_KEY_VALUE_HEAD),
        (True, False, FusedOrder.BY_KEY_VALUE_HEAD),
        (False, True, FusedOrder.SIDE_BY_SIDE),
        (False, False, FusedOrder.BY_HEAD),
    ],
)
def test_falcons_order_depends_on_two_keys(new: bool, multi_query: bool, order: FusedOrder) -> None:
    fused = quirks_of("falcon").fused_attention
    assert fused is not None
    assert fused.order_in(SimpleNamespace(new_decoder_architecture=new, multi_query=multi_query)) is order
