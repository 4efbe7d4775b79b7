"""Reads what a loader other than transformers knows: `tables/vllm.json`, `llama_cpp.json` and `mlx_lm.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["loader_table"]


@cache
def loader_table(loader: str) -> Mapping[str, Any]:
    """The table of one loader.

    Example:
        >>> loader_table("llama_cpp")["architectures"]["GPT2LMHeadModel"]["head_when_stored"]
        'kept'
    """
    content: Mapping[str, Any] = json.loads((Path(__file__).parent / "tables" / f"{loader}.json").read_bytes())
    return content
