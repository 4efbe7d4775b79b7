"""Activations, masks, attention and the checks of inputs, against their definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bowline.errors import ConfigError, UsageError
from bowline.models.causal_lm import shifted
from bowline.models.common.activation_functions import ACTIVATIONS, activation
from bowline.models.common.attention import (
    attend,
    merge_heads,
    packed_mask,
    prune_linear,
    split_heads,
    visible_keys,
)
from bowline.models.common.input_checks import check_embeds, check_ids, check_labels

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_each_activation_is_the_function_that_transformers_calls_so(name: str) -> None:
    known = pytest.importorskip("transformers.activations").ACT2FN
    x = torch.linspace(-6, 6, 301, dtype=torch.float64)
    expected = known[name](x)
    assert (activation(name)(x) - expected).abs().max() < 1e-7  # one spelling rounds sqrt(2 / pi)


def test_an_unknown_activation_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"'swoosh': expected one of gelu, gelu_new"):
        activation("swoosh")


def test_heads_are_split_and_merged_without_a_change() -> None:
    x = torch.randn(2, 5, 12)
    heads = split_heads(x, 3)
    assert heads.shape == (2, 3, 5, 4)
    assert torch.equal(heads[:, 1], x[:, :, 4:8])
    assert torch.equal(merge_heads(heads), x)


def by_definition(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, scale: float
) -> torch.Tensor:
    scores = (scale * query @ key.mT).masked_fill(~seen, -torch.inf)
    mixed = scores.softmax(-1).nan_to_num(0.0) @ value  # a query that sees nothing gives zeros
    return torch.cat(list(mixed.unbind(1)), -1)


@settings(max_examples=40)
@given(st.data())
def test_attention_under_any_mask_is_the_softmax_of_what_is_seen(data: st.DataObject) -> None:
    batch, heads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    keys = data.draw(st.integers(1, 6))
    queries = data.draw(st.integers(1, keys))
    causal = data.draw(st.booleans())
    form = data.draw(st.sampled_from(["none", "2d", "3d", "3d of one", "4d"]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    query, key, value = (
        torch.randn(batch, heads, length, 4, dtype=torch.float64, generator=generator)
        for length in (queries, keys, keys)
    )
    shapes = {
        "2d": (batch, keys),
        "3d": (batch, queries, keys),
        "3d of one": (1, queries, keys),
        "4d": (batch, 1, queries, keys),
    }
    mask = torch.randint(0, 2, shapes[form], generator=generator) if form != "none" else None
    seen = torch.ones(batch, queries, keys, dtype=torch.bool)
    for q in range(queries):
        for k in range(keys):
            for b in range(batch):
                if causal and k > q + keys - queries:
                    seen[b, q, k] = False
                if mask is not None:
                    row = mask[b if mask.shape[0] > 1 else 0]
                    seen[b, q, k] &= bool(row[k] if form == "2d" else row.reshape(queries, keys)[q, k])
    built = visible_keys(mask, batch, queries, keys, causal=causal, device=CPU)
    mixed = attend(query, key, value, built, causal=causal and queries == keys, scale=0.3)
    assert torch.allclose(mixed, by_definition(query, key, value, seen[:, None], 0.3), atol=1e-12)


def test_no_mask_is_made_where_torch_needs_none() -> None:
    assert visible_keys(None, 2, 5, 5, causal=True, device=CPU) is None
    assert visible_keys(None, 2, 1, 9, causal=True, device=CPU) is None
    assert visible_keys(None, 2, 3, 9, causal=False, device=CPU) is None
    assert visible_keys(None, 2, 3, 9, causal=True, device=CPU) is not None


@pytest.mark.parametrize(
    "shape", [(2, 4), (3, 5), (5,), (2, 5, 4), (3, 5, 5), (2, 4, 5), (2, 1, 5, 4), (2, 1, 1, 5, 5)]
)
def test_a_mask_of_another_shape_is_refused_with_both(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        visible_keys(torch.ones(shape), 2, 5, 5, causal=True, device=CPU)
    assert str(shape) in caught.value.message
    assert "(2, 5)" in caught.value.message


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_packed_sequences_see_themselves_alone(lengths: list[int]) -> None:
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    expected = torch.block_diag(*[torch.ones(length, length) for length in lengths]).bool()
    assert torch.equal(packed_mask(positions)[0], expected)


def test_ids_must_be_rows_of_the_table() -> None:
    check_ids(torch.tensor([[0, 8]]), 9)
    check_ids(torch.tensor([[0, 8]], dtype=torch.int32), 9)
    for ids, seen in (
        (torch.tensor([[0, 9]]), "input_ids has 9"),
        (torch.tensor([[0, -2]]), "input_ids has -2"),
        (torch.tensor([0]), r"\(1,\)"),
        (torch.tensor([[0.0]]), "float32"),
        (torch.tensor([[True]]), "bool"),
        (torch.zeros(0, 3, dtype=torch.long), "an empty batch"),
    ):
        with pytest.raises(UsageError, match=seen):
            check_ids(ids, 9)


def test_embeddings_and_labels_are_held_to_their_shapes() -> None:
    check_embeds(torch.zeros(2, 3, 4), 4)
    check_labels(torch.tensor([[0, -100]]), (1, 2), 1)
    check_labels(torch.zeros(0, 2, dtype=torch.long), (0, 2), 1)
    for embeds in (torch.zeros(2, 4), torch.zeros(2, 3, 5), torch.zeros(2, 3, 4).long(), torch.zeros(0, 3, 4)):
        with pytest.raises(UsageError, match="inputs_embeds"):
            check_embeds(embeds, 4)
    for labels in (torch.tensor([[0, 1]]), torch.tensor([[0, -1]]), torch.tensor([0, 0]), torch.zeros(1, 2)):
        with pytest.raises(UsageError, match="label"):
            check_labels(labels, (1, 2), 1)


def test_shifted_labels_are_each_position_s_next_token() -> None:
    assert shifted(torch.tensor([[5, 6, 7]])).tolist() == [[6, 7, -100]]
    assert shifted(torch.tensor([[5]])).tolist() == [[-100]]


def test_a_pruned_matrix_keeps_its_rows_and_whether_it_is_trained() -> None:
    weight = nn.Parameter(torch.arange(6.0).view(3, 2), requires_grad=False)
    pruned = prune_linear(weight, torch.tensor([2, 0]), 0)
    assert pruned.tolist() == [[4.0, 5.0], [0.0, 1.0]]
    assert isinstance(pruned, nn.Parameter)
    assert not pruned.requires_grad
    assert prune_linear(weight, torch.tensor([1]), 1).shape == (3, 1)
