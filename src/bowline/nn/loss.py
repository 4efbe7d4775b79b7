"""The loss of `bowline.functional`, under the path that docs gave before it had a room of its own."""

from bowline.functional.loss import chosen_backend, linear_cross_entropy, linear_logits, resources
from bowline.nn.modules.cross_entropy_module import LinearCrossEntropy

__all__ = ["LinearCrossEntropy", "chosen_backend", "linear_cross_entropy", "linear_logits", "resources"]
