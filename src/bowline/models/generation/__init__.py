"""Text from models: greedy, sampled, by beams, as a stream; masks filled in."""

from __future__ import annotations

from bowline.models.generation.fill_mask import Candidate, FilledMask, fill_mask
from bowline.models.generation.generation_mixin import GenerationMixin

__all__ = ["Candidate", "FilledMask", "GenerationMixin", "fill_mask"]
