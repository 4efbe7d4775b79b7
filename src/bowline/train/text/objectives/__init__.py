"""Batches from packed tokens: next tokens, masked tokens, masked spans. A batch depends on seed and number only."""

from __future__ import annotations

from bowline.train.text.objectives.causal import CausalBatches
from bowline.train.text.objectives.masked import MaskedBatches
from bowline.train.text.objectives.spans import SpanBatches, span_lengths
from bowline.train.text.objectives.windows import Windows

__all__ = ["CausalBatches", "MaskedBatches", "SpanBatches", "Windows", "span_lengths"]
