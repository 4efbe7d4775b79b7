"""`LossRecord`: how the losses of a model were computed, and why the logits of some were computed in full."""

from __future__ import annotations

import warnings
from collections import Counter

__all__ = ["LossRecord"]


class LossRecord:
    """Counts the losses of a model by the backend that computed them, and full logits by what asked for them.

    The first time for each reason there is a warning, because full logits cost the memory that the loss should save.

    Attributes:
        computed: by backend, the number of losses computed without full logits outside that backend.
        fallbacks: by reason, how often full logits were computed for something that takes gradients.

    Example:
        >>> record = LossRecord()
        >>> record.count("chunked")
        >>> record.computed, record.fallbacks
        (Counter({'chunked': 1}), Counter())
    """

    def __init__(self) -> None:
        self.computed: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()

    def count(self, backend: str) -> None:
        """Count a loss."""
        self.computed[backend] += 1

    def fall_back(self, reason: str) -> None:
        """Count full logits, and warn if it is the first time for this reason."""
        self.fallbacks[reason] += 1
        if self.fallbacks[reason] == 1:
            warnings.warn(
                f"use_tied_loss: all logits are computed and kept, because of {reason}; the loss is right, but takes "
                "the memory that it took before",
                stacklevel=2,
            )
