"""Whether a bias adds nothing, as BART's `final_logits_bias`, of zeros: of what autocast narrowed it makes float32."""

from __future__ import annotations

import torch
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["is_of_zeros"]

_FOUND = WeakIdKeyDictionary()


def is_of_zeros(bias: torch.Tensor) -> bool:
    """Looked at once for as long as it is not written to: on a GPU a look waits for the queue."""
    version = None if bias.is_inference() else bias._version
    known = _FOUND.get(bias)
    if known is None or version is None or known[0] != version:
        known = _FOUND[bias] = (version, not bias.any().item())
    found: bool = known[1]
    return found
