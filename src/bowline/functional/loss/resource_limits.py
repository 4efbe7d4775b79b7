"""What a loss may use: memory for its scratch, another library's products, a compiler on a GPU."""

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
    """What `chunked` may use.

    Attributes:
        budget: bytes of scratch beyond the gradients; `None` for 64 MiB, and on an accelerator for 1 GiB or twice the
            gradient of the matrix, whatever is more. There a budget that has no room for the gradient's sums in
            float32 costs up to a fourth product.
        onednn: products by oneDNN where it is the faster, which needs blocks of scratch. Without, none are timed, so
            the same numbers come out of every process, as with `torch.use_deterministic_algorithms`.
        compiler: Triton's, for what is between the products on a GPU; a CPU needs none.
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
    """What may be used here."""
    return _CURRENT.get()


@contextmanager
def resources(**changes: Any) -> Iterator[Resources]:
    """Inside, a loss may use this: `budget=` bytes, `onednn=False`, `compiler=False`. Threads begun inside may not.

    Raises:
        UsageError: a budget that is not more than 0, a switch that is neither True nor False, or another name.

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
        raise UsageError(f"budget={budget!r}: expected bytes, more than 0, or None")
    for name in ("onednn", "compiler"):
        if not isinstance(changes.get(name, True), bool):
            raise UsageError(f"{name}={changes[name]!r}: expected True or False")
    token = _CURRENT.set(replace(_CURRENT.get(), **changes))
    try:
        yield _CURRENT.get()
    finally:
        _CURRENT.reset(token)
