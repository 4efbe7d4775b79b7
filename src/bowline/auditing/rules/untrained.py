"""A checkpoint that looks never trained: which recipe draws so, and what its first loss would be."""

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
"""Two standard deviations this near are the same recipe's: a truncated normal is 12 % below a whole one."""


@rule("BW405", "untrained-recipe", Severity.INFO, also=Severity.WARNING)
def untrained_recipe(evidence: Evidence) -> Iterator[Observation]:
    """A table that looks untrained, and that no recipe draws, or whose first loss explodes.

    What: all rows of the embedding have the length of a fresh draw; after a few steps of training they still do. Its
    standard deviation is held against every recipe for models of this family, and the first loss is predicted from it,
    the tie, and the config's multipliers.

    Why it hurts: a table's std serves both ends of a tie. At std 1 and a width of 768 the logits have a std of 27.7
    unless they are multiplied by 768^-1/2: one token then has all of each softmax, the first loss is ten times ln V,
    and training begins by undoing the draw.

    Example: `T5Config(tie_word_embeddings=False)` in transformers 5: the tie stays and the scale goes.

    Mend: draw with a recipe whose scales belong to the tie (`bowline init-loss --family t5`).

    Threads: huggingface/transformers#26441, huggingface/transformers#32854
    """
    declaration, config = evidence.declaration, evidence.config
    drawn = {table.name: table.drawn_std for table in evidence.tables if table.drawn_std}
    std = drawn.get(declaration.embedding or "")
    if std is None or config is None or declaration.head is None or declaration.embedding is None:
        return
    from bowline.recipes import RECIPES, Architecture, Role, expected_loss, normal, usual  # numpy comes with it

    try:
        shape = Architecture.of(config)
        family = usual(shape.family)
    except (UsageError, ConfigError):  # a family whose layers are not known: nothing to predict
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
    errors = 5 / math.sqrt(2 * shape.vocab_size * shape.embedding_size)  # of a small table, five standard errors
    near = max(NEAR, errors)
    alike = [name for name, value in stds.items() if value and abs(value / std - 1) < near]
    roles = {**family.roles, Role.INPUT_EMBEDDING: normal(std), Role.HEAD: normal(head)}
    as_drawn = replace(family, roles=roles, ties=(tied,))
    try:
        expected = expected_loss(shape, as_drawn, tied=tied, scales="model")
    except (UsageError, ConfigError):  # an activation that is not known
        return
    place = (declaration.embedding,) if tied else (declaration.embedding, declaration.head)
    by = f", as {listed(alike, limit=8)} draw it," if alike else ""
    ends = "the head is tied to it" if tied else f"the head as if with std {head:.2g}"
    if expected.explodes:
        yield Observation(
            message=(
                f"{declaration.embedding} looks as if drawn with std {std:.2g}{by} and {ends}: if so, the first loss "
                f"is about {expected.loss:.0f}, where ln V is {expected.uniform:.1f}"
            ),
            help=(
                f"logits of std {expected.width:.2g} need a scale or a smaller draw; bowline init-loss shows what each "
                "recipe leads to"
            ),
            tensors=place,
            severity=Severity.WARNING,
        )
    elif not alike:
        known = listed([f"{value:.2g} ({name})" for name, value in stds.items()], limit=6)
        yield Observation(
            message=(
                f"{declaration.embedding} looks as if drawn with std {std:.2g}, and no recipe of {shape.family} draws "
                "that"
            ),
            help=f"known are {known}; if it was drawn so, the first loss is about {expected.loss:.2f}",
            tensors=place,
        )
