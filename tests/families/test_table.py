"""The table: gates that decide as configs do, classes parsed one at a time, and data that is sound throughout."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from bowline.families.transformers_table import ABSENT as NOT_THERE
from bowline.families.transformers_table import (
    LOADER_VERSIONS,
    ArchitectureFacts,
    DeclaredGate,
    Gate,
    Table,
    load_table,
    lookup,
)
from bowline.tie import Tie

FLAG, TEXT = "tie_word_embeddings", "text_config.tie_word_embeddings"


def config(top: bool | None, text: bool | None) -> dict[str, Any]:
    stated: dict[str, Any] = {"text_config": {}}
    if top is not None:
        stated[FLAG] = top
    if text is not None:
        stated["text_config"][FLAG] = text
    return stated


# --- gates ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("default", [True, False])
def test_a_gate_without_paths_is_always_its_default(default: bool) -> None:
    gate = Gate(paths=(), default=default)
    assert gate.decide(config(not default, not default)) == (default, None)


@pytest.mark.parametrize("default", [True, False])
def test_a_gate_with_one_path_is_that_key_or_the_default(default: bool) -> None:
    gate = Gate(paths=(TEXT,), default=default)
    assert gate.decide(config(None, True)) == (True, TEXT)
    assert gate.decide(config(True, False)) == (False, TEXT)
    assert gate.decide(config(not default, None)) == (default, None)


@pytest.mark.parametrize(
    ("rule", "top", "text", "expected"),
    [
        ("first", True, False, (True, FLAG)),
        ("first", False, True, (False, FLAG)),
        ("first", None, True, (True, TEXT)),
        ("any", False, True, (True, TEXT)),
        ("any", True, True, (True, FLAG)),
        ("any", False, False, (False, FLAG)),
        ("any", None, False, (False, TEXT)),
        ("all", True, False, (False, TEXT)),
        ("all", False, False, (False, FLAG)),
        ("all", True, True, (True, FLAG)),
        ("all", None, True, (True, TEXT)),
    ],
)
def test_several_paths_combine_by_their_rule_and_the_deciding_one_is_named(
    rule: str, top: bool | None, text: bool | None, expected: tuple[bool, str]
) -> None:
    for default in (True, False):
        assert Gate(paths=(FLAG, TEXT), default=default, rule=rule).decide(config(top, text)) == expected


def test_a_rule_that_fits_no_word_is_a_table() -> None:
    cells = {"TF": False, "FT": True, "T-": False, "-F": True}
    gate = Gate(paths=(FLAG, TEXT), default=True, rule="table", table=cells)
    for top, text in product((True, False, None), repeat=2):
        key = "".join("-" if value is None else "T" if value else "F" for value in (top, text))
        value, path = gate.decide(config(top, text))
        if key == "--":
            assert (value, path) == (True, None)
        elif key in cells:
            assert value is cells[key]
        assert (path is None) == (key == "--")


@pytest.mark.parametrize("odd", [0, 1, "", "false", None, [], {}])
def test_a_flag_that_is_no_boolean_counts_as_python_counts_it(odd: object) -> None:
    assert Gate(paths=(FLAG,), default=True).decide({FLAG: odd}) == (bool(odd), FLAG)


def test_a_config_without_a_text_config_can_have_a_gate_of_its_own() -> None:
    nested, flat = Gate(paths=(TEXT,), default=False), Gate(paths=(FLAG,), default=True)
    gated = DeclaredGate(tie=Tie("head.weight", "wte.weight"), gate=nested, flat=flat)
    assert gated.gate_in(config(None, None)) is nested
    assert gated.gate_in({FLAG: True}) is flat
    assert DeclaredGate(tie=gated.tie, gate=nested).gate_in({}) is nested


# --- look-ups -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a", {"b": {"c": None}}),
        ("a.b.c", None),
        ("a.b.d", NOT_THERE),
        ("x", NOT_THERE),
        ("a.b.c.d", NOT_THERE),
        ("l.0", NOT_THERE),
    ],
)
def test_a_dotted_path_leads_through_objects_only(path: str, expected: object) -> None:
    assert lookup({"a": {"b": {"c": None}}, "l": ["0"]}, path) == expected


# --- a table by hand ------------------------------------------------------------------------------------------------

DECLARED = {
    "ties": [{"target": "head.weight", "source": "wte.weight", "gate": {"paths": [FLAG], "default": True}}],
    "embedding": "wte.weight",
    "head": "head.weight",
    "vocabulary": {"wte.weight": 0, "head.weight": 0},
}
BY_HAND = Table(
    {
        "transformers": {"4": "4.57.1", "5": "5.23.0"},
        "families": {"toy": {"vocab_size": "vocab_size", "hidden_size": None, "flags": {"5": {FLAG: True}}}},
        "classes": {
            "ToyLMHeadModel": {"family": "toy", "prefix": "", "4": "=", "5": DECLARED},
            "OldToyLMHeadModel": {"family": "toy", "prefix": "", "4": DECLARED, "5": None},
            "NewToyLMHeadModel": {"family": "toy", "prefix": "", "4": None, "5": DECLARED},
        },
    }
)


@pytest.mark.parametrize(
    ("name", "loaders"),
    [
        ("ToyLMHeadModel", {"transformers-4", "transformers-5"}),
        ("OldToyLMHeadModel", {"transformers-4"}),
        ("NewToyLMHeadModel", {"transformers-5"}),
    ],
)
def test_a_class_is_declared_by_the_versions_that_have_it(name: str, loaders: set[str]) -> None:
    architecture = BY_HAND.architecture(name)
    assert architecture is not None
    assert set(architecture.declared) == loaders
    assert architecture.newest is architecture.declared[max(loaders)]
    assert architecture.newest.module_names == {}


def test_what_is_not_in_the_table_is_none() -> None:
    assert BY_HAND.architecture("Other") is None
    assert BY_HAND.family("other") is None
    assert BY_HAND.architectures_of("other") == ()


def test_a_family_knows_its_classes_and_its_sizes() -> None:
    family = BY_HAND.family("toy")
    assert family is not None
    assert (family.vocab_size, family.hidden_size) == ("vocab_size", None)
    assert family.flags == {"transformers-4": {}, "transformers-5": {FLAG: True}}
    assert BY_HAND.architectures_of("toy") == ("ToyLMHeadModel", "OldToyLMHeadModel", "NewToyLMHeadModel")
    assert list(BY_HAND) == ["ToyLMHeadModel", "OldToyLMHeadModel", "NewToyLMHeadModel"]


# --- the table of this release --------------------------------------------------------------------------------------


def every_class() -> Iterator[ArchitectureFacts]:
    table = load_table()
    for name in table:
        architecture = table.architecture(name)
        assert architecture is not None
        yield architecture


def test_the_table_is_of_the_versions_that_the_design_names() -> None:
    assert load_table().versions == {"transformers-4": "4.57.1", "transformers-5": "5.23.0"}
    assert set(LOADER_VERSIONS) == set(load_table().versions)


def test_every_class_can_be_parsed_and_is_known_to_some_version() -> None:
    assert all(architecture.declared for architecture in every_class())


def test_every_tie_is_between_two_names_and_its_gate_can_be_decided() -> None:
    for architecture in every_class():
        for declared in architecture.declared.values():
            for gated in declared.ties:
                assert gated.tie.target != gated.tie.source, architecture.name
                for gate in filter(None, (gated.gate, gated.flat)):
                    assert gate.rule in ("first", "any", "all", "table"), architecture.name
                    assert gate.rule == "first" or len(gate.paths) > 1, architecture.name
                    assert gate.decide({}) == (gate.default, None)


def test_every_embedding_and_head_is_a_vocabulary_tensor() -> None:
    for architecture in every_class():
        for declared in architecture.declared.values():
            named = {name for name in (declared.embedding, declared.head) if name}
            lengthy = set(declared.vocabulary).union(*declared.other_vocabularies.values())
            assert all(axis >= 0 for axis in declared.vocabulary.values()), architecture.name
            assert named <= lengthy or not declared.ties, architecture.name


@pytest.mark.parametrize(
    ("name", "target", "source", "default"),
    [
        ("GPT2LMHeadModel", "lm_head.weight", "transformer.wte.weight", True),
        ("LlamaForCausalLM", "lm_head.weight", "model.embed_tokens.weight", False),
        ("BartForConditionalGeneration", "lm_head.weight", "model.shared.weight", True),
        ("BertForMaskedLM", "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight", True),
    ],
)
def test_the_families_that_people_use_are_as_their_sources_say(
    name: str, target: str, source: str, default: bool
) -> None:
    architecture = load_table().architecture(name)
    assert architecture is not None
    for declared in architecture.declared.values():
        ties = {gated.tie.target: (gated.tie.source, gated.gate) for gated in declared.ties}
        assert ties[target][0] == source
        assert (ties[target][1].paths, ties[target][1].default) == ((FLAG,), default)
