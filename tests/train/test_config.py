"""What a run can be told: JSON in and out, and every contradiction said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bowline.errors import FormatError, UsageError
from bowline.models.auto import model_class
from bowline.train.model_building import CONFIGS
from bowline.train.presets import FAMILIES, SIZES, preset
from bowline.train.train_config import TrainConfig


@given(
    family=st.sampled_from(FAMILIES),
    size=st.sampled_from(SIZES),
    data=st.lists(st.text(min_size=1), min_size=1, max_size=3),
    steps=st.none() | st.integers(1, 10**6),
    seed=st.integers(0, 2**40),
    bf16=st.booleans(),
    tie=st.none() | st.booleans(),
    model=st.dictionaries(st.text(), st.integers() | st.booleans()),
)
def test_json_holds_all_of_it(**given_: Any) -> None:
    config = TrainConfig(**given_)
    again = TrainConfig.from_dict(json.loads(config.dumps()))
    assert again == config
    assert again.differences(json.loads(json.dumps(config.effective()))) == []


def test_what_is_not_given_is_the_sizes() -> None:
    config = TrainConfig(family="bert", size="base", steps=7)
    assert config.settings().steps == 7
    assert config.settings().learning_rate == preset("bert", "base").learning_rate
    assert config.value("length") == 512


def test_differences_are_named_with_both_values_but_for_what_changes_no_weight() -> None:
    before = TrainConfig(family="gpt2", seed=1, save_every=10, data=("a",)).effective()
    now = TrainConfig(family="gpt2", seed=2, save_every=20, learning_rate=0.1)
    assert now.differences(before) == [
        "data was ['a'] and is ['stdlib']",
        "learning_rate was 0.003 and is 0.1",
        "seed was 1 and is 2",
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"family": "gpt3"}, "family='gpt3': expected one of gpt2, bert, t5, lstm"),
        ({"size": "large"}, "size='large': expected one of nano, small, base"),
        ({"data": []}, "data="),
        ({"recipe": "transformers-gpt"}, "perhaps transformers-gpt2"),
        ({"vocab_size": 3}, "vocab_size=3: expected a whole number from 64"),
        ({"length": True}, "length=True"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"held_out_share": 1.0}, "held_out_share=1.0"),
        ({"mask_share": 0.0, "family": "bert"}, "mask_share=0.0"),
        ({"mask_share": 0.3}, "a gpt2 is trained without masking"),
        ({"mask_share": 0.99, "family": "t5"}, "mask_share=0.99: expected at most 0.9 of a t5's tokens"),
        ({"tie": "yes"}, "tie='yes': expected true or false"),
        ({"steps": 0}, "steps=0"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0"),
        ({"model": 3}, "model=3"),
        ({"tokenizer": "a", "vocab_size": 500}, "tokenizer and vocab_size"),
        ({"init_from": "a", "tokenizer": "b"}, "init_from and tokenizer"),
        ({"init_from": "a", "recipe": "t5x"}, "init_from and recipe"),
        ({"init_from": "a", "model": {"n_layer": 1}}, "init_from and model"),
        ({"untie_at_step": 5, "tie": False}, "there is no tie to undo"),
        ({"untie_at_step": 1000}, "expected fewer than the 1000 steps"),
        ({"head_bias": "unigram"}, "the head of a gpt2 has no bias"),
        ({"head_bias": "unigram", "family": "t5"}, "the head of a t5 has no bias"),
        ({"head_bias": "uniform", "family": "bert"}, "head_bias='uniform'"),
        ({"head_bias": "unigram", "family": "bert", "init_from": "a"}, "the checkpoint has a trained bias already"),
        ({"pad_logit": "mask"}, "a gpt2 is trained without padding"),
    ],
)
def test_what_means_nothing_or_contradicts_itself_is_an_error(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as error:
        TrainConfig(**{"family": "gpt2", **options})
    assert said in str(error.value)


def test_a_key_that_is_none_is_an_error_with_a_guess() -> None:
    with pytest.raises(UsageError, match=r"'learning-rate' is not a setting of a training run .*perhaps learning_rate"):
        TrainConfig.from_dict({"family": "gpt2", "learning-rate": 1})
    with pytest.raises(UsageError, match="no family"):
        TrainConfig.from_dict({"steps": 3})


def test_a_file_that_is_no_configuration_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        TrainConfig.read(tmp_path / "none.json")
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(UsageError, match="expected a JSON object, got a list"):
        TrainConfig.read(tmp_path / "a.json")
    (tmp_path / "b.json").write_text("{")
    with pytest.raises(FormatError):
        TrainConfig.read(tmp_path / "b.json")


@pytest.mark.parametrize(
    ("family", "size", "parameters"),
    [
        ("gpt2", "small", 124_439_808),
        ("gpt2", "base", 354_823_168),
        ("bert", "base", 109_514_298),
        ("t5", "small", 60_506_624),
        ("t5", "base", 222_903_552),
    ],
)
def test_published_sizes_have_the_published_number_of_parameters(family: str, size: str, parameters: int) -> None:
    one = preset(family, size)
    with torch.device("meta"):
        model = model_class({"model_type": family})(CONFIGS[family](vocab_size=one.vocab_size, **one.model))
    assert model.num_parameters() == parameters
