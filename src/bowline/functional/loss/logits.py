"""`linear_logits`: the logits of a head, with scale, softcap and masked tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.errors import UsageError
from bowline.functional.loss.adapter_terms import AdapterTerms
from bowline.functional.loss.loss_options import check_ends, masked_ids
from bowline.functional.row_shard import RowShard, is_dtensor

__all__ = ["cap_slope", "linear_logits", "scaled_and_capped"]


def linear_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    mask_ids: Sequence[int] | None = None,
    adapters: AdapterTerms | None = None,
) -> torch.Tensor:
    """logits = c tanh(s (hidden weightᵀ + bias) / c), without tanh if there is no softcap c; `mask_ids` at -inf.

    hidden (..., D), weight (V, D), bias (V,); logits (..., V) in the dtype of the product. `adapters` change the
    product first. Of a DTensor weight that is `Shard(0)` the logits are a DTensor, split by tokens.

    Raises:
        UsageError: shapes that do not fit, a masked id that is no token, a softcap that is not above 0 and finite, or
            `adapters` of a DTensor.

    Example:
        >>> linear_logits(torch.ones(1, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), mask_ids=[0])
        tensor([[-inf, 7.]])
    """
    check_ends(hidden, weight, bias, logit_scale, softcap)
    masked = masked_ids(mask_ids, weight.shape[0])
    if is_dtensor(weight):
        found: torch.Tensor = _split_logits(hidden, weight, bias, logit_scale, softcap, masked, adapters)
        return found
    logits = F.linear(hidden, weight, bias)
    if adapters is not None:
        adapters.check(hidden, weight)
        logits = adapters.applied(logits)
    logits = scaled_and_capped(logits, logit_scale, softcap)
    if masked:
        logits = logits.index_fill(-1, torch.as_tensor(masked, device=logits.device), -torch.inf)
    return logits


# traced, the gradients of replicated DTensors would not be summed
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _split_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    logit_scale: float,
    softcap: float | None,
    masked: Sequence[int],
    adapters: AdapterTerms | None,
) -> torch.Tensor:
    """Each process's logits, of its rows."""
    if adapters is not None:
        raise UsageError(
            "adapters of a head whose rows are split over processes: expected a head without them",
            help="merge_lora(model) before it is split",
            argument="adapters",
        )
    shard = RowShard.of(weight)
    local = linear_logits(
        shard.replicated(hidden),
        shard.part(),
        bias=None if bias is None else shard.rows_of(bias),
        logit_scale=logit_scale,
        softcap=softcap,
        mask_ids=[token - shard.first for token in masked if shard.first <= token < shard.last],
    )
    return shard.split(local)


def scaled_and_capped(x: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
    """y = c tanh(s x / c), or s x without a softcap c; x itself if they are equal."""
    y = x if scale == 1.0 else x * scale
    return y if softcap is None else torch.tanh(y / softcap) * softcap


def cap_slope(y: torch.Tensor, softcap: float) -> torch.Tensor:
    """The derivative of y = c tanh(x / c) by x: 1 - (y / c)²."""
    return 1 - (y / softcap).square()
