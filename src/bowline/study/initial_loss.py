"""What is the loss before the first step, and which draw is right? Every recipe, predicted and measured."""

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
from bowline.recipes.expected import named

__all__ = ["FAMILIES", "Comparison", "compare", "recipes_of"]

LENGTH = 32
HEAD = 64
"""Columns of an attention head."""


@dataclass(frozen=True)
class FamilyDraws:
    """A family as it is measured: the class, its true sizes, and its config for others."""

    model: type[Any]
    vocab_size: int
    hidden_size: int
    config: Callable[[int, int, int], Any]
    """Of a vocabulary, a width and a number of layers."""


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
    """One recipe in one model: the first loss as it is predicted, and as it was measured, with its standard error."""

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
        """Whether the two are within 5 %, or within three standard errors."""
        if self.measured is None:
            return None
        off = abs(self.measured - self.expected.loss)
        return off <= 0.05 * self.measured or off <= 3 * (self.error or 0.0)


def recipes_of(family: str) -> list[Recipe]:
    """The recipes that were made for a family."""
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
    """Each recipe, each tie it is for, each size: predicted, and measured on `draws` models.

    Sizes are the family's true ones unless others are given; few layers show most of what a draw does.

    Raises:
        UsageError: a family, recipe or size that is none, or a recipe that is not for the tie.
    """
    if family not in FAMILIES:
        raise UsageError(f"the family {family!r:.60}: expected one of {', '.join(FAMILIES)}")
    this = FAMILIES[family]
    for what, sizes in (("vocab_size", vocab_sizes), ("hidden_size", hidden_sizes)):
        wrong = [size for size in sizes or () if size < 2]
        if wrong:
            raise UsageError(f"{what}={wrong[0]}: expected at least 2", argument=what)
    if num_layers < 1 or draws < 0:
        raise UsageError(f"{num_layers} layers and {draws} draws: expected at least 1 layer, and 0 draws or more")
    chosen = [named(recipe) for recipe in recipes] if recipes else recipes_of(family)
    pairs = [(recipe, tied) for recipe in chosen for tied in recipe.ties if ties is None or tied in ties]
    if not pairs:
        names = ", ".join(recipe.name for recipe in chosen)
        raise UsageError(f"{names}: not for a head that is {'tied' if ties == [True] else 'untied'}")
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


def _measured(cls: type[Any], config: Any, recipe: Recipe, seed: int) -> float:
    try:
        model = cls(config)
    except RuntimeError as error:  # torch's own, for what does not fit into memory
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"{cls.__name__} of {config.vocab_size} tokens cannot be built: {reason}", help="smaller sizes, or draws=0"
        ) from None
    init_weights(model, recipe, seed=seed)
    return measure_loss(model, length=LENGTH, seed=seed).loss
