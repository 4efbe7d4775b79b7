"""The loss at the output head: cross entropy of `hidden @ weight.T`, by one function for every family.

`cross_entropy` is the function, `module` its twin. `reference` says what is computed, `kept` keeps the logits, and
`chunked` never has them all; `choose` picks. Beneath `chunked`: `sweep` and its files by device, on a CPU `turned` (by
blocks of the vocabulary) and `by_rows`, on a GPU `by_vocabulary` (where chunks do not fit); `chunks` (how much at
once), `softmax` (between the products), `products` and `fastest` (by which library), `resources` (what may be used).
"""

from __future__ import annotations

from bowline.functional.loss.backend_choice import chosen_backend
from bowline.functional.loss.cross_entropy import linear_cross_entropy
from bowline.functional.loss.logits import linear_logits
from bowline.functional.loss.resource_limits import resources

__all__ = ["chosen_backend", "linear_cross_entropy", "linear_logits", "resources"]
