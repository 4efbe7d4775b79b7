"""Whether torch.func is at work, whose transforms know nothing of a Function with one `forward`."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["in_torch_func"]


def in_torch_func() -> bool:
    """Inside `torch.func.grad`, `vmap` and the like."""
    ask: Any = getattr(torch._C, "_are_functorch_transforms_active", None)
    return bool(ask is not None and ask())
