"""Detects torch.func and vmap, which support neither our autograd Functions nor reading values."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["in_torch_func", "is_batched"]


def in_torch_func() -> bool:
    """Whether this runs inside `torch.func.grad`, `vmap` and the like."""
    ask: Any = getattr(torch._C, "_are_functorch_transforms_active", None)
    return bool(ask is not None and ask())


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether vmap batches the tensor, as in a backward pass with `is_grads_batched`; it then has no memory."""
    if torch.compiler.is_compiling():
        return False
    for name in ("is_batchedtensor", "is_legacy_batchedtensor"):
        ask: Any = getattr(torch._C._functorch, name, None)
        if ask is not None and ask(tensor):
            return True
    return False
