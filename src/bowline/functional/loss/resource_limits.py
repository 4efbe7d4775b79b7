"""Limits on what the loss uses: scratch memory, oneDNN's matrix products, Triton's compiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch

from bowline.errors import UsageError

__all__ = ["Resources", "current", "resources"]

MEBI = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Limits for the backend "chunked".

    Attributes:
        budget: bytes of scratch beyond the gradients; `None` for 64 MiB (for an adapter on a frozen matrix a quarter of
            the matrix, if that is more), and on an accelerator for 1 GiB or twice the gradient of the matrix,
            whichever is more. On an accelerator, a budget too small for the gradient's sums
            in float32 costs up to a fourth product.
        onednn: use oneDNN's products where they are faster, which needs blocks of scratch. With `False` nothing is
            timed, so every process computes the same numbers, as with `torch.use_deterministic_algorithms`.
        compiler: use Triton kernels between the products on a GPU; a CPU needs none.
    """

    budget: int | None = None
    onednn: bool = True
    compiler: bool = True

    def scratch(self, weight: torch.Tensor) -> int:
        """The budget in bytes, for the loss of a head with this matrix."""
        if self.budget is not None:
            return self.budget
        return 64 * MEBI if weight.device.type == "cpu" else max(1024 * MEBI, 2 * weight.nbytes)


_CURRENT: ContextVar[Resources] = ContextVar("resources", default=Resources())  # noqa: B039 - it is frozen


def current() -> Resources:
    """The limits in force here."""
    return _CURRENT.get()


@contextmanager
def resources(**changes: Any) -> Iterator[Resources]:
    """Sets limits for losses inside: `budget=` bytes, `onednn=False`, `compiler=False`; not for threads begun inside.

    Raises:
        UsageError: a budget that is not above 0, a switch that is neither True nor False, or an unknown name.

    Example:
        >>> with resources(budget=16 * 2**20, compiler=False) as allowed:
        ...     allowed.onednn
        True
    """
    unknown = set(changes) - set(Resources.__dataclass_fields__)
    if unknown:
        raise UsageError(f"{sorted(unknown)[0]!r}: expected budget, onednn or compiler")
    budget = changes.get("budget")
    if budget is not None and not budget > 0:
        raise UsageError(f"budget={budget!r}: expected a number of bytes above 0, or None")
    for name in ("onednn", "compiler"):
        if not isinstance(changes.get(name, True), bool):
            raise UsageError(f"{name}={changes[name]!r}: expected True or False")
    token = _CURRENT.set(replace(_CURRENT.get(), **changes))
    try:
        yield _CURRENT.get()
    finally:
        _CURRENT.reset(token)
