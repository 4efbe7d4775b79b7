"""What is known of a family that no generator can read off its classes: one record for each `model_type`.

Each record was read from the classes' source in transformers 4.57.1 and 5.23.0. `quirks_of` is the one way to ask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

__all__ = ["Quirks", "ScaledBy", "quirks_of"]


class ScaledBy(Enum):
    """What a class asks before it multiplies the decoder's output by d_model^-1/2 in front of the head."""

    FLAG = "tie_word_embeddings"
    """`tie_word_embeddings`, which the config keeps as it is given."""
    OWN_KEY = "scale_decoder_outputs"
    """`scale_decoder_outputs`; where `config.json` lacks that key, its `tie_word_embeddings` decides at load."""
    NOTHING = "always"
    """Nothing: it always scales, because the config makes the flag that it asks true at every load."""
    NEVER = "never"
    """It does not scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quirks:
    """The facts of one family; the defaults are those of a family about which nothing special is known.

    `scaled_by` says, by major version of transformers, what decides whether the head's input is scaled; it is empty for
    a family that has no such scale.
    """

    scaled_by: Mapping[int, ScaledBy] = field(default_factory=dict)


NONE = Quirks()

BY_FAMILY: Mapping[str, Quirks] = {
    # 4: forward asks config.tie_word_embeddings.
    # 5: the config copies the flag that it is given into scale_decoder_outputs, makes the flag true, and then sets
    #    every other key of config.json, a stored scale_decoder_outputs among them; forward asks that.
    "longt5": Quirks(scaled_by={4: ScaledBy.FLAG, 5: ScaledBy.OWN_KEY}),
    "pop2piano": Quirks(scaled_by={4: ScaledBy.FLAG, 5: ScaledBy.OWN_KEY}),
    "t5": Quirks(scaled_by={4: ScaledBy.FLAG, 5: ScaledBy.OWN_KEY}),
    # 4 as above. 5: the config makes the flag true, and forward does not scale.
    "mt5": Quirks(scaled_by={4: ScaledBy.FLAG, 5: ScaledBy.NEVER}),
    # 4 as above. 5: forward still asks the flag, and the config keeps what it is given.
    "switch_transformers": Quirks(scaled_by={4: ScaledBy.FLAG, 5: ScaledBy.FLAG}),
    # 4 as above. 5: forward still asks the flag, and the config makes it true.
    "udop": Quirks(scaled_by={4: ScaledBy.FLAG, 5: ScaledBy.NOTHING}),
    "umt5": Quirks(scaled_by={4: ScaledBy.FLAG, 5: ScaledBy.NOTHING}),
}


def quirks_of(family: object) -> Quirks:
    """The record of the family with this `model_type`; the defaults where there is none.

    Example:
        >>> quirks_of("t5").scaled_by[5].value, quirks_of("gpt2").scaled_by
        ('scale_decoder_outputs', {})
    """
    return BY_FAMILY.get(family, NONE) if isinstance(family, str) else NONE
