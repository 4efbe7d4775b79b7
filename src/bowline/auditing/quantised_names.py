"""Recognises quantised heads and tables, which are stored under other names than the weight's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["has_one_torchao_table", "in_other_form", "names_its_table", "table_of"]

OTHER_FORMS = (
    "qweight",
    "qzeros",
    "scales",
    "weight_packed",
    "weight_quantized",
    "weight_scale",
    "weight_scale_inv",
    "weight_format",
    "weight.absmax",
    "weight.quant_map",
    "biases",
    "SCB",
    "_weight_qdata",
    "table.values",
)
"""Suffixes in place of a weight, or beside it: GPTQ's, AWQ's, compressed-tensors', bitsandbytes', MLX's, torchao's,
Bowline's, and those of FP8 checkpoints."""


def in_other_form(name: str, stored: Collection[str]) -> bool:
    """Whether the weight `name` is stored quantised, so that its values cannot be read directly.

    Example:
        >>> in_other_form("lm_head.weight", {"lm_head.qweight", "lm_head.scales"})
        True
    """
    stem = name.removesuffix("weight")
    return name.endswith("weight") and any(stem + form in stored for form in OTHER_FORMS)


def table_of(name: str, stored: Collection[str]) -> str | None:
    """The table of `bowline.nn.quantize_tied` that is stored in place of the weight `name`, or `None`.

    Example:
        >>> table_of("wte.weight", {"wte.table.values", "wte.table.scale"})
        'wte.table'
    """
    table = name.removesuffix("weight") + "table"
    whole = name not in stored and f"{table}.values" in stored and f"{table}.scale" in stored
    return table if name.endswith("weight") and whole else None


def names_its_table(config: Mapping[str, Any] | None) -> bool:
    """Whether a config has the entry of `quantize_tied`; it has no `quant_method`, so other loaders refuse it."""
    entry = (config or {}).get("quantization_config")
    return isinstance(entry, Mapping) and "quantized_by" in entry and "quant_method" not in entry


def has_one_torchao_table(config: Mapping[str, Any] | None) -> bool:
    """Whether a config says that the head uses the embedding's torchao table, as `bowline quantize` writes it.

    Example:
        >>> entry = {"quant_method": "torchao", "quantized_by": "bowline.quantize_tied"}
        >>> has_one_torchao_table({"quantization_config": {**entry, "include_input_output_embeddings": True}})
        True
    """
    entry = (config or {}).get("quantization_config")
    return (
        isinstance(entry, Mapping)
        and entry.get("quant_method") == "torchao"
        and "quantized_by" in entry
        and entry.get("include_input_output_embeddings") is True
        and entry.get("untie_embedding_weights") in (False, None)
    )
