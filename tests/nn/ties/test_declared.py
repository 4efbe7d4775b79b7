"""What is said to be tied: by Bowline's `ties`, by transformers 5's mapping and 4's list, under each flag."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bowline import Tie
from bowline.errors import TieError
from bowline.nn import check_ties, declared_ties
from tests.nn.models import BertLike, EncoderDecoder, Flagged, TinyLM, tied

HEAD = Tie("head.weight", "emb.weight")


def declaring(ties: Any, base: type[TinyLM] = TinyLM) -> TinyLM:
    made: TinyLM = type("Declaring", (base,), {"ties": ties})()
    return made


def pretrained(keys: Any, flag: bool | None = True, base: type[nn.Module] = TinyLM, **more: Any) -> Any:
    """A module as transformers' classes are: `_tied_weights_keys` and a config."""
    model = type("Pretrained", (base,), {"ties": None, "_tied_weights_keys": keys, **more})()
    model.config = SimpleNamespace() if flag is None else SimpleNamespace(tie_word_embeddings=flag)
    return model


# --- Bowline's own declaration ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ties",
    [
        HEAD,
        [HEAD],
        (HEAD,),
        [("head.weight", "emb.weight")],
        (("head.weight", "emb.weight"),),
        {"head.weight": "emb.weight"},
    ],
    ids=["tie", "ties", "tuple", "pairs", "tuple-of-pairs", "mapping"],
)
def test_a_class_writes_its_ties_in_any_plain_way(ties: Any) -> None:
    assert declared_ties(declaring(ties)) == (HEAD,)


def test_nothing_declared_is_nothing_tied() -> None:
    assert declared_ties(tied(declaring(None))) == ()
    assert declared_ties(nn.Linear(2, 2)) == ()


def test_another_librarys_attribute_of_that_name_is_none() -> None:
    assert declared_ties(declaring("head")) == ()
    assert declared_ties(declaring(7)) == ()
    assert declared_ties(nn.ModuleDict({"ties": nn.Linear(2, 2)})) == ()


def test_a_declaration_does_not_ask_what_the_tensors_do() -> None:
    assert declared_ties(TinyLM()) == declared_ties(tied(TinyLM())) == (HEAD,)
    assert declared_ties(declaring({"no.such": "neither.one"})) == (Tie("no.such", "neither.one"),)


def test_bias_and_encoder_ties_are_ordinary() -> None:
    assert declared_ties(BertLike()) == (Tie("decoder.weight", "emb.weight"), Tie("decoder.bias", "bias"))
    assert [tie.target for tie in declared_ties(EncoderDecoder())] == [
        "encoder.weight",
        "decoder.weight",
        "head.weight",
    ]


def test_inside_another_module_the_names_get_its_prefix() -> None:
    outer = nn.ModuleDict({"teacher": TinyLM(), "student": nn.Sequential(TinyLM())})
    assert declared_ties(outer) == (
        Tie("teacher.head.weight", "teacher.emb.weight"),
        Tie("student.0.head.weight", "student.0.emb.weight"),
    )


def test_a_shared_module_declares_under_each_of_its_names() -> None:
    model = TinyLM()
    assert len(declared_ties(nn.ModuleDict({"a": model, "b": model}))) == 2


def test_of_two_words_on_one_target_the_inner_ones_counts() -> None:
    class Outer(nn.Module):
        ties = (("inner.head.weight", "elsewhere"),)

        def __init__(self) -> None:
            super().__init__()
            self.inner = TinyLM()

    assert declared_ties(Outer()) == (Tie("inner.head.weight", "inner.emb.weight"),)


def test_a_chain_is_told_from_its_owner() -> None:
    assert declared_ties(declaring([("c", "b"), ("b", "a")])) == (Tie("c", "a"), Tie("b", "a"))


def test_a_knot_may_be_declared_twice() -> None:
    assert declared_ties(declaring([("c", "b"), ("b", "a"), ("c", "a")])) == (Tie("c", "a"), Tie("b", "a"))


@pytest.mark.parametrize(
    ("ties", "words"),
    [
        ([("a", "a")], "a <- a: ties a tensor to itself"),
        ([("a", "b"), ("b", "a")], "a cycle"),
        ([("a", "b"), ("b", "c"), ("c", "a")], "a cycle"),
        ([("a", "b"), ("a", "c")], "a has two sources, b and c, expected one"),
        ([("a", "b", "c")], "('a', 'b', 'c'): expected a tie"),
        (("a", "b"), "'a': expected a tie"),
        ([3], "3: expected a tie"),
    ],
)
def test_a_contradiction_is_refused_with_its_names(ties: Any, words: str) -> None:
    with pytest.raises(TieError) as caught:
        declared_ties(declaring(ties))
    assert words in caught.value.message
    assert caught.value.help


# --- wrappers --------------------------------------------------------------------------------------------------------


def test_a_compiled_model_declares_its_ties_once_by_the_names_that_it_has() -> None:
    compiled = torch.compile(tied(TinyLM()), backend="eager")
    assert declared_ties(compiled) == (Tie("_orig_mod.head.weight", "_orig_mod.emb.weight"),)  # type: ignore[arg-type]
    assert check_ties(compiled)  # type: ignore[arg-type]


def test_a_wrapper_that_forwards_attributes_declares_nothing_of_its_own() -> None:
    """As peft's models, FSDP's and Lightning's do."""

    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

    assert declared_ties(Wrapper(TinyLM())) == (Tie("inner.head.weight", "inner.emb.weight"),)
    keys = {"head.weight": "emb.weight"}
    assert declared_ties(Wrapper(pretrained(keys))) == (Tie("inner.head.weight", "inner.emb.weight"),)


