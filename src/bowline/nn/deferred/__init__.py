"""Logits that are computed when something needs them, which a loss does not."""

from bowline.nn.deferred.logits import DeferredLogits
from bowline.nn.deferred.product import Product, version_of

__all__ = ["DeferredLogits", "Product", "version_of"]
