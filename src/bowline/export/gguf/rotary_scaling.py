"""The settings of rotary embeddings in `config.json`, as llama.cpp reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from bowline.checkpoint.formats.strict_json import shown
from bowline.errors import UsageError
from bowline.export.gguf.gguf_architecture import CONVERTER, Config, size_in
from bowline.export.gguf.key_values import real, text

__all__ = ["rope_factors", "rope_scaling_keys", "rope_settings"]


def rope_settings(config: Config) -> Mapping[str, Any]:
    """The settings of the rotary embedding, where both versions of transformers write them."""
    found = {"rope_theta": config.get("rope_theta")}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(config.get(key), dict):
            found |= config[key]
    return found


def rope_factors(config: Config) -> npt.NDArray[np.float32] | None:
    """The divisors of Llama 3's frequencies, which llama.cpp reads as a tensor; `None` for another scaling.

    A frequency whose wavelength is below the short bound stays, above the long bound it is divided by the factor, and
    between them the two are mixed (Meta's apply_scaling in llama_models).
    """
    rope = rope_settings(config)
    if (rope.get("rope_type") or rope.get("type")) != "llama3":
        return None
    size = config.get("head_dim") or size_in(config, "hidden_size") // size_in(config, "num_attention_heads")
    base = rope.get("rope_theta") or 10000.0
    frequencies = 1.0 / base ** (np.arange(0, size, 2, dtype=np.float64) / size)
    waves = 2 * math.pi / frequencies
    factor, low, high = rope.get("factor", 8.0), rope.get("low_freq_factor", 1.0), rope.get("high_freq_factor", 4.0)
    context = rope.get("original_max_position_embeddings", 8192)
    smooth = (context / waves - low) / (high - low)
    mixed = 1.0 / ((1 - smooth) / factor + smooth)
    found = np.where(waves < context / high, 1.0, np.where(waves > context / low, factor, mixed))
    return found.astype(np.float32)


def rope_scaling_keys(settings: Mapping[str, Any], *, llama3: bool) -> dict[str, bytes]:
    """The keys of a linear scaling; none for no scaling, and for Llama 3's, which is a tensor.

    Raises:
        UsageError: another scaling.
    """
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind == "linear":
        return {"rope.scaling.type": text("linear"), "rope.scaling.factor": real(settings.get("factor"))}
    if kind not in (("default", "llama3") if llama3 else ("default",)):
        wanted = "none, linear or llama3" if llama3 else "none or linear"
        raise UsageError(
            f"config.json: the rotary embedding is scaled by {shown(kind)}, expected {wanted}", help=CONVERTER
        )
    return {}
