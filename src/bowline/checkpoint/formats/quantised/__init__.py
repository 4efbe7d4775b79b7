"""Weights that are stored as codes: recognises the layout by names, dtypes, shapes and config, and dequantises rows.

One file a layout. Recognising needs headers alone, except where the shape stands in values (compressed-tensors,
bitsandbytes' 4 bits). Everything is hostile until checked: what does not fit becomes the table's `problem`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from bowline.checkpoint.formats.quantised.awq import awq
from bowline.checkpoint.formats.quantised.bitsandbytes import bitsandbytes_4bit, bitsandbytes_8bit
from bowline.checkpoint.formats.quantised.bowline_table import bowline_table
from bowline.checkpoint.formats.quantised.compressed_tensors import pack_quantized
from bowline.checkpoint.formats.quantised.gptq import gptq
from bowline.checkpoint.formats.quantised.mlx import mlx
from bowline.checkpoint.formats.quantised.quantised_weight import (
    SERVES_BOTH,
    DequantisedRows,
    Facts,
    QuantisedWeight,
    StoredBytes,
)
from bowline.checkpoint.formats.quantised.scaled_codes import scaled_codes
from bowline.checkpoint.formats.quantised.torchao import torchao
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.errors import FormatError

__all__ = ["QuantisedWeight", "DequantisedRows", "StoredBytes", "recognise"]

LAYOUTS: Final[Mapping[str, Callable[[Facts], QuantisedWeight | None]]] = {
    "MLX": mlx,
    "GPTQ": gptq,
    "AWQ": awq,
    "compressed-tensors": pack_quantized,
    "bitsandbytes int8": bitsandbytes_8bit,
    "bitsandbytes 4 bits": bitsandbytes_4bit,
    "torchao": torchao,
    "8-bit codes": scaled_codes,
    SERVES_BOTH: bowline_table,
}
"""Each layout's name where its details could not be read, and the function that recognises it."""


def recognise(
    name: str,
    tensors: Mapping[str, StoredTensor],
    config: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
    stored: StoredBytes | None = None,
) -> QuantisedWeight | None:
    """The weight `name` as the codes that it is stored as, or `None` if it is not stored quantised.

    Arguments:
        name: the name of the weight: `"lm_head.weight"`.
        tensors: every stored tensor by name.
        config: the content of `config.json`.
        metadata: the metadata of the safetensors files.
        stored: reads tensors (`Checkpoint.stored_bytes`); without it only headers are looked at.

    Example:
        >>> names = {"lm_head.qweight": ("I32", (2, 32)), "lm_head.scales": ("F16", (1, 32))}
        >>> names |= {"lm_head.qzeros": ("I32", (1, 4))}
        >>> tensors = {name: StoredTensor(name, *kind, "model.safetensors", 0, 64) for name, kind in names.items()}
        >>> recognise("lm_head.weight", tensors).layout
        'GPTQ 4 bits, a scale per row'
    """
    if not name.endswith("weight"):
        return None
    facts = Facts(name=name, tensors=tensors, config=config or {}, metadata=metadata or {}, stored=stored)
    for layout, recognised in LAYOUTS.items():
        try:
            found = recognised(facts)
        except FormatError as error:
            stem = facts.stem
            parts = {other: tensor for other, tensor in tensors.items() if _belongs(other, stem)}
            return QuantisedWeight(name=name, layout=layout, parts=parts, problem=error.message)
        if found is not None:
            return found
    return None


def _belongs(name: str, stem: str) -> bool:
    """Whether a tensor belongs to a module: its name is the stem and what no further module has."""
    return name.startswith(stem) and not name.endswith(("bias", "input_scale"))
