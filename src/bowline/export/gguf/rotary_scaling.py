"""The settings of rotary embeddings in `config.json`, as llama.cpp reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from bowline.checkpoint.formats.strict_json import shown
from bowline.errors import UsageError
from bowline.export.gguf.gguf_architecture import CONVERTER, Config, expect, positive_in, size_in
from bowline.export.gguf.key_values import real, text

__all__ = ["head_size", "rope_factors", "rope_object", "rope_scaling_keys", "rope_settings"]

MOST_FEATURES = 1 << 16
"""A limit far above any head's size."""


def rope_settings(config: Config) -> Mapping[str, Any]:
    """The settings of the rotary embedding: those of transformers 4, in whose place 5 writes `rope_parameters`.

    Raises:
        UsageError: they are not an object, or only a part of a head is rotated.
    """
    stated = rope_object(config, "rope_scaling") or rope_object(config, "rope_parameters")
    found = {"rope_theta": config.get("rope_theta"), **stated}
    for place in (config, found):
        expect(place, "partial_rotary_factor", (1, 1.0, None), default=None)
    return found


def rope_object(settings: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object among the settings, empty where it is missing or null. Raises `UsageError` if it is something else."""
    stated = settings.get(key)
    if not isinstance(stated, dict | None):
        raise UsageError(
            f"config.json: {key} is {shown(stated)}, expected an object or null", help="fetch config.json again"
        )
    return stated or {}


def rope_factors(config: Config) -> npt.NDArray[np.float32] | None:
    """The divisors of Llama 3's frequencies, which llama.cpp reads as a tensor; `None` for another scaling.

    A frequency whose wavelength is below the short bound stays, above the long bound it is divided by the factor, and
    between them the two are mixed (Meta's apply_scaling in llama_models).
    """
    rope = rope_settings(config)
    if (rope.get("rope_type") or rope.get("type")) != "llama3":
        return None
    size = head_size(config)
    base = positive_in(rope, "rope_theta", 10000.0)
    frequencies = 1.0 / base ** (np.arange(0, size, 2, dtype=np.float64) / size)
    waves = 2 * math.pi / frequencies
    factor = positive_in(rope, "factor")
    low, high = positive_in(rope, "low_freq_factor"), positive_in(rope, "high_freq_factor")
    key = "original_max_position_embeddings"
    context = positive_in(rope if config.get(key) is None else config, key, size_in(config, "max_position_embeddings"))
    if low >= high:
        raise UsageError(
            f"config.json: low_freq_factor is {low:g}, expected less than high_freq_factor, {high:g}",
            help="mend the config",
        )
    smooth = (context / waves - low) / (high - low)
    mixed = 1.0 / ((1 - smooth) / factor + smooth)
    found = np.where(waves < context / high, 1.0, np.where(waves > context / low, factor, mixed))
    return found.astype(np.float32)


def head_size(config: Config) -> int:
    """The size of a head: stated, or the width divided by the heads."""
    if config.get("head_dim") is not None:
        size = size_in(config, "head_dim")
    else:
        size = size_in(config, "hidden_size") // size_in(config, "num_attention_heads")
    if not 0 < size <= MOST_FEATURES:
        raise UsageError(
            f"config.json: heads of {size} features, expected 1 to {MOST_FEATURES}", help="mend the config"
        )
    return size


def rope_scaling_keys(settings: Mapping[str, Any], *, llama3: bool) -> dict[str, bytes]:
    """The keys of a linear scaling; none for no scaling, and for Llama 3's, which is a tensor.

    `llama3` says whether the architecture reads that tensor.

    Raises:
        UsageError: another scaling.
    """
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind == "linear":
        return {"rope.scaling.type": text("linear"), "rope.scaling.factor": real(positive_in(settings, "factor"))}
    if kind not in (("default", "llama3") if llama3 else ("default",)):
        wanted = "none, linear or llama3" if llama3 else "none or linear"
        raise UsageError(
            f"config.json: the rotary embedding is scaled by {shown(kind)}, expected {wanted}", help=CONVERTER
        )
    return {}
