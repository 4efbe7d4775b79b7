"""The loss at the output head: cross entropy of `hidden @ weight.T`, one function for every model family.

- `cross_entropy`: the function; `bowline.nn.LinearCrossEntropy` is the same as a module.
- `loss_options`: the options of the loss, and the checks of its arguments.
- `reference`: the definition of the loss, in a few lines of torch.
- `full_logits`: the backend "logits", which keeps all logits.
- `chunked`: the backend "chunked", which never holds all logits at once; `compiled_operator` is its form under
  `torch.compile`, `float16_scaling` keeps its float16 gradients from underflowing.
- `adapter_terms`: what adapters (LoRA, trained rows) change in the logits.
- `torch_backend`, `peer_backends`: the same loss computed by torch and by other libraries.
- `backend_choice`: which backend `auto` runs; `resource_limits`: the memory and libraries that it may use.
- `logits`: the logits themselves. `once_differentiable`: makes second-order gradients raise.
- `chunks`: how "chunked" does its work.
"""

from __future__ import annotations

from bowline.functional.loss.adapter_terms import AdapterTerms
from bowline.functional.loss.backend_choice import chosen_backend
from bowline.functional.loss.cross_entropy import linear_cross_entropy
from bowline.functional.loss.logits import linear_logits
from bowline.functional.loss.resource_limits import resources

__all__ = ["AdapterTerms", "chosen_backend", "linear_cross_entropy", "linear_logits", "resources"]
