"""Families that scale before the head, and let `tie_word_embeddings` decide about it.

T5 v1.0 multiplies the decoder's output by d_model^-1/2 before its tied head, v1.1 does not and unties. transformers 4
reads both from the flag; 5 has `scale_decoder_outputs` in some families and asks the flag in others. A head that is
untied by clearing the flag must therefore carry the factor itself, which is v1.1's form and read alike everywhere.
Which family asks what is in `bowline.families.quirks`.
"""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from bowline.families.quirks import ScaledBy
from bowline.nn.config.live_config import flag_of, live_configs, owner, scaled_by, write

__all__ = ["follows_flag", "head_scale", "idle_scale", "set_scaling", "undo_scaling"]

SCALE = ScaledBy.OWN_KEY.value


def follows_flag(model: nn.Module) -> bool:
    """Whether a loader would scale this model's head by nothing but the flag in its `config.json`."""
    return scaled_by(getattr(owner(model), "config", None)) is ScaledBy.FLAG


def head_scale(model: nn.Module) -> float:
    """What the head's input is multiplied by now, and no longer once the flag is cleared: d_model^-1/2, or 1."""
    return _factor(model) if _scales(model) else 1.0


def idle_scale(model: nn.Module) -> float:
    """The factor that is not applied now and a key could apply: d_model^-1/2; 1 if it is applied or no key decides."""
    return 1.0 if _scales(model) in (True, None) else _factor(model)


def _scales(model: nn.Module) -> bool | None:
    """Whether the live model scales by what its config says; `None` where no key of its config decides."""
    config = getattr(owner(model), "config", None)
    asked = scaled_by(config)
    if asked is ScaledBy.FLAG:
        return flag_of(config) is not False
    if asked in (ScaledBy.NOTHING, ScaledBy.NEVER):
        return None
    stated: bool | None = getattr(config, SCALE, None)
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
