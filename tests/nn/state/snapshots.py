"""Everything that a refused call must leave as it was: bits, objects, flags."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.nn.models import flag_levels

__all__ = ["bits", "snapshot"]


def bits(tensor: torch.Tensor) -> bytes:
    """The values, a NaN like any other."""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def snapshot(model: nn.Module) -> dict[str, Any]:
    """What the model is: compare two with `==`."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {
        "tensors": {
            name: (id(tensor), tensor.dtype, tensor.requires_grad, "meta" if tensor.is_meta else bits(tensor))
            for name, tensor in named
        },
        "gradients": {name: None if tensor.grad is None else bits(tensor.grad) for name, tensor in named},
        "flags": flag_levels(model),
        "told": dict(getattr(model, "all_tied_weights_keys", None) or {}),
        "conversions": list(getattr(model, "_weight_conversions", None) or []),
    }
