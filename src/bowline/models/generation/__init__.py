"""Text from models: greedy, sampled, by beams; masks filled in."""

from __future__ import annotations

__all__ = ["GenerationMixin"]


class GenerationMixin:
    """What a class with a head for next tokens can do."""
