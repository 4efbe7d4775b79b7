"""Generation: greedy, sampled, by beam search, as a stream; and filling masks."""

from __future__ import annotations

from bowline.models.generation.fill_mask import Candidate, FilledMask, fill_mask
from bowline.models.generation.generation_mixin import GenerationMixin

__all__ = ["Candidate", "FilledMask", "GenerationMixin", "fill_mask"]
