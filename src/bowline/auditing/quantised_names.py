"""Recognises quantised heads and tables, which are stored under other names than the weight's."""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["in_other_form"]

OTHER_FORMS = (
    "qweight",
    "qzeros",
    "scales",
    "weight_packed",
    "weight_quantized",
    "weight_scale",
    "weight_format",
    "weight.absmax",
    "weight.quant_map",
    "biases",
)
"""Suffixes that GPTQ, AWQ, compressed-tensors, bitsandbytes and MLX write in place of a weight, or beside it."""


def in_other_form(name: str, stored: Collection[str]) -> bool:
    """Whether the weight `name` is stored quantised, so that its values cannot be read directly.

    Example:
        >>> in_other_form("lm_head.weight", {"lm_head.qweight", "lm_head.scales"})
        True
    """
    stem = name.removesuffix("weight")
    return name.endswith("weight") and any(stem + form in stored for form in OTHER_FORMS)
