"""Deferred logits: computed only when something needs them; the loss does not."""

from bowline.functional.deferred.deferred_logits import DeferredLogits
from bowline.functional.deferred.head_product import Product
from bowline.functional.deferred.loss_record import LossRecord

__all__ = ["DeferredLogits", "LossRecord", "Product"]
