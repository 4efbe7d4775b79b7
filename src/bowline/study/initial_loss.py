"""The loss before the first step, predicted and measured for every recipe of initialization."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bowline.errors import UsageError
from bowline.models import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LSTMConfig,
    LSTMLMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)
from bowline.nn.init.init_weights import init_weights
from bowline.nn.init.measured_loss import measure_loss
from bowline.recipes import RECIPES, InitialLoss, Recipe, expected_loss
from bowline.recipes.architecture import MOST, MOST_LAYERS
from bowline.recipes.expected import named
from bowline.wording import joined

__all__ = ["FAMILIES", "Comparison", "compare", "recipes_of"]

LENGTH = 32
HEAD = 64
"""The width of an attention head."""


@dataclass(frozen=True)
class FamilyDraws:
    """A family to measure: its class, its true sizes, and a function that makes its config."""

    model: type[Any]
    vocab_size: int
    hidden_size: int
    config: Callable[[int, int, int], Any]
    """Makes the config from a vocabulary size, a width and a number of layers."""


def _heads(width: int) -> int:
    return max(1, width // HEAD) if width % HEAD == 0 else 1


FAMILIES = {
    "bert": FamilyDraws(
        BertForMaskedLM,
        30522,
        768,
        lambda vocab, width, layers: BertConfig(
            vocab_size=vocab,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=_heads(width),
            intermediate_size=4 * width,
            max_position_embeddings=LENGTH,
        ),
    ),
    "gpt2": FamilyDraws(
        GPT2LMHeadModel,
        50257,
        768,
        lambda vocab, width, layers: GPT2Config(
            vocab_size=vocab, n_embd=width, n_layer=layers, n_head=_heads(width), n_positions=LENGTH
        ),
    ),
    "t5": FamilyDraws(
        T5ForConditionalGeneration,
        32128,
        512,
        lambda vocab, width, layers: T5Config(
            vocab_size=vocab,
            d_model=width,
            d_kv=min(HEAD, width),
            d_ff=4 * width,
            num_layers=layers,
            num_heads=_heads(width),
        ),
    ),
    "lstm": FamilyDraws(
        LSTMLMHeadModel,
        10000,
        650,
        lambda vocab, width, layers: LSTMConfig(vocab_size=vocab, hidden_size=width, num_layers=layers),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One recipe in one model: the predicted first loss, and the measured one with its standard error."""

    family: str
    recipe: Recipe
    tied: bool
    vocab_size: int
    hidden_size: int
    num_layers: int
    expected: InitialLoss
    measured: float | None
    error: float | None

    @property
    def agrees(self) -> bool | None:
        """True if both losses are within 5 %, or within three standard errors; `None` if nothing was measured."""
        if self.measured is None:
            return None
        off = abs(self.measured - self.expected.loss)
        return off <= 0.05 * self.measured or off <= 3 * (self.error or 0.0)


def recipes_of(family: str) -> list[Recipe]:
    """Return the recipes that were made for a family."""
    return [recipe for recipe in RECIPES.values() if family in recipe.families]


def compare(
    family: str,
    recipes: Sequence[str | Recipe] | None = None,
    *,
    ties: Sequence[bool] | None = None,
    vocab_sizes: Sequence[int] | None = None,
    hidden_sizes: Sequence[int] | None = None,
    num_layers: int = 2,
    draws: int = 3,
) -> Iterator[Comparison]:
    """Predict the first loss for each recipe, tie and size, and measure it on `draws` models.

    By default the sizes are the family's true ones. A few layers show most of the effect of an initialization.

    Raises:
        UsageError: an unknown family or recipe, an invalid size, or a recipe that is not for the tie.
    """
    if family not in FAMILIES:
        raise UsageError(f"family={family!r:.60}: expected one of {', '.join(FAMILIES)}", argument="family")
    this = FAMILIES[family]
    for size in vocab_sizes or ():
        _check_size("vocab_size", size, 2, MOST)
    for size in hidden_sizes or ():
        _check_size("hidden_size", size, 2, MOST)
    _check_size("num_layers", num_layers, 1, MOST_LAYERS)
    _check_size("draws", draws, 0, MOST)
    chosen = [named(recipe) for recipe in recipes] if recipes else recipes_of(family)
    pairs = [(recipe, tied) for recipe in chosen for tied in recipe.ties if ties is None or tied in ties]
    if not pairs:
        names = joined([recipe.name for recipe in chosen])
        raise UsageError(
            f"recipe={names}: not for {'a tied' if ties == [True] else 'an untied'} head",
            help="name a recipe for such a head, or leave the tie open",
            argument="recipe",
        )
    for vocab in vocab_sizes or (this.vocab_size,):
        for width in hidden_sizes or (this.hidden_size,):
            for recipe, tied in pairs:
                config = this.config(vocab, width, num_layers).updated(tie_word_embeddings=tied)
                found = [_measured(this.model, config, recipe, seed) for seed in range(draws)]
                yield Comparison(
                    family=family,
                    recipe=recipe,
                    tied=tied,
                    vocab_size=vocab,
                    hidden_size=width,
                    num_layers=num_layers,
                    expected=expected_loss(config, recipe, tied=tied, length=LENGTH),
                    measured=statistics.fmean(found) if found else None,
                    error=statistics.stdev(found) / math.sqrt(draws) if draws > 1 else None,
                )


def _check_size(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        bound = f"at least {least}" if value < least else f"at most {most}"
        raise UsageError(f"{name}={value}: expected {bound}", argument=name)


def _measured(cls: type[Any], config: Any, recipe: Recipe, seed: int) -> float:
    try:
        model = cls(config)
    except RuntimeError as error:  # torch raises it if the model does not fit into memory
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"{cls.__name__} of {config.vocab_size} tokens cannot be built: {reason}",
            help="use smaller sizes, or draws=0 to predict only",
        ) from None
    init_weights(model, recipe, seed=seed)
    return measure_loss(model, length=LENGTH, seed=seed).loss
