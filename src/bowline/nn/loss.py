"""The loss of `bowline.functional`, importable from its former path."""

from bowline.functional.loss import chosen_backend, linear_cross_entropy, linear_logits, resources
from bowline.nn.modules.cross_entropy_module import LinearCrossEntropy

__all__ = ["LinearCrossEntropy", "chosen_backend", "linear_cross_entropy", "linear_logits", "resources"]
