"""What comes between the ends of a kept tie by other hands: swapped modules, other sizes, quantised matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bowline.errors import TieError
from bowline.nn import check_ties, find_ties
from bowline.nn.guards.keep_tied import keep_tied
from tests.nn.models import TinyLM, is_tied, linear, seq2seq, tied

IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def lm(*, bias: bool = False) -> TinyLM:
    return tied(TinyLM(bias=bias))


def embedding(weight: torch.Tensor) -> nn.Embedding:
    made: nn.Embedding = nn.Embedding.from_pretrained(weight.detach().clone(), freeze=False)
    return made


# --- swapped modules and parameters -----------------------------------------------------------------------------------

SWAPS: dict[str, Callable[[TinyLM, torch.Tensor], Any]] = {
    "head-module": lambda model, values: setattr(model, "head", linear(values)),
    "embedding-module": lambda model, values: setattr(model, "emb", embedding(values)),
    "head-parameter": lambda model, values: setattr(model.head, "weight", nn.Parameter(values.clone())),
    "embedding-parameter": lambda model, values: setattr(model.emb, "weight", nn.Parameter(values.clone())),
    "alias": lambda model, values: setattr(model.head, "weight", nn.Parameter(model.emb.weight.detach())),
}


@pytest.mark.parametrize("swap", SWAPS.values(), ids=list(SWAPS))
def test_what_was_swapped_for_the_same_values_is_the_old_parameter_again(
    swap: Callable[[TinyLM, torch.Tensor], Any],
) -> None:
    """The old one, where an end still has it: optimizers know it, and whether it is frozen was decided for it."""
    model = lm()
    table = model.emb.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with keep_tied(model):
        swap(model, table.detach())
        assert not is_tied(model)
    assert is_tied(model)
    assert model.emb.weight is table
    assert check_ties(model, optimizer=optimizer)


def test_both_ends_swapped_for_the_same_values_are_one_new_parameter() -> None:
    model, values = lm(), torch.randn(11, 4)
    with keep_tied(model):
        model.head, model.emb = linear(values), embedding(values)
    assert is_tied(model)
    assert torch.equal(model.emb.weight, values)


@pytest.mark.parametrize(
    ("swap", "story"),
    [
        (SWAPS["head-module"], r"the module of head\.weight was replaced by another Linear"),
        (SWAPS["embedding-module"], r"the module of emb\.weight was replaced by another Embedding"),
        (SWAPS["head-parameter"], "one end was assigned another parameter"),
    ],
    ids=["head-module", "embedding-module", "head-parameter"],
)
def test_what_was_swapped_for_other_values_is_refused_and_named(
    swap: Callable[[TinyLM, torch.Tensor], Any], story: str
) -> None:
    model = lm()
    with pytest.raises(TieError, match=rf"head\.weight <- emb\.weight: .*{story}; 11 of 11 rows differ"):  # noqa: SIM117
        with keep_tied(model):
            swap(model, torch.randn(11, 4))
    assert "load_state_dict" not in vars(model)


def test_a_class_of_the_same_name_is_told_from_the_one_it_replaced() -> None:
    class Linear(nn.Linear):
        pass

    model = lm()
    kinds = r"\(was torch\.nn\.modules\.linear\.Linear, is now tests\..*<locals>\.Linear\)"
    with pytest.raises(TieError, match=f"was replaced {kinds}"), keep_tied(model):
        model.head = Linear(4, 11, bias=False)


@pytest.mark.parametrize(("policy", "kept"), [("source", "emb"), ("target", "head")])
@pytest.mark.parametrize("swapped", ["head", "emb"])
def test_a_policy_names_the_end_that_stays(policy: Any, kept: str, swapped: str) -> None:
    model, values = lm(), torch.randn(11, 4)
    old = model.emb.weight.detach().clone()
    with keep_tied(model, on_conflict=policy):
        setattr(model, swapped, linear(values) if swapped == "head" else embedding(values))
    assert is_tied(model)
    assert torch.equal(model.emb.weight, values if kept == swapped else old)


@pytest.mark.parametrize("swapped", ["encoder", "decoder", "head"])
def test_of_several_targets_the_one_that_changed_is_kept_for_all(swapped: str) -> None:
    model, values = seq2seq(), torch.randn(11, 4)
    before = find_ties(model)
    with keep_tied(model, on_conflict="target"):
        setattr(model, swapped, linear(values) if swapped == "head" else embedding(values))
    assert find_ties(model) == before
    assert torch.equal(model.shared.weight, values)


def test_two_targets_that_differ_from_each_other_cannot_both_be_kept() -> None:
    model = seq2seq()
    with pytest.raises(TieError, match=r"decoder\.weight and head\.weight are both tied to shared\.weight"):  # noqa: SIM117
        with keep_tied(model, on_conflict="target"):
            model.decoder, model.head = embedding(torch.randn(11, 4)), linear(torch.randn(11, 4))


def test_one_bit_is_a_conflict() -> None:
    model = lm()
    with torch.no_grad():
        model.emb.weight[0, 0] = 0.0
    with pytest.raises(TieError, match="1 of 11 rows differ, by at most 0"), keep_tied(model):
        swapped = model.emb.weight.detach().clone()
        swapped[0, 0] = -0.0
        model.head.weight = nn.Parameter(swapped)


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_both_ends_resized_alike_are_one_and_say_their_size() -> None:
    model, values = lm(), torch.randn(13, 4)
    with keep_tied(model):
        model.emb = embedding(values)
        model.head.weight = nn.Parameter(values.clone())
    assert is_tied(model)
    assert (model.head.out_features, model.emb.num_embeddings) == (13, 13)
    assert check_ties(model)


@pytest.mark.parametrize("end", ["emb", "head"])
def test_one_end_resized_no_longer_fits_and_both_shapes_are_named(end: str) -> None:
    model, values = lm(), torch.randn(13, 4)
    with pytest.raises(TieError, match=r"head\.weight has shape .*, emb\.weight has ") as caught, keep_tied(model):
        setattr(model, end, linear(values) if end == "head" else embedding(values))
    assert "(13, 4)" in str(caught.value)
    assert "(11, 4)" in str(caught.value)


def test_a_head_whose_bias_was_forgotten_no_longer_fits() -> None:
    model, values = lm(bias=True), torch.randn(13, 4)
    with pytest.raises(TieError, match=r"head\.weight: its bias has 11 entries, but the shared matrix has 13 rows"):  # noqa: SIM117
        with keep_tied(model):
            model.emb = embedding(values)
            model.head.weight = nn.Parameter(values.clone())


# --- ends that are no parameters any more -----------------------------------------------------------------------------


def to_buffer(model: TinyLM) -> None:
    values = model.head.weight.detach().clone()
    del model.head.weight
    model.head.register_buffer("weight", values)


def to_attribute(model: TinyLM) -> None:
    values = model.head.weight.detach().clone()
    del model.head.weight
    model.head.weight = values


GONE: dict[str, tuple[Callable[[TinyLM], Any], str]] = {
    "deleted": (lambda model: delattr(model, "head"), "TinyLM has no such tensor"),
    "replaced": (
        lambda model: setattr(model, "head", nn.Identity()),
        r"the module of head.weight was replaced \(was Linear, is now Identity\)",
    ),
    "buffer": (to_buffer, "head.weight became a buffer"),
    "attribute": (to_attribute, "head.weight: is a plain tensor attribute"),
}


@pytest.mark.parametrize(("harm", "story"), GONE.values(), ids=list(GONE))
def test_an_end_that_is_gone_is_named_with_what_became_of_it(harm: Callable[[TinyLM], Any], story: str) -> None:
    model = lm()
    with pytest.raises(TieError, match=rf"head\.weight <- emb\.weight: broken inside keep_tied: .*{story}"):  # noqa: SIM117
        with keep_tied(model):
            harm(model)


class Int8(torch.Tensor):
    """A matrix in 8 bits with one scale, as quantisers subclass tensors: it multiplies, and looks up if it can."""

    looks_up: bool
    levels: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, matrix: torch.Tensor, looks_up: bool) -> Int8:
        made: Int8 = torch.Tensor._make_wrapper_subclass(cls, matrix.shape, dtype=matrix.dtype)
        return made

    def __init__(self, matrix: torch.Tensor, looks_up: bool) -> None:
        self.scale = matrix.detach().abs().max() / 127
        self.levels = (matrix.detach() / self.scale).round().to(torch.int8)
        self.looks_up = looks_up

    def whole(self) -> torch.Tensor:
        return self.levels.float() * self.scale

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is nn.functional.linear:
            return nn.functional.linear(args[0], args[1].whole(), *args[2:])
        if function is nn.functional.embedding and args[1].looks_up:
            return nn.functional.embedding(args[0], args[1].whole())
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{function}: not for this tensor")


def quantise(model: TinyLM, looks_up: bool) -> None:
    """What a quantiser does that knows `nn.Linear` and no other module."""
    model.head.weight = nn.Parameter(Int8(model.head.weight, looks_up), requires_grad=False)


def test_a_quantised_head_that_can_look_up_serves_the_embedding_too() -> None:
    model = lm()
    with keep_tied(model):
        quantise(model, looks_up=True)
    assert is_tied(model)
    assert isinstance(model.head.weight, Int8)
    rows = model.head.weight.whole()
    torch.testing.assert_close(model(IDS), nn.functional.linear(model.norm(rows[IDS]), rows))


def test_a_quantised_head_that_cannot_look_up_is_refused_and_named() -> None:
    model = lm()
    table = model.emb.weight
    message = r"head\.weight became a \w+, which Embedding cannot compute with.*quantize_tied"
    with pytest.raises(TieError, match=message), keep_tied(model):
        quantise(model, looks_up=False)
    assert model.emb.weight is table, "the embedding is as it was"
