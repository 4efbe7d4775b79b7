"""Invalid sizes in a config, and extremely wide logits: each gives an error or an answer at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bowline.errors import BowlineError
from bowline.recipes import RECIPES, Distribution, Role, Scale, expected_loss, normal, truncated
from bowline.recipes.log_sum_exp import log_sum_exp

GPT2 = {"model_type": "gpt2", "vocab_size": 99, "n_embd": 16, "n_layer": 1, "n_head": 2}


@pytest.mark.parametrize("key", ["vocab_size", "n_embd", "n_layer", "n_head", "n_inner"])
@pytest.mark.parametrize("value", [0, -1, "2", 1.5, True, [2], 10**10, float("nan")])
def test_a_size_that_is_none_is_said(key: str, value: Any) -> None:
    with pytest.raises(BowlineError, match=r"is .*, expected a whole number from 1"):
        expected_loss({**GPT2, key: value}, "transformers-gpt2")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("embed_scale", "x"),
        ("logit_scale", float("inf")),
        ("embed_scale", float("nan")),
        ("model_type", ["gpt2"]),
        ("activation_function", ["gelu"]),
    ],
)
def test_what_is_neither_a_number_nor_a_name_is_said(key: str, value: Any) -> None:
    with pytest.raises(BowlineError):
        expected_loss({**GPT2, key: value}, "transformers-gpt2", scales="model")


@pytest.mark.parametrize("length", [0, True, 1.5, "8", None, 10**6])
def test_a_length_that_is_none_is_said(length: Any) -> None:
    with pytest.raises(BowlineError, match="length="):
        expected_loss(GPT2, "torch", length=length)


def test_very_wide_logits_scale_with_their_width() -> None:
    """The sum is then its largest term, whose mean is an integral over the largest's distribution."""
    z = np.linspace(0, 10, 20_001)
    below = np.array([(1 - 0.5 * math.erfc(one / math.sqrt(2))) ** 50257 for one in z])
    largest = float(z[1:] @ np.diff(below))
    for width in (300.0, 1e5, 1e12):
        ((mean, _),) = log_sum_exp(width, 50257)
        assert mean / width == pytest.approx(largest, rel=2e-3)
    ((mean, _),) = log_sum_exp(1e5, 50257, [1e9], 3.0)
    assert mean == pytest.approx(1e9, rel=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Scale("a"),  # type: ignore[arg-type]
        lambda: Scale(1.0, [1]),  # type: ignore[arg-type]
        lambda: Scale(1.0, {"hidden_size": "2"}),  # type: ignore[dict-item]
        lambda: Scale(1e200),
        lambda: normal(None),  # type: ignore[arg-type]
        lambda: truncated(0.02, cut=0.0),
        lambda: truncated(0.02, cut=float("nan"), corrected=True),
        lambda: Distribution("cauchy", Scale()),
        lambda: Distribution("normal", 0.02),  # type: ignore[arg-type]
        lambda: replace(RECIPES["torch"], roles=None),  # type: ignore[arg-type]
        lambda: replace(RECIPES["torch"], roles={**RECIPES["torch"].roles, "heads": normal()}),  # type: ignore[dict-item]
        lambda: replace(RECIPES["torch"], roles={**RECIPES["torch"].roles, Role.KEY: 0.02}),  # type: ignore[dict-item]
        lambda: replace(RECIPES["torch"], embed_scale=2.0),  # type: ignore[arg-type]
        lambda: expected_loss({**GPT2, "tie_word_embeddings": "no"}, "torch"),
    ],
)
def test_what_is_no_recipe_is_refused_when_it_is_made(make: Callable[[], Any]) -> None:
    with pytest.raises(BowlineError, match=r"expected|kind"):
        make()


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_has_a_prediction_for_every_family(recipe: str) -> None:
    """A scale by the fans of a matrix has them wherever the recipe is taken."""
    lstm = {"model_type": "lstm", "vocab_size": 99, "hidden_size": 16, "num_layers": 1}
    for config in (GPT2, lstm):
        assert math.isfinite(expected_loss(config, recipe, tied=True).loss)
