"""Families in which `tie_word_embeddings` decides two things: the tie, and a scale before the head.

They multiply the decoder's output by d_model^-1/2 when the flag is true, so a head that is untied by clearing the flag
must carry that factor itself. Read from their `forward` in transformers 4.57.1 and 5.23.0.
"""

from __future__ import annotations

import math
import sys
from typing import Any

from torch import nn

__all__ = ["flag_is_forced", "scale_of_flag"]

SCALED_BY_FLAG = {
    4: frozenset({"longt5", "mt5", "pop2piano", "switch_transformers", "t5", "udop", "umt5"}),
    5: frozenset({"switch_transformers", "udop"}),
}
FORCED_TRUE: dict[int, frozenset[str]] = {4: frozenset(), 5: frozenset({"umt5"})}
"""Here the flag is made true at every load whatever `config.json` says, and scales: a live model must keep it."""


def scale_of_flag(model: nn.Module) -> float:
    """What the head's input is multiplied by only while the flag is true: d_model^-1/2, or 1."""
    config = getattr(model, "config", None)
    if not _among(SCALED_BY_FLAG, config):
        return 1.0
    width: float = getattr(config, "d_model", None) or config.hidden_size  # type: ignore[union-attr]
    return 1.0 / math.sqrt(width)


def flag_is_forced(config: Any) -> bool:
    """Whether clearing the live flag would change what the model computes, against what it computes once reloaded."""
    return _among(FORCED_TRUE, config)


def _among(families: dict[int, frozenset[str]], config: Any) -> bool:
    transformers = sys.modules.get("transformers")
    model_type = getattr(config, "model_type", None)
    if transformers is None or model_type is None:
        return False
    major = int(transformers.__version__.partition(".")[0])
    return model_type in families.get(major, frozenset())
