"""The two ends of a tie: whether they are one parameter, and which of them is the output head."""

from __future__ import annotations

from collections.abc import Mapping

from bowline.nn.ties.tensor_comparison import state_of
from bowline.nn.tree.slots import Slot
from bowline.nn.tree.table_slots import is_lookup
from bowline.tie import Tie, TieState

__all__ = ["holds", "is_alias", "makes_logits", "there"]


def there(tie: Tie, known: Mapping[str, Slot]) -> bool:
    """Whether the model has both tensors."""
    return tie.target in known and tie.source in known


def holds(tie: Tie, known: Mapping[str, Slot]) -> bool:
    """Whether both ends exist and are one parameter."""
    return there(tie, known) and known[tie.target].tensor is known[tie.source].tensor


def is_alias(tie: Tie, known: Mapping[str, Slot]) -> bool:
    """Whether both ends exist, and are two parameters on one memory."""
    return there(tie, known) and state_of(known[tie.target].tensor, known[tie.source].tensor) is TieState.ALIAS


def makes_logits(target: Slot, source: Slot) -> bool:
    """Whether the target is an output head: a matrix, but not a table, a bias, or a second layer of the same kind.

    Two layers of one kind (the convolutions of UDOP, the repeated heads of a DETR) are not an embedding and its head.
    """
    alike = is_lookup(target.module) or type(target.module) is type(source.module)
    return target.tensor.ndim == 2 and not alike
