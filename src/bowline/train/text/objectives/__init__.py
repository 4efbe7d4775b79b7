"""Packed tokens to batches: next tokens, hidden tokens, hidden spans. Each batch is a function of seed and number."""

from __future__ import annotations

from bowline.train.text.objectives.causal import CausalBatches
from bowline.train.text.objectives.masked import MaskedBatches
from bowline.train.text.objectives.spans import SpanBatches, span_lengths
from bowline.train.text.objectives.windows import Windows

__all__ = ["CausalBatches", "MaskedBatches", "SpanBatches", "Windows", "span_lengths"]