# --- the flag --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("flag", "count"), [(True, 1), (False, 0), (None, 1)])
def test_ties_hold_unless_the_modules_own_config_says_false(flag: bool | None, count: int) -> None:
    model = TinyLM()
    model.config = SimpleNamespace() if flag is None else SimpleNamespace(tie_word_embeddings=flag)  # type: ignore[assignment]
    assert len(declared_ties(model)) == count


def test_a_config_may_be_a_dict() -> None:
    model = TinyLM()
    model.config = {"tie_word_embeddings": False}  # type: ignore[assignment]
    assert declared_ties(model) == ()


def test_each_level_asks_its_own_flag() -> None:
    outer = nn.Module()
    outer.config = SimpleNamespace(tie_word_embeddings=False)  # type: ignore[assignment]
    outer.yes, outer.no = Flagged(True), Flagged(False)
    assert declared_ties(outer) == (Tie("yes.head.weight", "yes.emb.weight"),)


def test_flag_answers_in_every_configs_place() -> None:
    outer = nn.ModuleDict({"yes": Flagged(True), "no": Flagged(False), "none": TinyLM()})
    assert [tie.target for tie in declared_ties(outer, flag=True)] == [
        f"{n}.head.weight" for n in ("yes", "no", "none")
    ]
    assert declared_ties(outer, flag=False) == ()


def test_asking_changes_nothing() -> None:
    model = Flagged(False)
    before = copy.deepcopy(model.state_dict())
    declared_ties(model, flag=True)
    assert model.config.tie_word_embeddings is False
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


# --- transformers 5: a mapping ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("flag", "count"), [(True, 1), (False, 0), (None, 0)])
def test_a_mapping_needs_a_true_flag(flag: bool | None, count: int) -> None:
    assert len(declared_ties(pretrained({"head.weight": "emb.weight"}, flag))) == count


def test_a_mapping_on_a_module_without_a_config_ties_nothing() -> None:
    model = pretrained({"head.weight": "emb.weight"})
    del model.config
    assert declared_ties(model) == ()
    assert declared_ties(model, flag=True) == (HEAD,)


class Heads(nn.Module):
    """What a DETR has: one head, repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.box = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.kept = nn.Linear(3, 3)


def test_a_pattern_ties_each_name_that_it_matches() -> None:
    model = pretrained({r"box.(?![0])\d+": "box.0"}, base=Heads)
    assert declared_ties(model) == tuple(
        Tie(f"box.{at}.{end}", f"box.0.{end}") for at in (1, 2) for end in ("bias", "weight")
    )


def test_a_module_prefix_ties_all_that_is_in_it() -> None:
    model = pretrained({"kept": "box.0"}, base=Heads)
    assert declared_ties(model) == (Tie("kept.bias", "box.0.bias"), Tie("kept.weight", "box.0.weight"))


def test_a_pattern_is_matched_within_its_module() -> None:
    outer = nn.ModuleDict({"a": pretrained({"kept": "box.0"}, base=Heads), "kept": nn.Linear(3, 3)})
    assert declared_ties(outer) == (Tie("a.kept.bias", "a.box.0.bias"), Tie("a.kept.weight", "a.box.0.weight"))


@pytest.mark.parametrize("keys", [{"nothing.": "box.0"}, {"kept": "nothing."}, {"box.0.weight$": "kept"}])
def test_a_pattern_that_fits_nothing_is_refused(keys: dict[str, str]) -> None:
    with pytest.raises(TieError, match=r"targets and \d sources match"):
        declared_ties(pretrained(keys, base=Heads))


# --- transformers 4: a list ------------------------------------------------------------------------------------------


def with_table(self: TinyLM) -> nn.Module:
    return self.emb


@pytest.mark.parametrize("keys", [["head.weight"], ("head.weight",), {"head.weight"}, [r"head\..*"]])
def test_a_listed_weight_borrows_the_input_embedding(keys: Any) -> None:
    assert declared_ties(pretrained(keys, get_input_embeddings=with_table)) == (HEAD,)


def test_a_listed_name_that_is_shared_borrows_what_it_is() -> None:
    assert declared_ties(tied(pretrained(["head.weight"]))) == (HEAD,)


def test_a_listed_bias_borrows_the_one_outside_whatever_the_flag_says() -> None:
    keys = ["decoder.weight", "decoder.bias"]
    weight, bias = Tie("decoder.weight", "emb.weight"), Tie("decoder.bias", "bias")
    given: dict[str, Any] = {"base": BertLike, "get_input_embeddings": with_table}
    assert set(declared_ties(pretrained(keys, True, **given))) == {weight, bias}
    assert set(declared_ties(pretrained(keys, False, **given))) == {bias}


def test_a_list_asks_the_text_decoders_flag_and_true_where_nobody_says() -> None:
    model = pretrained(["head.weight"], None, get_input_embeddings=with_table)
    assert declared_ties(model) == (HEAD,)
    text = SimpleNamespace(tie_word_embeddings=False)
    model.config = SimpleNamespace(tie_word_embeddings=True, get_text_config=lambda decoder: text)
    assert declared_ties(model) == ()
    assert declared_ties(model, flag=True) == (HEAD,)


def test_a_listed_target_without_a_source_is_left_out() -> None:
    assert declared_ties(pretrained(["head.weight"])) == ()
    assert declared_ties(pretrained(["no.such.weight"], get_input_embeddings=with_table)) == ()


def test_a_listed_target_of_another_size_than_the_table_is_left_out() -> None:
    model = pretrained(["head.weight"], get_input_embeddings=with_table)
    model.head = nn.Linear(4, 3, bias=False)
    assert declared_ties(model) == ()
