"""`on_conflict`: what becomes of the ends of a tie if they hold different values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch

from bowline.errors import TieError, UsageError
from bowline.nn.ties.tensor_comparison import state_of
from bowline.tie import TieState

__all__ = ["Conflict", "ConflictOrUntie", "check_policy", "expect_equal_targets"]

Conflict = Literal["raise", "source", "target"]
"""Refuse, keep the source's values (the embedding's), or keep the target's (the head's)."""
ConflictOrUntie = Literal["raise", "source", "target", "untie"]
"""The same, or keep both: the tie is undone."""


def check_policy(on_conflict: str, policies: Any = Conflict) -> None:
    """Raise `UsageError` unless `on_conflict` is one of `policies`.

    Example:
        >>> check_policy("source")
    """
    known = get_args(policies)
    if on_conflict not in known:
        expected = f"{', '.join(repr(one) for one in known[:-1])} or {known[-1]!r}"
        raise UsageError(f"on_conflict={on_conflict!r}: expected {expected}", argument="on_conflict")


def expect_equal_targets(
    source: str,
    targets: Sequence[tuple[str, torch.Tensor]],
    *,
    help: str,
    differ: Callable[[torch.Tensor, torch.Tensor], bool] = lambda one, other: state_of(one, other) is TieState.DIVERGED,
) -> None:
    """Raise `TieError` if two targets of one source differ from each other: "target" could keep only one of them."""
    first, tensor = targets[0]
    for other, its in targets[1:]:
        if differ(its, tensor):
            raise TieError(
                f"{first} and {other} are both tied to {source} and differ from each other; on_conflict='target' can "
                "keep only one of them",
                help=help,
            )
