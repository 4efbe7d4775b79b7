"""What is shared now: identity is a tie; one memory under two parameters is an alias, and never a tie."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from accelerate.utils.modeling import find_tied_parameters  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bowline import Tie
from bowline.nn import find_ties
from tests.nn.models import BertLike, EncoderDecoder, TinyLM, tied

HEAD = Tie("head.weight", "emb.weight")

# --- ties ------------------------------------------------------------------------------------------------------------


def test_one_parameter_under_two_names_is_a_tie() -> None:
    found = find_ties(tied(TinyLM()))
    assert (found.ties, found.aliases) == ((HEAD,), ())
    assert str(found) == "head.weight <- emb.weight SHARED"
    assert list(found) == [HEAD]
    assert HEAD in found
    assert len(found) == 1


def test_an_untied_model_shares_nothing() -> None:
    found = find_ties(TinyLM())
    assert (found.ties, found.aliases, len(found)) == ((), (), 0)
    assert str(found) == "nothing is shared"


def test_equal_values_are_no_tie() -> None:
    model = TinyLM()
    model.head.weight = nn.Parameter(model.emb.weight.detach().clone())
    assert str(find_ties(model)) == "nothing is shared"


def test_an_embedding_is_the_source_even_where_the_head_is_registered_first() -> None:
    model = nn.ModuleDict({"head": nn.Linear(4, 9, bias=False), "emb": nn.Embedding(9, 4)})
    model["head"].weight = model["emb"].weight
    assert find_ties(model).ties == (HEAD,)


def test_a_declaration_outranks_the_embedding() -> None:
    class Backwards(TinyLM):
        ties = (("emb.weight", "head.weight"),)

    assert find_ties(tied(Backwards())).ties == (Tie("emb.weight", "head.weight"),)


def test_without_an_embedding_the_first_registered_is_the_source() -> None:
    model = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in ("b", "a")})
    model["a"].weight = model["b"].weight
    assert find_ties(model).ties == (Tie("a.weight", "b.weight"),)


def test_a_bias_tie_is_a_tie_like_any_other() -> None:
    model = BertLike()
    model.decoder.weight, model.decoder.bias = model.emb.weight, model.bias
    assert set(find_ties(model)) == {Tie("decoder.weight", "emb.weight"), Tie("decoder.bias", "bias")}


def test_of_four_names_of_one_table_each_other_borrows_the_declared_owner() -> None:
    model = EncoderDecoder()
    for module in (model.encoder, model.decoder, model.head):
        module.weight = model.shared.weight
    assert {tie.target for tie in find_ties(model)} == {"encoder.weight", "decoder.weight", "head.weight"}
    assert {tie.source for tie in find_ties(model)} == {"shared.weight"}


def test_a_shared_module_is_a_tie_of_each_of_its_parameters() -> None:
    layer = nn.Linear(3, 3)
    assert set(find_ties(nn.ModuleDict({"a": layer, "b": layer}))) == {
        Tie("b.weight", "a.weight"),
        Tie("b.bias", "a.bias"),
    }


def test_buffers_are_shared_by_right() -> None:
    model = nn.Module()
    model.register_buffer("a", torch.zeros(3))
    model.register_buffer("b", model.get_buffer("a"))
    assert str(find_ties(model)) == "nothing is shared"


def test_ties_on_meta_are_identity_too() -> None:
    with torch.device("meta"):
        assert find_ties(TinyLM()).ties == ()
        assert find_ties(tied(TinyLM())).ties == (HEAD,)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
@settings(max_examples=50)
def test_any_sharing_is_found_in_full(holders: list[int]) -> None:
    """Each name is given one of six parameters; the connected names are those that were given the same one."""
    pool = [nn.Parameter(torch.zeros(2, 2)) for _ in range(6)]
    model = nn.ParameterDict()
    for at, which in enumerate(holders):
        model._parameters[f"p{at}"] = pool[which]
    expected = {
        Tie(f"p{at}", f"p{holders.index(which)}") for at, which in enumerate(holders) if holders.index(which) != at
    }
    assert set(find_ties(model)) == expected


# --- aliases ---------------------------------------------------------------------------------------------------------


def by_assigning_a_state_dict(model: TinyLM) -> None:
    state = tied(TinyLM()).state_dict()
    model.load_state_dict(state, assign=True)


def by_data(model: TinyLM) -> None:
    model.head.weight.data = model.emb.weight.data


def by_weight_argument(model: TinyLM) -> None:
    model.emb = nn.Embedding(11, 4, _weight=model.head.weight)


def by_from_pretrained(model: TinyLM) -> None:
    model.emb = nn.Embedding.from_pretrained(model.head.weight)


def by_wrapping_again(model: TinyLM) -> None:
    model.head.weight = nn.Parameter(model.emb.weight.detach())


def by_one_buffer_of_bytes(model: TinyLM) -> None:
    memory = bytearray(11 * 4 * 4)
    for module in (model.emb, model.head):
        module.weight = nn.Parameter(torch.frombuffer(memory, dtype=torch.float32).view(11, 4))


WAYS = (
    by_assigning_a_state_dict,
    by_data,
    by_weight_argument,
    by_from_pretrained,
    by_wrapping_again,
    by_one_buffer_of_bytes,
)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_an_alias_is_found_and_is_no_tie(way: Callable[[TinyLM], None]) -> None:
    model = TinyLM()
    way(model)
    assert model.head.weight is not model.emb.weight
    assert model.head.weight.data_ptr() == model.emb.weight.data_ptr()
    found = find_ties(model)
    assert (found.ties, found.aliases) == ((), (HEAD,))
    assert str(found) == "head.weight <- emb.weight ALIAS"


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_accelerate_sees_ties_and_no_alias(way: Callable[[TinyLM], None]) -> None:
    assert find_tied_parameters(tied(TinyLM())) == [["emb.weight", "head.weight"]]
    model = TinyLM()
    way(model)
    assert find_tied_parameters(model) == []


def test_a_slice_of_rows_is_an_alias_of_its_table() -> None:
    model = TinyLM()
    model.head = nn.Linear(4, 3, bias=False)
    model.head.weight = nn.Parameter(model.emb.weight.detach()[5:8])
    assert find_ties(model).aliases == (HEAD,)


def test_rows_that_do_not_overlap_are_no_alias() -> None:
    table = torch.zeros(6, 2)
    model = nn.ParameterDict({"a": nn.Parameter(table[:3]), "b": nn.Parameter(table[3:])})
    assert str(find_ties(model)) == "nothing is shared"


def test_three_windows_that_overlap_in_a_row_are_one_knot() -> None:
    table = torch.zeros(6, 2)
    model = nn.ParameterDict({name: nn.Parameter(table[at : at + 3]) for at, name in enumerate("abc")})
    assert find_ties(model).aliases == (Tie("b", "a"), Tie("c", "a"))


def test_an_alias_of_a_tie_is_said_once() -> None:
    model = tied(TinyLM())
    model.register_parameter("spare", nn.Parameter(model.emb.weight.detach()))
    found = find_ties(model)
    assert (found.ties, found.aliases) == ((HEAD,), (Tie("spare", "emb.weight"),))


def test_two_meta_parameters_are_an_alias_only_of_one_storage() -> None:
    with torch.device("meta"):
        model = TinyLM()
    assert find_ties(model).aliases == ()
    model.head.weight = nn.Parameter(model.emb.weight.detach())
    assert find_ties(model).aliases == (HEAD,)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,)])
def test_empty_parameters_share_nothing(shape: tuple[int, ...]) -> None:
    model = nn.ParameterDict({"a": nn.Parameter(torch.zeros(shape)), "b": nn.Parameter(torch.zeros(shape))})
    assert str(find_ties(model)) == "nothing is shared"


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_a_lazy_layer_that_has_no_shape_yet_is_no_obstacle() -> None:
    model = tied(TinyLM())
    model.lazy = nn.LazyLinear(3)
    assert find_ties(model).ties == (HEAD,)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=7))
@settings(max_examples=50)
def test_aliases_are_the_windows_that_have_a_byte_in_common(windows: list[tuple[int, int]]) -> None:
    """Brute force: sets of rows, and groups joined until none have a row in common."""
    memory = torch.zeros(16, 2)
    model = nn.ParameterDict({f"w{at}": nn.Parameter(memory[a : a + n]) for at, (a, n) in enumerate(windows)})
    groups = [({f"w{at}"}, set(range(a, a + n))) for at, (a, n) in enumerate(windows)]
    for _ in windows:
        for one in groups:
            for other in [group for group in groups if group is not one and group[1] & one[1]]:
                one[0].update(other[0])
                one[1].update(other[1])
                groups.remove(other)
    expected = {frozenset(names) for names, _ in groups if len(names) > 1}
    seen: dict[str, set[str]] = {}
    for tie in find_ties(model).aliases:
        seen.setdefault(tie.source, {tie.source}).add(tie.target)
    assert {frozenset(names) for names in seen.values()} == expected
