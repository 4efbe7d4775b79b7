"""The rule about untrained tables: it names the recipe that draws such a table and predicts its first loss."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from bowline.auditing.evidence import Evidence
from bowline.auditing.rules.rule import Observation, Severity, rule
from bowline.errors import ConfigError, UsageError
from bowline.tie import TieState
from bowline.wording import listed

TIED = (TieState.SHARED, TieState.ALIAS, TieState.EQUAL)
NEAR = 0.04
"""Relative distance up to which a std counts as a recipe's: a truncated normal is 12 % below a whole one."""


@rule("BW405", "untrained-recipe", Severity.INFO, also=Severity.WARNING)
def untrained_recipe(evidence: Evidence) -> Iterator[Observation]:
    """The embedding looks untrained, and either no recipe matches it or its first loss explodes.

    What: all rows of the embedding have the norm of freshly initialised rows, as they also do after a few training
    steps. The audit compares their standard deviation with every recipe for models of this family, and predicts the
    first loss from it, the tie, and the config's multipliers.

    Why it hurts: a tied matrix has one std for the embedding and the head. At std 1 and a width of 768 the logits have
    a std of 27.7 unless they are multiplied by 768^-1/2. One token then takes all of the probability in each softmax,
    the first loss is ten times ln V, and the first training steps only undo the initialisation.

    Example: `T5Config(tie_word_embeddings=False)` in transformers 5 keeps the tie and drops the scale.

    Fix: initialise with a recipe whose scales fit the tie (compare them by `bowline init-loss --family t5`).

    Reported in: huggingface/transformers#26441, huggingface/transformers#32854
    """
    declaration, config = evidence.declaration, evidence.config
    drawn = {table.name: table.drawn_std for table in evidence.tables if table.drawn_std}
    std = drawn.get(declaration.embedding or "")
    if std is None or config is None or declaration.head is None or declaration.embedding is None:
        return
    from bowline.recipes import RECIPES, Architecture, Role, expected_loss, normal, usual  # imports numpy

    try:
        shape = Architecture.of(config)
        family = usual(shape.family)
    except (UsageError, ConfigError):  # the layers of the family are unknown: no prediction
        return
    tied = any(tie.tie.target == declaration.head and tie.state in TIED for tie in evidence.ties)
    head = std if tied else drawn.get(declaration.head)
    if head is None:
        return
    stds = {
        name: recipe.of(Role.INPUT_EMBEDDING).std(shape.sizes_of(shape.embedding_size, shape.vocab_size))
        for name, recipe in RECIPES.items()
        if set(recipe.families) & {shape.family, *family.families}
    }
    errors = 5 / math.sqrt(2 * shape.vocab_size * shape.embedding_size)  # five standard errors
    near = max(NEAR, errors)
    alike = [name for name, value in stds.items() if value and abs(value / std - 1) < near]
    roles = {**family.roles, Role.INPUT_EMBEDDING: normal(std), Role.HEAD: normal(head)}
    as_drawn = replace(family, roles=roles, ties=(tied,))
    try:
        expected = expected_loss(shape, as_drawn, tied=tied, scales="model")
    except (UsageError, ConfigError):  # the activation is unknown
        return
    place = (declaration.embedding,) if tied else (declaration.embedding, declaration.head)
    by = f" (as by {listed(alike, limit=8)})" if alike else ""
    ends = "the head is tied to it" if tied else f"the head with std {head:.2g}"
    if expected.explodes:
        yield Observation(
            message=(
                f"{declaration.embedding} looks freshly initialised with std {std:.2g}{by}, and {ends}: the first loss "
                f"would be about {expected.loss:.0f}, while ln V is {expected.uniform:.1f}"
            ),
            help=(
                f"scale the logits (std {expected.width:.2g}) down, or initialise with a smaller std; "
                "`bowline init-loss` compares the recipes"
            ),
            tensors=place,
            severity=Severity.WARNING,
        )
    elif not alike:
        known = listed([f"{value:.2g} ({name})" for name, value in stds.items()], limit=6)
        yield Observation(
            message=(
                f"{declaration.embedding} looks freshly initialised with std {std:.2g}, which no recipe of "
                f"{shape.family} uses"
            ),
            help=f"recipes use {known}; with {std:.2g} the first loss is about {expected.loss:.2f}",
            tensors=place,
        )
