"""What the families share: activations, masks, attention, the checks of what a person gives a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.errors import ConfigError, UsageError

__all__ = [
    "activation",
    "attend",
    "attention_mask",
    "check_embeds",
    "check_ids",
    "check_labels",
    "merge_heads",
    "packed_mask",
    "prune_linear",
    "shifted",
    "split_heads",
]

gelu_tanh = partial(F.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": gelu_tanh,  # transformers spells the tanh form out; this is the same function, fused
    "gelu_fast": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "mish": F.mish,
    "linear": lambda x: x,
}


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function that configs call `name`.

    Raises:
        ConfigError: none of that name.
    """
    if name not in ACTIVATIONS:
        raise ConfigError(f"the activation {name!r}: expected one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def split_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(B, T, H d) to (B, H, T, d)."""
    return x.view(*x.shape[:-1], heads, -1).transpose(1, 2)


def merge_heads(x: torch.Tensor) -> torch.Tensor:
    """(B, H, T, d) to (B, T, H d)."""
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
    """softmax(scale query keyᵀ + mask) value, by torch: (B, H, Q, d), (B, H, K, d) twice, to (B, Q, H d).

    `mask` is true where a key is seen, or numbers to add. A query that sees nothing gives zeros.
    """
    mixed = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal and mask is None, scale=scale
    )
    return merge_heads(mixed)


def attention_mask(
    mask: torch.Tensor | None, batch: int, queries: int, keys: int, *, causal: bool, device: torch.device
) -> torch.Tensor | None:
    """Which keys each query sees, (B or 1, 1, Q, K) of truth values; `None` where torch's own causal flag says it all.

    `mask`: (B, K), nonzero at tokens and 0 at padding; or (B, Q, K) or (B, 1, Q, K), nonzero where a query may look,
    for packed sequences and whatever else. The last query is the last key: with a cache, Q < K.

    Raises:
        UsageError: a mask of another shape.
    """
    if mask is None:
        if not causal or queries == keys or queries == 1:
            return None
        return _causal(queries, keys, device)[None, None]
    if mask.ndim == 2 and mask.shape == (batch, keys):
        seen = mask[:, None, None, :] != 0
    elif mask.ndim in (3, 4) and mask.shape[0] in (1, batch) and tuple(mask.shape[-2:]) == (queries, keys):
        seen = (mask if mask.ndim == 4 else mask[:, None]) != 0
    else:
        raise UsageError(
            f"attention_mask {tuple(mask.shape)}: expected {(batch, keys)}, or {(batch, queries, keys)} with a row for "
            "each query",
            help="with past_key_values the mask counts the tokens in the cache too",
        )
    return seen & _causal(queries, keys, device) if causal else seen


def _causal(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def packed_mask(position_ids: torch.Tensor) -> torch.Tensor:
    """Several sequences in one row, told apart where the positions begin anew: (B, T) to (B, T, T), true within one."""
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    begins[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    number = begins.cumsum(-1)
    return number[:, :, None] == number[:, None, :]


def check_ids(ids: torch.Tensor, size: int, what: str = "input_ids") -> None:
    """Integers (B, T), at least one of them, each a row of the table.

    Values are looked at on the CPU only: elsewhere that would stop the queue, and the kernel's own assertion must do.

    Raises:
        UsageError: anything else.
    """
    if not isinstance(ids, torch.Tensor):
        raise UsageError(f"{what} is a {type(ids).__name__}: expected a tensor", help="torch.tensor([[...]]) makes one")
    if ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32):
        raise UsageError(f"{what} {tuple(ids.shape)} of {ids.dtype}: expected integers (batch, length)")
    if 0 in ids.shape:
        raise UsageError(f"{what} {tuple(ids.shape)}: an empty batch, expected at least one token")
    if torch.compiler.is_compiling() or ids.device.type != "cpu":
        return
    low, high = torch.aminmax(ids)
    if low < 0 or high >= size:
        wrong = int(low) if low < 0 else int(high)
        raise UsageError(
            f"{what} has {wrong}, and the table has {size} rows: expected 0 to {size - 1}",
            help="the tokenizer and the model do not belong together, or resize_vocab(model, n) first",
        )


def check_embeds(embeds: torch.Tensor, width: int, what: str = "inputs_embeds") -> None:
    """Numbers (B, T, D), at least one row of them.

    Raises:
        UsageError: anything else.
    """
    if embeds.ndim != 3 or embeds.shape[-1] != width or not embeds.is_floating_point():
        raise UsageError(f"{what} {tuple(embeds.shape)} of {embeds.dtype}: expected numbers (batch, length, {width})")
    if 0 in embeds.shape:
        raise UsageError(f"{what} {tuple(embeds.shape)}: an empty batch, expected at least one token")


def check_labels(labels: torch.Tensor, shape: tuple[int, ...], size: int, ignore_index: int = -100) -> None:
    """Integers of `shape`, each a token or `ignore_index`: also those that a shift drops.

    Raises:
        UsageError: anything else. Values are looked at on the CPU only, as in `check_ids`.
    """
    if labels.shape != shape or labels.dtype != torch.int64:
        raise UsageError(f"labels {tuple(labels.shape)} of {labels.dtype}: expected torch.int64 {tuple(shape)}")
    if torch.compiler.is_compiling() or labels.device.type != "cpu":
        return
    wrong = (labels != ignore_index) & ((labels < 0) | (labels >= size))
    if wrong.any():
        raise UsageError(
            f"label {int(labels[wrong][0])}: expected 0 to {size - 1}, or {ignore_index} where there is none"
        )


def shifted(labels: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """Each position's next token, and none at the last: (B, T) to (B, T)."""
    return F.pad(labels[:, 1:], (0, 1), value=ignore_index)


def prune_linear(weight: nn.Parameter, keep: torch.Tensor, axis: int) -> nn.Parameter:
    """The parameter with the rows or columns `keep` alone."""
    return nn.Parameter(weight.detach().index_select(axis, keep).contiguous(), requires_grad=weight.requires_grad)
