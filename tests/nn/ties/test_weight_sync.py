"""A copy that did not get the matrix at both ends is named, and one that did passes, whatever its form."""

from __future__ import annotations

import copy as copies
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from bowline.errors import TieError, UsageError
from bowline.nn import check_weight_sync, quantize_tied
from tests.distributed.models import FAMILIES
from tests.nn.models import TinyLM, linear, seq2seq, tied

SOURCES = {"gpt2": "transformer.wte.weight", "bert": "bert.embeddings.word_embeddings.weight", "t5": "shared.weight"}
TARGETS = {
    "gpt2": ["lm_head.weight"],
    "bert": ["cls.predictions.decoder.weight", "cls.predictions.decoder.bias"],
    "t5": ["lm_head.weight"],
}


def trainer(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = FAMILIES[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def untied_copy(model: nn.Module) -> nn.Module:
    """The copy of an inference engine: equal, with a parameter at each name."""
    made = copies.deepcopy(model)
    for name in (name for ends in TARGETS.values() for name in ends if name in made.state_dict()):
        place, _, attribute = name.rpartition(".")
        parameter = nn.Parameter(made.get_parameter(name).detach().clone())
        made.get_submodule(place).register_parameter(attribute, parameter)
    return made


def every_parameter(copy: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return copy.named_parameters(remove_duplicate=False)


def step(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)


def send(model: nn.Module, copy: nn.Module, *, without: str = "-") -> None:
    """Copies each tensor to its name, as `load_weights` of an engine does."""
    with torch.no_grad():
        held = dict(copy.named_parameters(remove_duplicate=False))
        for name, value in model.state_dict().items():
            if name in held and name != without:
                held[name].copy_(value)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("form", [lambda copy: copy, lambda copy: copy.state_dict(), every_parameter])
def test_both_ends_sent_is_right(name: str, form: Callable[[nn.Module], Any]) -> None:
    model = trainer(name)
    copy = untied_copy(model)
    step(model)
    send(model, copy)
    report = check_weight_sync(model, form(copy))
    assert {end.name for end in report.ends} >= {SOURCES[name], *TARGETS[name]}
    assert all(end.rows == 51 and end.padding == 0 and end.copy_name == end.name for end in report.ends)
    assert f"{TARGETS[name][0]}: 51 rows equal as torch.float32" in str(report)


@pytest.mark.parametrize(("name", "end"), [(name, end) for name, ends in TARGETS.items() for end in ends])
@pytest.mark.parametrize("form", [lambda copy: copy, lambda copy: copy.state_dict()])
def test_an_end_that_was_not_sent_is_stale(name: str, end: str, form: Callable[[nn.Module], Any]) -> None:
    model = trainer(name)
    copy = untied_copy(model)
    step(model)
    send(model, copy, without=end)
    with pytest.raises(TieError) as caught:
        check_weight_sync(model, form(copy))
    assert f"{end} of the copy is stale: 51 of 51 rows (100%) differ" in str(caught.value)
    assert "by at most 0.5" in str(caught.value)
    assert "send the matrix under each name, " in str(caught.value) and f'"{end}"' in str(caught.value)
    assert str(caught.value).count("is stale") == 1


def test_a_stale_embedding_is_named_and_not_the_head() -> None:
    model = trainer("gpt2")
    copy = untied_copy(model)
    step(model)
    send(model, copy, without=SOURCES["gpt2"])
    with pytest.raises(TieError, match=r"transformer\.wte\.weight of the copy is stale"):
        check_weight_sync(model, copy)


def test_a_copy_that_got_nothing_is_told_to_be_sent_again() -> None:
    model = trainer("gpt2")
    copy = untied_copy(model)
    step(model)
    with pytest.raises(TieError, match=r"send the weights again, after the optimizer's last step"):
        check_weight_sync(model, copy)


def test_the_share_of_rows_is_that_of_the_stale_ones() -> None:
    model = trainer("gpt2")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["lm_head.weight"][7] += 0.25
    with pytest.raises(TieError, match=r"1 of 51 rows \(2%\) differ .*, by at most 0\.25"):
        check_weight_sync(model, state)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tied_copy_is_right_once_it_has_the_matrix(name: str) -> None:
    model = trainer(name)
    copy = copies.deepcopy(model)
    step(model)
    with pytest.raises(TieError):
        check_weight_sync(model, copy)
    send(model, copy)
    report = check_weight_sync(model, copy)
    assert {end.same_as for end in report.ends if end.name == TARGETS[name][0]} == {SOURCES[name]}
    assert f"the same tensor as {SOURCES[name]}" in str(report)


# --- dtypes, padding, names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_values_are_compared_as_the_copy_has_them(dtype: torch.dtype) -> None:
    model = trainer("t5")
    copy = untied_copy(model).to(dtype)
    report = check_weight_sync(model, copy)
    assert all(end.dtype is dtype for end in report.ends)
    step(model)
    send(model, copy, without="lm_head.weight")
    with pytest.raises(TieError, match=r"lm_head\.weight of the copy is stale"):
        check_weight_sync(model, copy)


def test_padding_rows_at_the_end_are_allowed_and_said() -> None:
    model = trainer("gpt2")
    state = model.state_dict()
    padded = {name: torch.cat([state[name], torch.full((13, 16), 9.0)]) for name in ("lm_head.weight", SOURCES["gpt2"])}
    report = check_weight_sync(model, padded)
    assert [end.padding for end in report.ends] == [13, 13]
    assert str(report).count("51 rows equal as torch.float32, 13 padding rows not compared") == 2
    padded["lm_head.weight"] = padded["lm_head.weight"].roll(13, 0)  # padding at the front
    with pytest.raises(TieError, match="is stale: 51 of 51 rows"):
        check_weight_sync(model, padded)


@pytest.mark.parametrize("shape", [(50, 16), (51, 15), (51,)])
def test_a_table_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    model = trainer("gpt2")
    state = model.state_dict() | {"lm_head.weight": torch.zeros(shape)}
    with pytest.raises(TieError) as caught:
        check_weight_sync(model, state)
    assert f"lm_head.weight of the copy is {shape}, expected (51, 16), or more rows" in str(caught.value)


def test_names_may_differ_by_leading_parts() -> None:
    model = trainer("gpt2")
    copy = nn.ModuleDict({"language_model": untied_copy(model)})
    report = check_weight_sync(model, copy)
    assert "lm_head.weight (in the copy language_model.lm_head.weight): 51 rows equal" in str(report)
    assert check_weight_sync(nn.ModuleDict({"module": model}), untied_copy(model)).ends[0].copy_name == SOURCES["gpt2"]


def test_the_ends_of_a_module_with_names_of_its_own_are_found_by_kind() -> None:
    model = tied(TinyLM())
    copy = nn.ModuleDict({"tokens": nn.Embedding(12, 4), "positions": nn.Embedding(6, 4), "output": nn.Linear(4, 12)})
    with torch.no_grad():
        for name in ("tokens", "output"):
            copy.get_parameter(f"{name}.weight")[:11] = model.emb.weight
    report = check_weight_sync(model, copy)
    assert [(end.copy_name, end.padding) for end in report.ends] == [("tokens.weight", 1), ("output.weight", 1)]
    copy["other"] = nn.Linear(4, 12)
    with pytest.raises(TieError, match=r"the copy has output\.weight and other\.weight, expected one tensor for head"):
        check_weight_sync(model, copy)


class EngineParameter(nn.Parameter):
    """An engine's own kind of parameter, as vLLM has them."""

    def __new__(cls, data: torch.Tensor) -> EngineParameter:
        return torch.Tensor._make_subclass(cls, data, False)


def test_an_engines_own_kind_of_parameter_is_compared_as_any_other() -> None:
    model = tied(TinyLM())
    copy = TinyLM()
    for module in (copy.emb, copy.head):
        module.weight = EngineParameter(model.emb.weight.detach().clone())
    assert len(check_weight_sync(model, copy).ends) == 2
    copy.head.weight.data[0] += 1
    with pytest.raises(TieError, match=r"head\.weight of the copy is stale: 1 of 11 rows"):
        check_weight_sync(model, copy)


# --- ends that are missing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["lm_head.weight", SOURCES["gpt2"]])
def test_an_absent_end_is_right_only_if_the_copy_is_said_to_be_tied(end: str) -> None:
    model = trainer("gpt2")
    state = {name: value for name, value in model.state_dict().items() if name != end}
    with pytest.raises(TieError, match=rf"the copy has no {end}.*pass tied=True"):
        check_weight_sync(model, state)
    report = check_weight_sync(model, state, tied=True)
    assert f"{end}: not in the copy, which ties it itself" in str(report)
    step(model)
    state = {name: value - 1 for name, value in state.items()}
    with pytest.raises(TieError, match="is stale"):
        check_weight_sync(model, state, tied=True)


def test_a_copy_with_neither_end_is_refused() -> None:
    with pytest.raises(TieError, match=r"neither of emb\.weight, head\.weight"):
        check_weight_sync(tied(TinyLM()), {"norm.weight": torch.ones(4)}, tied=True)


def test_all_ends_of_one_matrix_are_compared() -> None:
    model = seq2seq()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert len(check_weight_sync(model, state).ends) == 4
    state["decoder.weight"] += 1
    with pytest.raises(TieError, match=r"decoder\.weight of the copy is stale"):
        check_weight_sync(model, state)


def test_a_generator_is_read_once_and_keeps_only_the_ends() -> None:
    model = trainer("gpt2")
    given = []

    def sent() -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in model.state_dict().items():
            given.append(name)
            yield name, value

    assert check_weight_sync(model, sent()).ends
    assert given == list(model.state_dict())


# --- bad input ------------------------------------------------------------------------------------------------------


def test_a_model_without_ties_has_nothing_to_compare() -> None:
    report = check_weight_sync(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)), {})
    assert str(report) == "no ties"


def test_a_tie_that_does_not_hold_in_the_model_is_refused() -> None:
    model = TinyLM()
    with pytest.raises(TieError, match=r"head\.weight <- emb\.weight: does not hold in the model"):
        check_weight_sync(model, model)
    model.head = linear(model.emb.weight)
    with pytest.raises(TieError, match="does not hold in the model"):
        check_weight_sync(model, model)


@pytest.mark.parametrize("copy", [None, 3, "model", torch.zeros(3), [torch.zeros(3)], {"head.weight": 3}])
def test_what_is_not_a_copy_is_refused(copy: Any) -> None:
    with pytest.raises(UsageError, match=r"^copy"):
        check_weight_sync(tied(TinyLM()), copy)


def test_tables_that_are_not_floats_are_refused() -> None:
    model = tied(TinyLM())
    quantised = tied(TinyLM())
    quantize_tied(quantised)
    with pytest.raises(TieError, match=r"emb\.weight of the copy is torch\.int8, expected a float matrix"):
        check_weight_sync(model, quantised)
    with pytest.raises(TieError, match=r"emb\.weight: is torch\.int8 in the model, expected a float matrix"):
        check_weight_sync(quantised, model)
    with pytest.raises(TieError, match=r"is torch\.float8_e4m3fn, expected a float matrix"):
        check_weight_sync(model, {name: value.to(torch.float8_e4m3fn) for name, value in model.state_dict().items()})
    with pytest.raises(TieError, match="is on meta"):
        check_weight_sync(model, copies.deepcopy(model).to("meta"))
