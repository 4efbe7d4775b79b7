"""From a config and the names in a file to a declaration: whatever the config is, a declaration and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bowline.families import Declaration, resolve
from bowline.families.resolver import stated_levels
from bowline.families.transformers_table import Table
from bowline.tie import Tie

FLAG, TEXT = "tie_word_embeddings", "text_config.tie_word_embeddings"
GPT2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 64, "n_embd": 8}
LLAVA = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
TABLE = (64, 8)


def gate(*paths: str, default: bool = False, **more: object) -> dict[str, object]:
    return {"paths": list(paths), "default": default, **more}


def declared(*ties: tuple[str, str, dict[str, object]], **more: object) -> dict[str, object]:
    return {
        "ties": [{"target": target, "source": source, "gate": decided} for target, source, decided in ties],
        "embedding": "model.wte.weight",
        "head": "head.weight",
        "vocabulary": {"model.wte.weight": 0, "head.weight": 0, "head.bias": 0},
        "module_names": {},
        **more,
    }


def toy(four: object, five: object, prefix: str = "model") -> Table:
    return Table(
        {
            "transformers": {"4": "4.57.1", "5": "5.23.0"},
            "families": {"toy": {"vocab_size": "vocab_size", "hidden_size": "sizes.hidden", "flags": {}}},
            "classes": {"ToyLMHeadModel": {"family": "toy", "prefix": prefix, "4": four, "5": five}},
        }
    )


TOY = {"architectures": ["ToyLMHeadModel"], "model_type": "toy", "vocab_size": 64}
HEAD_ON_WTE = ("head.weight", "model.wte.weight")


def resolve_toy(
    four: object, five: object, config: dict[str, Any] | None = None, **shapes: tuple[int, ...]
) -> Declaration:
    return resolve({**TOY, **(config or {})}, shapes or {"model.wte.weight": TABLE}, toy(four, five))


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ("transformer.wte.weight", "transformer.wte.weight"),  # as GPT2LMHeadModel writes it
        ("wte.weight", "wte.weight"),  # as openai-community/gpt2 stores it: the prefix is gone
        ("other.weight", "transformer.wte.weight"),  # not there: as the class would write it
    ],
)
def test_a_name_is_spelled_as_the_file_spells_it(stored: str, expected: str) -> None:
    declaration = resolve(GPT2, {stored: TABLE})
    assert declaration.embedding == expected
    assert [declared.tie for declared in declaration.ties] == [Tie("lm_head.weight", expected)]


def test_a_name_whose_prefix_was_added_is_found() -> None:
    declaration = resolve(
        {"architectures": ["BertModel"], "model_type": "bert"}, {"bert.embeddings.word_embeddings.weight": TABLE}
    )
    assert declaration.embedding == "bert.embeddings.word_embeddings.weight"


def test_a_name_as_the_module_is_called_is_found() -> None:
    names = {"model.wte.weight": "renamed.wte.weight"}
    one = declared((*HEAD_ON_WTE, gate()), module_names=names)
    declaration = resolve(TOY, {"renamed.wte.weight": TABLE}, toy("=", one))
    assert declaration.ties[0].tie == Tie("head.weight", "renamed.wte.weight")


def test_a_name_of_the_older_version_is_found() -> None:
    old = declared((*HEAD_ON_WTE, gate()), module_names={"model.wte.weight": "old.wte.weight"})
    declaration = resolve(TOY, {"old.wte.weight": TABLE}, toy(old, declared((*HEAD_ON_WTE, gate()))))
    assert declaration.embedding == "old.wte.weight"


def test_the_name_as_it_is_written_comes_before_any_other_spelling() -> None:
    assert resolve(GPT2, {"wte.weight": TABLE, "transformer.wte.weight": TABLE}).embedding == "transformer.wte.weight"


def test_vocabulary_lists_what_the_file_holds_by_its_own_names() -> None:
    assert resolve(GPT2, {"wte.weight": TABLE, "h.0.weight": TABLE}).vocabulary == {"wte.weight": 0}


def test_sizes_are_found_where_the_family_keeps_them() -> None:
    declaration = resolve_toy("=", declared((*HEAD_ON_WTE, gate())), {"sizes": {"hidden": 8}})
    assert declaration.vocab_size is not None
    assert declaration.hidden_size is not None
    assert (declaration.vocab_size.path, declaration.vocab_size.value) == ("vocab_size", 64)
    assert (declaration.hidden_size.path, declaration.hidden_size.value) == ("sizes.hidden", 8)


@pytest.mark.parametrize("odd", ["64", 64.0, True, None, [64], {}])
def test_a_size_that_is_no_whole_number_is_none(odd: object) -> None:
    assert resolve({**GPT2, "vocab_size": odd}, {"wte.weight": TABLE}).vocab_size is None


# --- flags ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [True, False])
def test_a_stated_flag_is_the_flag_and_its_path_is_named(value: bool) -> None:
    declaration = resolve({**GPT2, FLAG: value}, {"wte.weight": TABLE})
    (tie,) = declaration.ties
    assert (declaration.flag.value, declaration.flag.path) == (value, FLAG)
    assert tie.flag == declaration.flag
    assert tie.asked == {"transformers-4": value, "transformers-5": value}
    assert tie.paths == (FLAG,)
    assert declaration.made == dict.fromkeys(("transformers-4", "transformers-5"), (tie.tie,) if value else ())


def test_an_absent_flag_is_the_default() -> None:
    declaration = resolve(GPT2, {"wte.weight": TABLE})
    assert (declaration.flag.value, declaration.flag.path, str(declaration.flag)) == (
        True,
        None,
        "tie_word_embeddings is absent (default true)",
    )


def test_an_absent_flag_whose_defaults_differ_is_open() -> None:
    declaration = resolve_toy(
        declared((*HEAD_ON_WTE, gate(FLAG, default=False))), declared((*HEAD_ON_WTE, gate(FLAG, default=True)))
    )
    assert (declaration.flag.value, str(declaration.flag)) == (None, "tie_word_embeddings is absent")
    assert declaration.ties[0].asked == {"transformers-4": False, "transformers-5": True}


def test_versions_that_ask_different_levels_each_get_their_own_answer() -> None:
    four, five = declared((*HEAD_ON_WTE, gate(TEXT))), declared((*HEAD_ON_WTE, gate(FLAG)))
    declaration = resolve_toy(four, five, {FLAG: True, "text_config": {FLAG: False}})
    assert declaration.ties[0].asked == {"transformers-4": False, "transformers-5": True}
    assert (declaration.flag.value, declaration.flag.path) == (True, FLAG)  # the newest version's
    assert set(declaration.ties[0].paths) == {FLAG, TEXT}
    assert declaration.levels == {FLAG: True, TEXT: False}


def test_a_level_that_only_the_older_version_asks_is_still_stated() -> None:
    four, five = declared((*HEAD_ON_WTE, gate(TEXT))), declared((*HEAD_ON_WTE, gate(FLAG)))
    declaration = resolve_toy(four, five, {"text_config": {FLAG: True}})
    assert (declaration.flag.value, declaration.flag.path) == (True, TEXT)


def test_a_version_that_ties_whatever_the_config_says_does_not_speak_for_the_flag() -> None:
    four, five = declared((*HEAD_ON_WTE, gate(default=True))), declared((*HEAD_ON_WTE, gate(FLAG, default=False)))
    declaration = resolve_toy(four, five)
    assert declaration.flag.value is False
    assert declaration.ties[0].unconditional == {"transformers-4"}
    assert declaration.ties[0].asked == {"transformers-4": True, "transformers-5": False}


def test_the_flag_of_the_head_speaks_for_the_model_and_not_that_of_another_tie() -> None:
    ties = (("a.bias", "b.bias", gate(default=True)), (*HEAD_ON_WTE, gate(FLAG)))
    declaration = resolve_toy("=", declared(*ties), {FLAG: False})
    assert (declaration.flag.value, declaration.flag.path) == (False, FLAG)
    assert [tie.tie.target for tie in declaration.ties] == ["head.weight", "a.bias"]


def test_a_class_without_ties_still_says_what_its_config_states() -> None:
    declaration = resolve(
        {"architectures": ["BertModel"], "model_type": "bert", FLAG: True}, {"embeddings.word_embeddings.weight": TABLE}
    )
    assert declaration.ties == ()
    assert (declaration.flag.value, declaration.flag.path) == (True, FLAG)


def test_a_tensor_can_be_longer_than_the_vocabulary_or_follow_another_size() -> None:
    one = declared(
        (*HEAD_ON_WTE, gate(FLAG)), longer={"head.weight": 2}, other_vocabularies={"codes": {"code.weight": 1}}
    )
    shapes = {"model.wte.weight": (64, 8), "head.weight": (66, 8), "code.weight": (8, 32), "head.bias": (64,)}
    declaration = resolve_toy("=", one, {"codes": 32}, **shapes)
    assert declaration.vocabulary == {"model.wte.weight": 0, "head.weight": 0, "head.bias": 0, "code.weight": 1}
    lengths = {"model.wte.weight": 64, "head.weight": 66, "head.bias": 64, "code.weight": 32}
    assert declaration.expected_lengths == {"transformers-4": lengths, "transformers-5": lengths}


def test_each_version_has_lengths_of_its_own() -> None:
    four, five = declared((*HEAD_ON_WTE, gate(FLAG)), longer={"head.bias": 1}), declared((*HEAD_ON_WTE, gate(FLAG)))
    lengths = resolve_toy(four, five).expected_lengths
    assert (lengths["transformers-4"]["head.bias"], lengths["transformers-5"]["head.bias"]) == (65, 64)


def test_a_tie_that_keeps_its_target_is_made_the_other_way_round_where_the_target_is_stored() -> None:
    one = declared((*HEAD_ON_WTE, gate(FLAG)))
    one["ties"][0]["owner"] = "target"  # type: ignore[index]
    target, source = HEAD_ON_WTE
    both = resolve_toy("=", one, {FLAG: True}, **{source: TABLE, target: TABLE})
    assert both.ties[0].tie == Tie(target, source)
    assert both.made["transformers-5"] == (Tie(source, target),)
    alone = resolve_toy("=", one, {FLAG: True}, **{source: TABLE})
    assert alone.made["transformers-5"] == (Tie(target, source),)


# --- versions -------------------------------------------------------------------------------------------------------


def test_a_tie_is_listed_once_however_many_versions_declare_it() -> None:
    one = declared((*HEAD_ON_WTE, gate(FLAG)))
    assert len(resolve_toy(one, dict(one)).ties) == 1


def test_a_class_of_one_version_is_asked_by_that_one_alone() -> None:
    declaration = resolve_toy(declared((*HEAD_ON_WTE, gate(FLAG))), None)
    assert declaration.loaders == {"transformers-4"}
    assert declaration.ties[0].asked == {"transformers-4": False}


def test_a_target_with_another_owner_in_each_version_is_listed_once_and_made_as_each_makes_it() -> None:
    four = declared(("head.weight", "model.encoder.weight", gate(FLAG)))
    five = declared(("head.weight", "model.decoder.weight", gate(FLAG)))
    declaration = resolve_toy(four, five, {FLAG: True})
    assert [tie.tie for tie in declaration.ties] == [Tie("head.weight", "model.decoder.weight")]
    assert declaration.made["transformers-4"] == (Tie("head.weight", "model.encoder.weight"),)
    assert declaration.made["transformers-5"] == (Tie("head.weight", "model.decoder.weight"),)


def test_a_tie_that_an_older_version_hangs_the_other_way_round_is_listed_once() -> None:
    four, five = declared(("b", "a", gate(FLAG))), declared(("a", "b", gate(FLAG)))
    declaration = resolve_toy(four, five, {FLAG: True})
    assert [tie.tie for tie in declaration.ties] == [Tie("a", "b")]
    assert declaration.ties[0].asked == {"transformers-4": True, "transformers-5": True}
    assert declaration.made["transformers-4"] == (Tie("b", "a"),)


@pytest.mark.parametrize(("shared", "owner"), [(True, "c"), (False, "b")])
def test_a_tie_is_listed_with_the_owner_at_the_end_of_the_chain_that_is_made(shared: bool, owner: str) -> None:
    chain = declared(("a", "b", gate(FLAG)), ("b", "c", gate("share")))
    declaration = resolve_toy("=", chain, {FLAG: True, "share": shared})
    assert [tie.tie for tie in declaration.ties] == [Tie("a", owner), Tie("b", "c")]


def test_two_names_that_the_file_spells_alike_are_no_tie() -> None:
    one = declared(("model.head.weight", "head.weight", gate(FLAG)))
    assert resolve_toy("=", one, {FLAG: True}, **{"head.weight": TABLE}).ties == ()


# --- classes that are not stated, or not known ----------------------------------------------------------------------


def test_a_family_without_a_class_is_read_as_its_class_that_fits_the_file_best() -> None:
    declaration = resolve({"model_type": "gpt2", FLAG: True}, {"transformer.wte.weight": TABLE})
    assert declaration.inferred
    assert declaration.family == "gpt2"
    assert declaration.ties[0].tie == Tie("lm_head.weight", "transformer.wte.weight")


def test_an_unknown_class_is_inferred_even_of_a_known_family() -> None:
    declaration = resolve(
        {"architectures": ["MyGPT2"], "model_type": "gpt2"}, {"wte.weight": TABLE, "lm_head.weight": TABLE}
    )
    assert (declaration.inferred, declaration.architecture, declaration.family) == (True, "MyGPT2", "gpt2")
    assert declaration.ties[0].tie == Tie("lm_head.weight", "wte.weight")


def test_an_inferred_flag_is_the_outermost_that_is_stated() -> None:
    config = {"architectures": ["MyModelForCausalLM"], "text_config": {FLAG: True}}
    declaration = resolve(config, {"wte.weight": TABLE})
    assert (declaration.flag.value, declaration.flag.path) == (True, TEXT)
    assert declaration.ties[0].asked == {"transformers-4": True, "transformers-5": True}


def test_an_inferred_flag_that_is_absent_is_the_base_configs_default_of_each_version() -> None:
    declaration = resolve({"architectures": ["MyModelForCausalLM"]}, {"wte.weight": TABLE})
    assert declaration.flag.value is None
    assert declaration.ties[0].asked == {"transformers-4": True, "transformers-5": False}


@pytest.mark.parametrize("config", [None, {}])
def test_no_config_at_all_is_inferred(config: dict[str, Any] | None) -> None:
    declaration = resolve(config, {"wte.weight": TABLE, "lm_head.weight": TABLE})
    assert (declaration.inferred, declaration.architecture, declaration.family) == (True, None, None)
    assert declaration.embedding == "wte.weight"


# --- hostile configs ------------------------------------------------------------------------------------------------


def deep(levels: int) -> dict[str, Any]:
    config: dict[str, Any] = {FLAG: True}
    for _ in range(levels):
        config = {"text_config": config, FLAG: False}
    return config


@pytest.mark.parametrize(
    "stated",
    [
        None,
        "GPT2LMHeadModel",
        [],
        [None],
        [["GPT2LMHeadModel"]],
        [{}],
        [1],
        {},
        {"0": "GPT2LMHeadModel"},
        [""],
        7,
        True,
    ],
)
def test_architectures_that_name_no_class_are_no_class(stated: object) -> None:
    declaration = resolve({"architectures": stated}, {"wte.weight": TABLE, "lm_head.weight": TABLE})
    assert declaration.inferred
    assert declaration.architecture in (None, "")


@pytest.mark.parametrize("model_type", [None, 1, [], {}, ["gpt2"], "", "no such family", "\0"])
def test_a_model_type_that_is_no_family_is_no_family(model_type: object) -> None:
    assert resolve({"model_type": model_type}, {"wte.weight": TABLE}).inferred


def test_a_config_as_deep_as_json_may_be_is_read_to_a_bounded_depth() -> None:
    levels = stated_levels(deep(100))
    assert 1 < len(levels) < 20
    assert next(iter(levels)) == FLAG


def test_levels_come_outermost_first() -> None:
    config = {"a": {FLAG: True, "b": {FLAG: False}}, FLAG: False}
    assert list(stated_levels(config)) == [FLAG, f"a.{FLAG}", f"a.b.{FLAG}"]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["GPT2LMHeadModel", "gpt2", "llava", "LlavaForConditionalGeneration"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [FLAG, "text_config", "architectures", "model_type", "vocab_size", "hidden_size", "n_embd", "", "a.b"]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=15,
)
KEYS = st.sampled_from(
    [FLAG, "text_config", "architectures", "model_type", "vocab_size", "n_vocab", "hidden_size", "n_embd"]
)
SHAPES = st.dictionaries(
    st.sampled_from(
        ["transformer.wte.weight", "wte.weight", "lm_head.weight", "lm_head.bias", "model.embed_tokens.weight", "", "x"]
    ),
    st.lists(st.sampled_from([0, 1, 8, 64, 2**40]), max_size=4).map(tuple),
    max_size=5,
)


@settings(max_examples=300)
@given(st.dictionaries(KEYS, JSON, max_size=6), SHAPES)
@example({"architectures": ["LlavaForConditionalGeneration"], "text_config": [1]}, {})
@example({"architectures": ["GPT2LMHeadModel"], "vocab_size": 10**300, FLAG: {"a": 1}}, {"wte.weight": ()})
@example(deep(100), {"wte.weight": TABLE})
def test_whatever_a_config_is_a_declaration_comes_of_it(
    config: dict[str, Any], shapes: dict[str, tuple[int, ...]]
) -> None:
    declaration = resolve(config, shapes)
    assert set(declaration.vocabulary) <= set(shapes)
    assert len({tie.tie.target for tie in declaration.ties}) == len(declaration.ties)
    for tie in declaration.ties:
        assert tie.tie.target != tie.tie.source
        assert all(isinstance(value, bool) for value in tie.asked.values())
    assert declaration.flag.value in (True, False, None)
    assert all(isinstance(value, bool) for value in declaration.levels.values())
    for size in (declaration.vocab_size, declaration.hidden_size):
        assert size is None or type(size.value) is int
