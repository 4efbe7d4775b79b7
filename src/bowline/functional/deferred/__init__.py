"""Deferred logits: computed only when something needs them; the loss does not."""

from bowline.functional.deferred.deferred_logits import DeferredLogits
from bowline.functional.deferred.head_product import Product

__all__ = ["DeferredLogits", "Product"]
