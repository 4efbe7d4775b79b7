"""Families that scale before the head, and let `tie_word_embeddings` decide about it.

T5 v1.0 multiplies the decoder's output by d_model^-1/2 before its tied head, v1.1 does not and unties. transformers 4
reads both from the flag; 5 has `scale_decoder_outputs` in some families and asks the flag in others. A head that is
untied by clearing the flag must therefore carry the factor itself, which is v1.1's form and read alike everywhere.
Read from the classes' `forward` in transformers 4.57.1 and 5.23.0.
"""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from bowline.nn.config.live_config import flag_of, is_among, live_configs, owner, write

__all__ = ["follows_flag", "head_scale", "idle_scale", "set_scaling", "undo_scaling"]

SCALE = "scale_decoder_outputs"
SCALED_BY_FLAG = {
    4: frozenset({"longt5", "mt5", "pop2piano", "switch_transformers", "t5", "udop", "umt5"}),
    5: frozenset({"longt5", "pop2piano", "switch_transformers"}),
}
"""By version of transformers: a checkpoint of these families is scaled when its flag is true, and only then."""


def follows_flag(model: nn.Module) -> bool:
    """Whether a loader would scale this model's head by nothing but the flag in its `config.json`."""
    return is_among(SCALED_BY_FLAG, getattr(owner(model), "config", None))


def head_scale(model: nn.Module) -> float:
    """What the head's input is multiplied by now, and no longer once the flag is cleared: d_model^-1/2, or 1."""
    return _factor(model) if _scales(model) else 1.0


def idle_scale(model: nn.Module) -> float:
    """What the head's input would be multiplied by and is not: d_model^-1/2, or 1 where nothing scales or all does."""
    return 1.0 if _scales(model) in (True, None) else _factor(model)


def _scales(model: nn.Module) -> bool | None:
    """Whether the live model scales; `None` for a family that never does."""
    config = getattr(owner(model), "config", None)
    stated = getattr(config, SCALE, None)
    if stated is None and follows_flag(model):
        return flag_of(config) is not False
    return stated


def _factor(model: nn.Module) -> float:
    config = getattr(owner(model), "config", None)
    width: float = getattr(config, "d_model", None) or config.hidden_size  # type: ignore[union-attr]
    return 1.0 / math.sqrt(width)


def set_scaling(model: nn.Module, value: bool) -> list[Any]:
    """Write `scale_decoder_outputs` in every live config that has it; returns those that changed."""
    changed = [level for _, level in live_configs(model) if getattr(level, SCALE, None) is (not value)]
    for level in changed:
        write(level, SCALE, value)
    return changed


def undo_scaling(changed: list[Any]) -> None:
    """Undo `set_scaling`."""
    for level in changed:
        write(level, SCALE, not getattr(level, SCALE))
