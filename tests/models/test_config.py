"""Configs: the Hub's keys read, checked, kept and written again."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bowline.errors import CheckpointError, ConfigError, UsageError
from bowline.models.gpt2 import GPT2Config, GPT2LMHeadModel

NAMES = {one.name for one in dataclasses.fields(GPT2Config)}
TINY: dict[str, Any] = {"vocab_size": 50, "n_positions": 20, "n_embd": 16, "n_layer": 2, "n_head": 4}
OURS = ("pad_logit", "embed_scale", "logit_scale")
"""Keys that transformers has not."""
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.text(min_size=1, max_size=12).filter(
    lambda key: key not in {*NAMES, *GPT2Config.attribute_map, "model_type", "id2label", "label2id", "torch_dtype"}
)


@st.composite
def contents(draw: st.DrawFn) -> dict[str, Any]:
    """What a `config.json` of a GPT-2 may hold, by either name of each key."""
    heads = draw(st.integers(1, 5))
    values = {
        "vocab_size": draw(st.integers(1, 10**6)),
        "n_head": heads,
        "n_embd": heads * draw(st.integers(1, 8)),
        "n_layer": draw(st.integers(1, 4)),
        "n_positions": draw(st.integers(1, 9)),
        "n_inner": draw(st.none() | st.integers(1, 9)),
        "attn_pdrop": draw(st.floats(0, 1)),
        "layer_norm_epsilon": draw(st.floats(0, 1)),
        "scale_attn_weights": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
        "eos_token_id": draw(st.none() | st.integers(0, 9) | st.lists(st.integers(0, 9), max_size=3)),
        "pruned_heads": {str(at): [0] for at in draw(st.sets(st.integers(0, 3), max_size=2))},
        "num_labels": draw(st.integers(1, 9)),
        "dtype": draw(st.none() | st.sampled_from(["float32", "bfloat16"])),
    }
    other = {name: alias for alias, name in GPT2Config.attribute_map.items()}
    renamed = {other.get(key, key) if draw(st.booleans()) else key: value for key, value in values.items()}
    return draw(st.dictionaries(KEYS, JSON, max_size=4)) | renamed


@settings(max_examples=100)
@given(contents())
def test_a_round_trip_by_way_of_json_keeps_every_key_known_or_not(content: dict[str, Any]) -> None:
    config = GPT2Config.from_dict(content)
    written = json.loads(json.dumps(config.to_dict()))
    assert GPT2Config.from_dict(written) == config
    for key, value in content.items():
        name = GPT2Config.attribute_map.get(key, key)
        default = {one.name: one.default for one in dataclasses.fields(GPT2Config)}.get(name)
        assert written.get(name, default if name != "pruned_heads" else {}) == value
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config


@settings(max_examples=100)
@given(st.dictionaries(st.sampled_from(sorted(NAMES)), JSON, max_size=4))
def test_whatever_a_file_holds_it_is_a_config_or_a_config_error(content: dict[str, Any]) -> None:
    try:
        config = GPT2Config.from_dict({**TINY, **content})
    except ConfigError as error:
        assert "config" in error.message
    else:
        assert GPT2Config.from_dict(config.to_dict()) == config


def test_a_config_of_transformers_goes_both_ways(tmp_path: Path, quiet_transformers: None) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GPT2Config(**TINY, activation_function="relu", pad_token_id=3, n_inner=7, id2label={0: "x"})
    theirs.save_pretrained(tmp_path)
    ours = GPT2Config.from_pretrained(tmp_path)
    assert ours.num_labels == 1
    ours.save_pretrained(tmp_path)
    back = transformers.GPT2Config.from_pretrained(tmp_path)
    assert back.to_dict() == theirs.to_dict()


def test_names_and_defaults_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    theirs, ours = transformers.GPT2Config(), GPT2Config()
    for one in dataclasses.fields(GPT2Config):
        if one.name not in (*OURS, "pruned_heads", "extra", "decoder_start_token_id"):
            assert getattr(ours, one.name) == getattr(theirs, one.name), one.name
    for alias in theirs.attribute_map:
        assert getattr(ours, alias) == getattr(theirs, alias)


def test_unknown_keys_are_attributes_too_and_go_with_every_copy() -> None:
    config = GPT2Config.from_dict({**TINY, "summary_type": "last", "task_specific_params": {"a": [1]}})
    assert config.summary_type == "last"
    assert dataclasses.replace(config, n_layer=3).extra == config.extra
    assert config.updated(summary_type="first").to_dict()["summary_type"] == "first"
    assert config.summary_type == "last"
    with pytest.raises(AttributeError, match="GPT2Config has no 'summary_kind'"):
        _ = config.summary_kind


def test_what_to_dict_returns_may_be_changed_and_the_config_is_not() -> None:
    config = GPT2Config.from_dict({**TINY, "deep": {"a": [1]}, "pruned_heads": {"0": [1]}})
    content = config.to_dict()
    content["deep"]["a"].append(2)
    content["pruned_heads"][0].append(2)
    assert config.deep == {"a": [1]}
    assert config.pruned_heads == {0: [1]}


def test_tuples_are_written_as_the_lists_that_they_are_read_as() -> None:
    assert GPT2Config(**TINY, eos_token_id=(1, 2)).to_dict()["eos_token_id"] == [1, 2]  # type: ignore[arg-type]


def test_a_key_of_a_file_has_no_say_in_how_its_config_is_copied() -> None:
    config = GPT2Config.from_dict({**TINY, "__deepcopy__": 1, "__setstate__": 2, "__getstate__": 3})
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config


def test_aliases_are_read_as_keys_and_as_attributes_and_in_updates() -> None:
    config = GPT2Config.from_dict({"vocab_size": 9, "hidden_size": 8, "num_attention_heads": 2})
    assert (config.n_embd, config.hidden_size, config.num_attention_heads) == (8, 8, 2)
    assert config.updated(hidden_size=4, num_hidden_layers=1).n_embd == 4
    assert "hidden_size" not in config.to_dict()


def test_one_key_under_two_names_must_agree() -> None:
    assert GPT2Config.from_dict({**TINY, "hidden_size": 16}).n_embd == 16
    with pytest.raises(ConfigError, match=r"16 and 32 as n_embd; hidden_size is another name"):
        GPT2Config.from_dict({**TINY, "hidden_size": 32})


def test_the_older_name_of_the_dtype_is_read_and_the_new_one_written() -> None:
    config = GPT2Config.from_dict({**TINY, "torch_dtype": "bfloat16"})
    assert config.dtype == "bfloat16"
    assert "torch_dtype" not in config.to_dict()
    assert config.to_dict()["dtype"] == "bfloat16"


def test_labels_names_of_another_head_are_not_written() -> None:
    config = GPT2Config.from_dict({**TINY, "id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": 0}})
    assert config.num_labels == 3
    assert "id2label" in config.to_dict()
    written = config.updated(num_labels=5).to_dict()
    assert written["num_labels"] == 5
    assert not {"id2label", "label2id"} & written.keys()


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("vocab_size", 0, "a whole number from 1"),
        ("vocab_size", None, "a whole number from 1"),
        ("vocab_size", True, "a whole number from 1"),
        ("n_embd", "16", "a whole number from 1"),
        ("n_layer", 2.0, "a whole number from 1"),
        ("n_head", -4, "a whole number from 1"),
        ("n_head", 3, "a multiple of n_head, which is 3"),
        ("n_inner", 0, "a whole number from 1"),
        ("tie_word_embeddings", 1, "true or false"),
        ("tie_word_embeddings", "false", "true or false"),
        ("pad_token_id", 50, "0 to 49, or null"),
        ("pad_token_id", -1, "0 to 49, or null"),
        ("pad_token_id", True, "0 to 49, or null"),
        ("bos_token_id", "1", "a whole number from 0, or null"),
        ("eos_token_id", [1, "2"], "a list of them, or null"),
        ("resid_pdrop", 1.5, "a number from 0 to 1"),
        ("resid_pdrop", "0.1", "a number from 0 to 1"),
        ("attn_pdrop", float("nan"), "a number from 0 to 1"),
        ("layer_norm_epsilon", "1e-5", "a number from 0"),
        ("initializer_range", -0.02, "a number from 0"),
        ("pad_logit", "zero", "'keep' or 'mask'"),
        ("pruned_heads", [1], "{layer: heads}"),
        ("pruned_heads", {"a": [1]}, "{layer: heads}"),
        ("pruned_heads", {"0": 1}, "{layer: heads}"),
    ],
)
def test_a_value_that_means_nothing_is_refused_by_name(key: str, value: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GPT2Config.from_dict({**TINY, key: value})
    assert expected in caught.value.message
    assert caught.value.message.startswith("config.")
    assert caught.value.help


def test_a_masked_padding_logit_needs_a_padding_token() -> None:
    with pytest.raises(ConfigError, match="pad_logit='mask' needs a pad_token_id"):
        GPT2Config(**TINY, pad_logit="mask")
    assert GPT2Config(**TINY, pad_logit="mask", pad_token_id=3).masked_ids == (3,)
    assert GPT2Config(**TINY, pad_token_id=3).masked_ids == ()


def test_what_is_not_built_is_refused_not_ignored() -> None:
    with pytest.raises(ConfigError, match="add_cross_attention is True"):
        GPT2Config.from_dict({**TINY, "add_cross_attention": True})
    assert GPT2Config.from_dict({**TINY, "add_cross_attention": False}).add_cross_attention is False


def test_it_is_frozen_and_takes_no_unknown_keyword() -> None:
    config = GPT2Config(**TINY)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.n_embd = 32  # type: ignore[misc]
    with pytest.raises(TypeError):
        GPT2Config(n_embed=32)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match=r"n_embed=32: GPT2Config has no such key.*perhaps.*n_embd"):
        config.updated(n_embed=32)
    with pytest.raises(ConfigError, match="n_embd is 18"):
        config.updated(n_embd=18)
    with pytest.raises(ConfigError, match="n_embd is 18"):
        dataclasses.replace(config, n_embd=18)


@pytest.mark.parametrize("text", [None, "", "[1]", "{", '{"vocab_size": 5, "vocab_size": 6}'])
def test_a_file_that_is_no_object_is_refused_with_its_place(tmp_path: Path, text: str | None) -> None:
    GPT2LMHeadModel(GPT2Config(**TINY)).save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises((CheckpointError, ConfigError), match=tmp_path.name):
        GPT2Config.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=tmp_path.name):
        GPT2LMHeadModel.from_pretrained(tmp_path)
