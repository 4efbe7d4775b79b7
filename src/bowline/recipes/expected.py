"""Predicts the cross entropy of an untrained model from its recipe alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from bowline.errors import UsageError
from bowline.recipes.architecture import Architecture
from bowline.recipes.catalogue import RECIPES, usual
from bowline.recipes.log_sum_exp import GRID, capped_moments, critical_width, log_sum_exp
from bowline.recipes.recipe import Recipe, Role
from bowline.recipes.signal import Signal, propagate

__all__ = ["InitialLoss", "expected_loss", "named"]

Scales = Literal["recipe", "model"]
LONGEST = 4096
"""The most positions whose covariance is computed; a matrix of this size squared is held in memory."""


@dataclass(frozen=True, kw_only=True)
class InitialLoss:
    """A predicted first loss, in nats.

    `loss` and `spread` are the mean and the standard deviation over tokens. `uniform` is ln V, the loss of a model that
    predicts every token with equal probability. `width` is the standard deviation of a logit; above `critical`,
    sqrt(2 ln V), one token has most of each softmax. `self_logit` is the mean logit of the input's own token, which a
    tied head raises, and `similarity` the cosine of the hidden state and that token's embedding; `without_self` is the
    loss without that effect.
    """

    loss: float
    without_self: float
    spread: float
    uniform: float
    width: float
    critical: float
    self_logit: float
    similarity: float

    @property
    def explodes(self) -> bool:
        """Whether the first loss exceeds twice ln V, so that the first training steps only undo the recipe."""
        return self.loss > 2 * self.uniform

    @property
    def conclusion(self) -> str:
        """The assessment of this loss, as a sentence."""
        above = self.loss - self.uniform
        own = self.loss - self.without_self
        if self.explodes:
            of = "the input's own token" if own > self.without_self - self.uniform else "one token by chance"
            return (
                f"explodes: logits of std {self.width:.3g}, where {self.critical:.2g} is the most, give {of} all of "
                f"the softmax, and the first loss is {self.loss / self.uniform:.0f} times ln V"
            )
        if own > 0.1:
            return (
                f"starts {above:.2g} above ln V: the tied head sees the input's own token, with a logit of "
                f"{self.self_logit:.3g}, until layers or training have covered it"
            )
        if above < 0.01:
            return f"starts at ln V: logits of std {self.width:.2g} say nothing yet"
        return f"starts {above:.2g} above ln V, as logits of std {self.width:.2g} do"


def named(recipe: Recipe | str) -> Recipe:
    """The recipe of this name; a recipe is returned as it is.

    Raises:
        UsageError: no recipe has this name.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str) or recipe not in RECIPES:
        raise UsageError(f"recipe={recipe!r:.60}: expected one of {', '.join(RECIPES)}", argument="recipe")
    return RECIPES[recipe]


def check_tie(recipe: Recipe, tied: bool) -> None:
    """Check that a recipe is made for a head that is tied or untied, as given.

    Raises:
        UsageError: the recipe is for the other kind of head.
    """
    if tied not in recipe.ties:
        wanted, seen = ("a tied head", "an untied one") if recipe.ties == (True,) else ("an untied head", "a tied one")
        raise UsageError(
            f"recipe={recipe.name!r}: is for {wanted}, and the model has {seen}",
            help="use another recipe, or allow both with dataclasses.replace(recipe, ties=(True, False))",
            argument="recipe",
        )


