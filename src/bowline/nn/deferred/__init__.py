"""Logits that are computed when something needs them, which a loss does not; and where compiled graphs end for it."""

from bowline.nn.deferred.head import DeferringHead
from bowline.nn.deferred.logits import DeferredLogits
from bowline.nn.deferred.lookup import UncompiledLookup
from bowline.nn.deferred.product import Product

__all__ = ["DeferredLogits", "DeferringHead", "Product", "UncompiledLookup"]
