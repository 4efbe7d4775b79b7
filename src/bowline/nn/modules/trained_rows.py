"""PEFT's trained rows (`trainable_token_indices`) without a copy of the whole matrix at either end."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.functional.deferred.deferred_logits import DeferredLogits
from bowline.functional.deferred.graph_breaks import in_one_graph, uncompiled

__all__ = ["TrainedRows"]


class TrainedRows:
    """A mixin before PEFT's `TrainableTokensLayer`, which copies the matrix (V, D) and writes its rows into the copy.

    A lookup replaces the rows of its own tokens instead, (N, D), and a head the logits of those k tokens, (N, k). What
    it cannot do exactly so, it leaves to PEFT: a head with a bias (PEFT drops the bias), a lookup with `max_norm`,
    `sparse` or `scale_grad_by_freq`, and one graph of `torch.compile`.
    """

    def forward_adapters(self, x: torch.Tensor, active_adapters: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        layer: Any = self
        plain = layer.disable_adapters or not active_adapters or layer.merged or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        one_graph = torch.compiler.is_compiling() and in_one_graph()
        if plain or one_graph or not _is_thin(layer.base_layer):
            theirs: Any = super()
            found: torch.Tensor = theirs.forward_adapters(x, active_adapters, *args, **kwargs)
            return found
        return _forward(layer, x, list(active_adapters))


def _is_thin(base: nn.Module) -> bool:
    if isinstance(base, nn.Embedding):
        return base.max_norm is None and not base.sparse and not base.scale_grad_by_freq
    return isinstance(base, nn.Linear) and base.bias is None


@uncompiled
def _forward(layer: Any, x: torch.Tensor, adapters: list[str]) -> torch.Tensor:
    layer._check_overlapping_tokens(adapters)
    base = layer.base_layer
    rows = torch.cat([layer.trainable_tokens_delta[name].to(base.weight) for name in adapters])
    ids = torch.tensor([token for name in adapters for token in layer.token_indices[name]], device=base.weight.device)
    ids = torch.where(ids < 0, ids + len(base.weight), ids)
    if isinstance(base, nn.Embedding):
        return _looked_up(layer, x, rows, ids)
    logits: torch.Tensor = base(x)
    columns = F.linear(x, rows)
    if isinstance(logits, DeferredLogits) and (found := logits.with_columns(ids, columns)) is not None:
        return found
    return logits.index_copy(-1, ids, columns.to(logits.dtype))


def _looked_up(layer: Any, x: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    base = layer.base_layer
    found: torch.Tensor = base(x)
    ordered, order = ids.sort()
    at = torch.searchsorted(ordered, x.to(ordered.dtype)).clamp(max=len(ordered) - 1)
    own = ordered[at] == x
    if base.padding_idx is not None:  # PEFT's lookup gives the padding row no gradient
        rows = torch.where((ids == base.padding_idx)[:, None], rows.detach(), rows)
    theirs = F.embedding(order[at], rows)
    scale = layer._get_embed_scale()
    if scale is not None:
        theirs = theirs * scale.to(theirs.dtype)
    return torch.where(own[..., None], theirs, found)
