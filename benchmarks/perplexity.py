"""Perplexity of SmolLM2-135M on English text, with its tied matrix in float, int8 and int4."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from benchmarks.measure import machine
from bowline.nn import quantize_tied

__all__ = ["perplexities", "run"]

MODEL = Path(__file__).parents[1] / ".peers" / "real" / "smollm2"
FORMS: dict[str, Mapping[str, Any]] = {
    "bfloat16": {},
    "int8, a scale a row": {"dtype": "int8"},
    "int8, groups of 32": {"dtype": "int8", "group_size": 32},
    "int4, groups of 32": {"dtype": "int4"},
}
WINDOW, WINDOWS = 512, 8
LINE = 120


def run() -> str:
    """Each form's perplexity beside bfloat16's, as Markdown."""
    found = perplexities(FORMS)
    base = found["bfloat16"]
    lines = [
        "# Perplexity with a quantised tied table",
        "",
        fill(
            f"SmolLM2-135M (`make .peers/real/ready`) on {WINDOWS} windows of {WINDOW} tokens, spread evenly over the "
            "Python reference's text in `pydoc_data.topics`. The matrix is quantised from bfloat16 values; the "
            "arithmetic is float32's, for every form.",
            LINE,
        ),
        "",
        machine(["bowline-ties", "torch", "transformers"]),
        "",
        "| embedding and head | perplexity | against bfloat16 |",
        "|---|---|---|",
        *(f"| {name} | {value:.3f} | {100 * (value / base - 1):+.2f}% |" for name, value in found.items()),
    ]
    return "\n".join(lines)


@torch.no_grad()
def perplexities(forms: Mapping[str, Mapping[str, Any]], windows: int = WINDOWS) -> dict[str, float]:
    """The perplexity of each form (arguments of `quantize_tied`; none: float), by its name."""
    transformers: Any = importlib.import_module("transformers")
    topics: Mapping[str, str] = importlib.import_module("pydoc_data.topics").topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = transformers.AutoTokenizer.from_pretrained(MODEL)(text, return_tensors="pt").input_ids[0]
    step = (len(ids) - WINDOW) // windows
    rows = torch.stack([ids[start : start + WINDOW] for start in range(0, windows * step, step)])
    found = {}
    for name, form in forms.items():
        model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16).eval()
        if form:
            quantize_tied(model, **form)
        model = model.float()
        losses = [F.cross_entropy(model(row[None]).logits[0, :-1], row[1:]).item() for row in rows]
        found[name] = math.exp(sum(losses) / len(losses))
    return found