def expected_loss(
    model: Any,
    recipe: Recipe | str | None = None,
    *,
    tied: bool | None = None,
    length: int = 32,
    scales: Scales = "recipe",
) -> InitialLoss:
    """The mean cross entropy before training, on random tokens with random labels: E ln sum_j exp(z_j).

    A logit z_j = c h . w_j of a token that is not the input has the width c s ‖h‖, with s the head's std, c the logit
    scale and ‖h‖ = sqrt(d) after a norm. If tied, the input's own token also has the logit cos(h, e) c s sqrt(d) ‖h‖,
    and if that exceeds ln V, it is the loss. A model's softcap bounds both. Both sums are exact (`log_sum_exp`); the
    cosine is computed through the layers (`signal`). Sizes are assumed to be large: figures are within 5 % from about
    d = 64.

    Args:
        model: a model, its config, the directory of a checkpoint or the content of its `config.json`, of a family that
            `Architecture` knows; or an `Architecture`.
        recipe: one of `RECIPES`, or its name; by default the family's usual one, which is transformers', drawn from the
            config's `initializer_range`.
        tied: overrides the config.
        length: tokens in a sequence; early positions mix few others, and keep more of their own embedding.
        scales: whose multipliers of embeddings and logits to use: the recipe's, or the model's.

    Raises:
        UsageError: an unknown family or recipe, a recipe that does not fit the tie, or a length below 1.
        ConfigError: a config that cannot be read, or that does not state a size.

    Example:
        >>> config = {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12}
        >>> expected = expected_loss(config, "transformers-gpt2")
        >>> round(expected.loss, 3), round(expected.uniform, 3)
        (10.979, 10.825)
    """
    recipe = named(recipe) if recipe is not None else None
    if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= LONGEST:
        raise UsageError(f"length={length!r:.60}: expected a whole number from 1 to {LONGEST}")
    if scales not in ("recipe", "model"):
        raise UsageError(f"scales={scales!r}: expected 'recipe' or 'model'")
    shape = Architecture.of(model)
    recipe = usual(shape.family, shape.initializer_range) if recipe is None else recipe
    tied = shape.tied if tied is None else tied
    check_tie(recipe, tied)
    by_recipe = scales == "recipe"
    embed_scale = recipe.embed_scale(shape.sizes) if by_recipe else shape.embed_scale
    logit_scale = recipe.logits_by(tied)(shape.sizes) if by_recipe else shape.logit_scale
    signal = propagate(shape, recipe, embed_scale, length)
    sizes = shape.sizes_of(shape.embedding_size, shape.vocab_size)
    head = recipe.of(Role.INPUT_EMBEDDING if tied else Role.HEAD).std(sizes)
    bias = logit_scale * recipe.of(Role.HEAD_BIAS).std(sizes) if shape.head_bias else 0.0
    widths = np.hypot(logit_scale * head * signal.norm, bias)
    own = signal.similarity * logit_scale * head * signal.norm * math.sqrt(shape.embedding_size)
    own = own if tied else np.zeros(length)
    cap = shape.logit_cap
    plain = _alone(shape.vocab_size, widths, cap)
    losses, variances = _moments(shape.vocab_size, widths, own, signal, cap) if own.any() else plain
    if cap is not None:
        noise = widths * np.sqrt(np.maximum(0.0, 1 - signal.similarity**2))
        own = np.array([capped_moments(*pair, cap)[0] for pair in zip(own, noise, strict=True)]) if tied else own
        widths = np.array([capped_moments(0.0, width, cap)[1] for width in widths])
    return InitialLoss(
        loss=float(losses.mean()),
        without_self=float(plain[0].mean()),
        spread=math.sqrt(float(variances.mean() + losses.var() + (widths**2).mean())),
        uniform=math.log(shape.vocab_size),
        width=float(widths.mean()),
        critical=critical_width(shape.vocab_size),
        self_logit=float(own.mean()),
        similarity=float(signal.similarity.mean()) if tied else 0.0,
    )


def _alone(count: int, widths: Any, cap: float | None) -> tuple[Any, Any]:
    """Mean and variance of the log-sum-exp at each position, for V logits of one distribution."""
    each = {width: log_sum_exp(width, count, cap=cap)[0] for width in set(widths.tolist())}
    both = np.array([each[width] for width in widths.tolist()])
    return both[:, 0], both[:, 1]


def _moments(count: int, widths: Any, own: Any, signal: Signal, cap: float | None) -> tuple[Any, Any]:
    """Mean and variance with the input's own logit included; computed for a few of its values and interpolated."""
    width, similar = float(widths[0]), float(signal.similarity.mean())
    low, high = math.floor(own.min() / GRID), math.ceil(own.max() / GRID)
    places = GRID * np.unique(np.linspace(low, high, 9).round())
    extra_width = width * math.sqrt(max(0.0, 1 - similar**2))
    both = np.array(log_sum_exp(width, max(1, count - 1), places.tolist(), extra_width, cap=cap))
    return np.interp(own, places, both[:, 0]), np.interp(own, places, both[:, 1])
