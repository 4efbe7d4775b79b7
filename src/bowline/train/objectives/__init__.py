"""Packed tokens to batches: next tokens, hidden tokens, hidden spans. Each batch is a function of seed and number."""

from __future__ import annotations

from bowline.train.objectives.causal import CausalBatches
from bowline.train.objectives.masked import MaskedBatches
from bowline.train.objectives.spans import SpanBatches, span_lengths
from bowline.train.objectives.windows import Windows

__all__ = ["CausalBatches", "MaskedBatches", "SpanBatches", "Windows", "span_lengths"]
