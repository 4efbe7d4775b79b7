"""Deferred logits of a head under torch's `ColwiseParallel`, whose hook places what the head returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bowline.functional.deferred.deferred_logits import DeferredLogits
from bowline.functional.deferred.head_product import Product

__all__ = ["SplitDeferredLogits"]


class SplitDeferredLogits(DeferredLogits):
    """Deferred logits (..., V) with the methods of a DTensor that such a hook calls.

    They stay deferred where the hook wants them split by tokens, or whole on every process. Operations on them see
    logits that are whole.

    Attributes:
        placements: as a DTensor's; at first split by tokens.
    """

    placements: tuple[Any, ...]

    @classmethod
    def of(cls, product: Product) -> SplitDeferredLogits:
        """The logits of a matrix whose rows are split over processes."""
        from torch.distributed.tensor import Shard

        return cls._placed(product, (Shard(len(product.shape) - 1),))

    @classmethod
    def _placed(cls, product: Product, placements: tuple[Any, ...]) -> SplitDeferredLogits:
        found: Any = DeferredLogits(product)
        found.__class__ = cls
        found.placements = placements
        made: SplitDeferredLogits = found
        return made

    def redistribute(self, device_mesh: Any = None, placements: Sequence[Any] | None = None, **options: Any) -> Any:
        """As `DTensor.redistribute`: computes logits only to split them along another axis than that of the tokens."""
        last = len(self.product.shape) - 1
        wanted = tuple(placements or self.placements)
        if len(wanted) == 1 and (wanted[0].is_replicate() or wanted[0].is_shard(last) or wanted[0].is_shard(-1)):
            return self._placed(self.product, wanted)
        return self._computed(f"redistribute to {list(wanted)}").redistribute(device_mesh, wanted, **options)

    def to_local(self, **options: Any) -> Any:
        """As `DTensor.to_local`: deferred logits if every process has all of them."""
        if self.placements[0].is_replicate():
            return DeferredLogits(self.product)
        return self._computed("to_local").to_local(**options)

    def full_tensor(self, **_: Any) -> DeferredLogits:
        """As `DTensor.full_tensor`: deferred logits, whole on every process."""
        return DeferredLogits(self.product)

    def _computed(self, reason: str) -> Any:
        found = self.product.split_logits()
        if found.requires_grad and self.product.record is not None:
            self.product.record.fall_back(f"{reason} between head and loss")
        return found
