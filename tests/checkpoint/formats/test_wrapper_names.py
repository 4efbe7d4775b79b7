"""The parts that wrappers add to tensor names: which are found, and what stripping them gives."""

from __future__ import annotations

import pytest

from bowline.checkpoint.formats.wrapper_names import WRAPPERS, added_parts, strip_name

EMBEDDING, HEAD, LAYER = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.up_proj.weight"
OWN = (EMBEDDING, HEAD)


def parts(*names: str, own: tuple[str, ...] = OWN, prefix: str = "model.") -> dict[str, int]:
    return {part.text: len(part.names) for part in added_parts(names, own, prefix)}


@pytest.mark.parametrize("word", WRAPPERS)
def test_a_wrappers_segment_is_found_at_the_front_and_in_the_middle(word: str) -> None:
    middle = LAYER.replace("mlp.", f"{word}.mlp.")
    assert parts(EMBEDDING, middle) == {f"{word}.": 1}
    assert parts(f"{word}.{EMBEDDING}", f"{word}.{LAYER}") == {f"{word}.": 2}
    assert strip_name(middle, [word]) == strip_name(middle, [f"{word}."]) == LAYER


def test_wrappers_in_each_other_are_found_both() -> None:
    inside = "model.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.mlp.weight"
    assert parts(EMBEDDING, inside) == {"_fsdp_wrapped_module.": 1, "_checkpoint_wrapped_module.": 1}


def test_a_prefix_is_what_stands_before_a_name_that_is_missing() -> None:
    assert parts(f"net.{EMBEDDING}", f"net.{LAYER}") == {"net.": 2}
    assert parts(f"base_model.model.{EMBEDDING}") == {"base_model.model.": 1}
    assert parts(EMBEDDING, f"teacher.{EMBEDDING}") == {}  # the model's own is stored, the other is surplus


def test_the_prefix_that_a_loader_adds_or_removes_itself_is_none() -> None:
    assert parts("embed_tokens.weight", "layers.0.mlp.weight") == {}
    assert parts(f"model.{EMBEDDING}", f"model.{LAYER}") == {}
    assert parts("net.embed_tokens.weight") == {"net.": 1}


def test_a_segment_that_the_model_itself_has_is_no_wrappers() -> None:
    assert parts("stages.0.module.fc.weight", own=("stages.0.module.fc.weight",)) == {}


def test_a_prefix_is_stripped_once_and_only_at_the_front() -> None:
    assert strip_name("model.model.weight", ["model"]) == "model.weight"
    assert strip_name("a.model.weight", ["model"]) == "a.model.weight"
    assert strip_name("modelling.weight", ["model"]) == "modelling.weight"
