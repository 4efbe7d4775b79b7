"""What the families share: activations, masks, attention, the checks of what a person gives a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.errors import ConfigError, UsageError
from bowline.functional.loss import linear_cross_entropy

__all__ = [
    "activation",
    "attend",
    "visible_keys",
    "check_beside",
    "check_embeds",
    "check_ids",
    "check_kept",
    "check_labels",
    "check_tensor",
    "classified",
    "looked_up",
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
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ConfigError(f"the activation {name!r:.60}: expected one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def looked_up(table: nn.Module, ids: torch.Tensor, scale: float) -> torch.Tensor:
    """Rows of the table, (B, T) to (B, T, D), times `embed_scale`."""
    rows: torch.Tensor = table(ids)
    return rows if scale == 1.0 else rows * scale


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


def visible_keys(
    mask: torch.Tensor | None, batch: int, queries: int, keys: int, *, causal: bool, device: torch.device
) -> torch.Tensor | None:
    """Which keys each query sees, (B or 1, 1, Q, K) of truth values; `None` where torch's own causal flag says it all.

    `mask`: (B, K), nonzero at tokens and 0 at padding; or (B, Q, K) or (B, 1, Q, K), nonzero where a query may look,
    for packed sequences and whatever else. The last query is the last key: with a cache, Q < K.

    Raises:
        UsageError: a mask of another shape, or (seen on the CPU) one of numbers to add (0 and -inf).
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
            f"attention_mask has {float(mask.min()):g}: expected 0 where nothing is seen, and nothing to add",
            help="of a mask of 0 and -inf, give mask == 0",
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


def check_tensor(value: Any, what: str) -> None:
    """A tensor.

    Raises:
        UsageError: anything else.
    """
    if not isinstance(value, torch.Tensor):
        raise UsageError(f"{what} is a {type(value).__name__}: expected a tensor", help="torch.tensor(...) makes one")


def check_ids(ids: torch.Tensor, size: int, what: str = "input_ids") -> None:
    """Integers (B, T), at least one of them, each a row of the table.

    Values are looked at on the CPU only: elsewhere that would stop the queue, and the kernel's own assertion must do.

    Raises:
        UsageError: anything else.
    """
    check_tensor(ids, what)
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


def check_beside(ids: torch.Tensor, batch: int, length: int, size: int, what: str) -> None:
    """Integers (B, T) or (1, T) beside the tokens, each a row of its table.

    Raises:
        UsageError: anything else.
    """
    check_ids(ids, size, what)
    if ids.shape[0] not in (1, batch) or ids.shape[1] != length:
        raise UsageError(f"{what} {tuple(ids.shape)}: expected {(batch, length)}, a number for each token")


def check_kept(logits_to_keep: int) -> None:
    """A number of positions from the end, or 0 for all.

    Raises:
        UsageError: anything else.
    """
    if not isinstance(logits_to_keep, int) or logits_to_keep < 0:
        raise UsageError(f"logits_to_keep={logits_to_keep!r:.60}: expected 0, for all, or a number of positions")


def check_embeds(embeds: torch.Tensor, width: int, what: str = "inputs_embeds") -> None:
    """Numbers (B, T, D), at least one row of them.

    Raises:
        UsageError: anything else.
    """
    check_tensor(embeds, what)
    if embeds.ndim != 3 or embeds.shape[-1] != width or not embeds.is_floating_point():
        raise UsageError(f"{what} {tuple(embeds.shape)} of {embeds.dtype}: expected numbers (batch, length, {width})")
    if 0 in embeds.shape:
        raise UsageError(f"{what} {tuple(embeds.shape)}: an empty batch, expected at least one token")


def check_labels(labels: torch.Tensor, shape: tuple[int, ...] | None, size: int, ignore_index: int = -100) -> None:
    """Integers of `shape` (`None`: any (B, T)), each a token or `ignore_index`: also those that a shift drops.

    Raises:
        UsageError: anything else. Values are looked at on the CPU only, as in `check_ids`.
    """
    check_tensor(labels, "labels")
    if shape is None and 0 in labels.shape:
        raise UsageError(f"labels {tuple(labels.shape)}: an empty batch, expected at least one token")
    fits = labels.shape == shape if shape is not None else labels.ndim == 2
    if not fits or labels.dtype != torch.int64:
        expected = "(batch, length)" if shape is None else tuple(shape)
        raise UsageError(f"labels {tuple(labels.shape)} of {labels.dtype}: expected torch.int64 {expected}")
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


def classified(
    head: nn.Linear, pooled: torch.Tensor, labels: torch.Tensor | None, what: str = "labels"
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits (B, C), and the mean cross entropy of the classes `labels`, (B,) or (B, 1).

    Raises:
        UsageError: labels that are no whole numbers, or not one for each row; a class that is not there.
    """
    if labels is None:
        return head(pooled), None
    check_tensor(labels, what)
    rows = len(pooled)
    if labels.shape not in ((rows,), (rows, 1)) or labels.dtype not in (torch.int64, torch.int32):
        raise UsageError(
            f"{what} {tuple(labels.shape)} of {labels.dtype}: expected {rows} classes, whole numbers {(rows,)}"
        )
    classes = labels.reshape(-1).long()
    loss, logits = linear_cross_entropy(pooled, head.weight, classes, bias=head.bias, return_logits=True)
    return logits, loss
