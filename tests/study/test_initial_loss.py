"""The first loss, predicted and measured: true vocabularies and widths, few layers, every pair of recipe and tie."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest

from bowline.errors import UsageError
from bowline.nn.init import init_weights, measure_loss
from bowline.recipes import RECIPES, expected_loss
from bowline.study.initial_loss import FAMILIES, LENGTH, compare, recipes_of
from tests.recipes.test_expected import MEASURED

transformers = pytest.importorskip("transformers")
initialization = pytest.importorskip("transformers.initialization")
LAYERS = 2
TRUE = {case: found for case, found in MEASURED.items() if case not in ("T5 scaled, 12 layers", "Gemma, 8 layers")}
DEPTHS = ("n_layer", "num_hidden_layers", "num_layers")
CLASSES: dict[str, str] = {"albert": "AlbertForMaskedLM", "llama": "LlamaForCausalLM", "gemma": "GemmaForCausalLM"}


def built(config: dict[str, Any], tied: bool) -> Any:
    """Bowline's own model of the family, or transformers', whose own draw is not waited for."""
    family = config["model_type"]
    content = {**config, **{key: LAYERS for key in DEPTHS if key in config}, "tie_word_embeddings": tied}
    if family in FAMILIES:
        cls = FAMILIES[family].model
        return cls(cls.config_class.from_dict(content))
    cls = getattr(transformers, CLASSES[family])
    del content["model_type"]
    with initialization.no_init_weights():
        model = cls(cls.config_class(**content))
        model.tie_weights()
    return model


SOON = (
    "GPT-2 tied",
    "GPT-2 untied",
    "BERT as Google's",
    "BERT untied",
    "T5 scaled, 2 layers",
    "T5 v1.1, head by width",
)
"""The cases of each family that do not wait for `make thorough`."""


@pytest.mark.parametrize(
    "case", [case if case in SOON else pytest.param(case, marks=pytest.mark.thorough) for case in TRUE]
)
def test_the_prediction_holds_at_true_vocabulary_and_width(case: str, quiet_transformers: None) -> None:
    """Within 5 %, or within three standard errors of the draws."""
    config, recipe, tied, _ = TRUE[case]
    model = built(config, tied)
    found = []
    for seed in range(1 if config["model_type"] in ("llama", "gemma") else 2):
        init_weights(model, recipe, seed=seed)
        found.append(measure_loss(model, length=LENGTH, seed=seed).loss)
    measured = statistics.fmean(found)
    error = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else 0.0
    expected = expected_loss(model, recipe, tied=tied, length=LENGTH).loss
    assert abs(expected - measured) <= max(0.05 * measured, 3 * error), (expected, measured)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_recipe_is_compared_for_each_tie_that_it_is_for(family: str) -> None:
    sizes: dict[str, Any] = {"vocab_sizes": [500, 1000], "hidden_sizes": [64], "num_layers": 1}
    rows = list(compare(family, draws=2, **sizes))
    pairs = {(recipe.name, tied) for recipe in recipes_of(family) for tied in recipe.ties}
    assert {(row.recipe.name, row.tied) for row in rows} == pairs
    assert {row.vocab_size for row in rows} == {500, 1000}
    assert len(rows) == 2 * len(pairs)
    assert all(row.measured is not None and row.error is not None for row in rows)
    assert [row for row in rows if abs((row.measured or 0.0) / row.expected.loss - 1) > 0.2] == []


def test_without_draws_it_only_predicts() -> None:
    row = next(compare("gpt2", ["transformers-gpt2"], ties=[True], vocab_sizes=[50], hidden_sizes=[16], draws=0))
    assert (row.measured, row.error, row.agrees) == (None, None, None)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"family": "mamba"}, "family='mamba': expected one of bert"),
        ({"family": "gpt2", "recipes": ["gpt3"]}, "recipe='gpt3': expected one of"),
        ({"family": "t5", "recipes": ["transformers-t5-forced-tie"], "ties": [False]}, "not for an untied head"),
        ({"family": "t5", "vocab_sizes": [1]}, "vocab_size=1: expected at least 2"),
        ({"family": "t5", "num_layers": 0}, "num_layers=0: expected at least 1"),
        ({"family": "t5", "draws": -1}, "draws=-1: expected at least 0"),
    ],
)
def test_what_cannot_be_compared_is_said(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        list(compare(**arguments))


def test_every_family_here_has_recipes() -> None:
    assert {family for recipe in RECIPES.values() for family in recipe.families} >= set(FAMILIES)
