"""Attention: heads, masks, the product itself, and removing heads."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.errors import UsageError
from bowline.models.common.input_checks import check_tensor

__all__ = ["attend", "merge_heads", "packed_mask", "prune_linear", "split_heads", "visible_keys"]


def split_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Split the features into heads: (B, T, H d) to (B, H, T, d)."""
    return x.view(*x.shape[:-1], heads, -1).transpose(1, 2)


def merge_heads(x: torch.Tensor) -> torch.Tensor:
    """Put the heads' features side by side: (B, H, T, d) to (B, T, H d)."""
    return x.transpose(1, 2).flatten(2)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention, softmax(scale query keyᵀ + mask) value, computed by torch's `scaled_dot_product_attention`.

    `query` is (B, H, Q, d), `key` and `value` are (B, H, K, d), and the result is (B, Q, H d). `mask` is boolean, true
    where a query may see a key, or numbers that are added to the scores. A query that sees no key gives zeros.
    """
    mixed = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal and mask is None, scale=scale
    )
    return merge_heads(mixed)


def visible_keys(
    mask: torch.Tensor | None, batch: int, queries: int, keys: int, *, causal: bool, device: torch.device
) -> torch.Tensor | None:
    """Return a boolean mask (B or 1, 1, Q, K) of the keys that each query sees.

    Returns `None` if no mask is needed: torch's `is_causal` flag, or no restriction at all, is enough.

    `mask`: (B, K), nonzero at tokens and 0 at padding; or (B, Q, K) or (B, 1, Q, K), nonzero where a query may see a
    key, for packed sequences and other patterns. The last query is at the last key's position: with a cache, Q < K.

    Raises:
        UsageError: a mask of another shape, or (checked on the CPU only) a mask of numbers to add (0 and -inf).
    """
    if mask is None:
        if not causal or queries == keys or queries == 1:
            return None
        return _causal(queries, keys, device)[None, None]
    check_tensor(mask, "attention_mask")
    if mask.ndim == 2 and mask.shape == (batch, keys):
        seen = mask[:, None, None, :] != 0
    elif mask.ndim == 3 and mask.shape[0] in (1, batch) and tuple(mask.shape[1:]) == (queries, keys):
        seen = mask[:, None] != 0
    elif mask.ndim == 4 and mask.shape[0] in (1, batch) and tuple(mask.shape[1:]) == (1, queries, keys):
        seen = mask != 0
    else:
        raise UsageError(
            f"attention_mask {tuple(mask.shape)}: expected {(batch, keys)}, or {(batch, queries, keys)} with a row for "
            "each query",
            help="with past_key_values the mask counts the tokens in the cache too",
        )
    if (
        mask.is_floating_point()
        and mask.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and (mask < 0).any()
    ):
        raise UsageError(
            f"attention_mask has {float(mask.min()):g}: expected 0 for hidden tokens and 1 for "
            "the others, not numbers to add",
            help="if the mask has 0 and -inf, pass mask == 0",
        )
    return seen & _causal(queries, keys, device) if causal else seen


def _causal(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def packed_mask(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the mask of rows that hold several sequences: (B, T) positions to (B, T, T), true within one sequence.

    A new sequence begins wherever a position does not follow the one before it.
    """
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    begins[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    number = begins.cumsum(-1)
    return number[:, :, None] == number[:, None, :]


def prune_linear(weight: nn.Parameter, keep: torch.Tensor, axis: int) -> nn.Parameter:
    """Return a parameter with only the rows (`axis` 0) or columns (`axis` 1) `keep`."""
    return nn.Parameter(weight.detach().index_select(axis, keep).contiguous(), requires_grad=weight.requires_grad)
