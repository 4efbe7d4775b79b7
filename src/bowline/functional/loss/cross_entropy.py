"""`linear_cross_entropy`: the loss of every head, by any backend."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from bowline.errors import UsageError
from bowline.functional.kernels.half_precision_emulation import emulated
from bowline.functional.loss.adapter_terms import AdapterTerms
from bowline.functional.loss.backend_choice import pick
from bowline.functional.loss.chunked import chunked_losses, chunked_total
from bowline.functional.loss.full_logits import full_logits_losses
from bowline.functional.loss.logits import linear_logits
from bowline.functional.loss.loss_options import (
    Options,
    Reduction,
    check_arguments,
    check_ends,
    check_labels,
    check_numbers,
    masked_ids,
)
from bowline.functional.loss.peer_backends import PEERS, peer_loss
from bowline.functional.loss.reference import position_weights, reduced, reference_losses
from bowline.functional.loss.torch_backend import torch_losses
from bowline.functional.row_shard import is_dtensor
from bowline.functional.shared_gradient import head_weight

__all__ = ["linear_cross_entropy"]


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weight: torch.Tensor | None = None,
    mask_ids: Sequence[int] | None = None,
    reduction: Reduction = "mean",
    return_lse: bool = False,
    return_logits: bool = False,
    adapters: AdapterTerms | None = None,
    backend: str = "auto",
) -> Any:
    """The mean over labelled positions of -log softmax(logits)[label] + z lse², of the logits of `linear_logits`.

    If the weight is a DTensor whose rows are split over processes (`Shard(0)` on a one-dimensional mesh), each process
    computes its own rows, and the processes exchange three numbers for each position; nothing of the logits' size is
    gathered. Hidden states and labels are then the same on every process. The gradient of the hidden states is summed
    over the processes, the weight's stays with its rows.

    Args:
        hidden: (..., D), the input of the head.
        weight: (V, D), the head's matrix, tied or not.
        labels: (...) of int64; `ignore_index` where a position has none.
        bias: (V,), added to the logits.
        logit_scale: factor of the logits, before the softcap.
        softcap: c in c tanh(logits / c) (Gemma 2).
        ignore_index: the label of positions that do not count.
        label_smoothing: share of the target that is spread evenly over the vocabulary, masked ids left out.
        z_loss: factor of lse², the squared log of the softmax's denominator (PaLM, 2022).
        class_weight: (V,), a factor of the whole loss where that token is the label; a mean divides by the sum of the
            factors, as torch does (which, under smoothing, has each token's factor in the spread share instead).
        mask_ids: tokens with the logit -inf: they are never predicted, and their rows get no gradient from the softmax.
        reduction: "mean" over labelled positions (0 where there are none), "sum", or "none": (...).
        return_lse: the lse (...), in float32 or wider, is returned after the loss.
        return_logits: the logits (..., V) are returned last; for a DTensor weight as a DTensor, split by tokens.
        adapters: what adapters change in the logits before the scale: a thin product (LoRA) is added, and the logits of
            some tokens (trained rows) are replaced. Its tensors get gradients. "chunked" needs memory for
            N x (r + k) and V x r numbers more; "torch" and the libraries have no such option.
        backend: "reference" is a few lines of torch; "logits" keeps the logits and makes nothing else of their size;
            "chunked" has the logits of a chunk of tokens at a time, and the gradients of a mean or sum in the forward
            pass (for `reduction="none"` and `return_lse` it computes the logits twice, and asked for all logits it is
            "logits"); "torch" is torch's own; "liger", "quack" and "cut_cross_entropy" are those libraries', where they
            are installed; "auto" picks among the first three, and `chosen_backend` names its choice.

    Returns:
        The loss, or a tuple of the loss and what was asked for. Loss and lse are in float32, or in float64 for float64;
        logits are in the dtype of the product.

    Raises:
        UsageError: shapes or dtypes that do not fit, a number out of its range, on a CPU a label that is no token or a
            masked one (not in a compiled graph that keeps the logits), or a backend that is none or has no such option;
            in a backward pass, second-order gradients by "logits" or "chunked".

    Example:
        >>> hidden, weight = torch.zeros(2, 3, 4), torch.zeros(9, 4)
        >>> loss = linear_cross_entropy(hidden, weight, torch.tensor([[1, 2, -100], [0, 8, 3]]))
        >>> round(loss.item(), 4), round(torch.tensor(9.0).log().item(), 4)
        (2.1972, 2.1972)
    """
    check_ends(hidden, weight, bias, logit_scale, softcap)
    check_numbers(label_smoothing=label_smoothing, z_loss=z_loss)
    check_arguments(hidden, weight, labels, class_weight, label_smoothing, reduction, backend)
    options = Options(
        logit_scale=logit_scale,
        softcap=softcap,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        mask_ids=masked_ids(mask_ids, len(weight)),
    )
    if is_dtensor(weight):
        if adapters is not None:
            raise UsageError(
                "adapters on a weight that is a DTensor: expected none, because they change the whole vocabulary",
                help="merge the adapters into the weight before it is sharded (bowline.merge_lora)",
                argument="adapters",
            )
        # imported here because it loads torch's compiler
        from bowline.functional.loss.vocabulary_parallel import vocabulary_parallel_loss

        return vocabulary_parallel_loss(
            linear_cross_entropy,
            hidden,
            weight,
            labels,
            bias=bias,
            options=options,
            class_weight=class_weight,
            reduction=reduction,
            return_lse=return_lse,
            return_logits=return_logits,
            backend=backend,
        )
    check_labels(labels, len(weight), options)
    if adapters is not None:
        adapters.check(hidden, weight)
    total = reduction != "none" and not return_lse
    name = pick(hidden, weight, total, return_logits, backend, bias, labels, adapters=adapters)
    if name in ("chunked", "logits"):
        weight = head_weight(weight)
    ends = hidden, weight, bias
    dtype = _autocast_dtype(hidden, weight, name)
    if dtype is not None:
        ends = hidden.to(dtype), weight, bias
        if name != "chunked" or weight.dtype != torch.float32:  # "chunked" casts a float32 matrix itself
            ends = ends[0], weight.to(dtype), None if bias is None else bias.to(dtype)
    with nullcontext() if dtype is None else torch.autocast(weight.device.type, enabled=False):
        if name in PEERS:
            also = {"class_weight": class_weight is not None, "return_lse": return_lse, "return_logits": return_logits}
            return peer_loss(name, *ends, labels, options, reduction, also)
        wide = torch.promote_types(ends[0].dtype, torch.float32)
        weights = position_weights(labels, ignore_index, class_weight, wide, reduction)
        if name == "chunked" and total:
            return chunked_total(*ends, labels, weights, options, adapters)
        lse = logits = None
        if name == "chunked":
            losses, lse = chunked_losses(*ends, labels, options, adapters)
        elif name == "logits":
            losses, lse, logits = full_logits_losses(*ends, labels, options)
        elif name == "torch":
            if return_lse or return_logits:
                raise UsageError(
                    "backend='torch' returns only the loss, not the lse or the logits", help='backend="auto"'
                )
            losses = torch_losses(*ends, labels, options)
        else:
            logits = linear_logits(
                hidden,
                weight,
                bias=bias,
                logit_scale=logit_scale,
                softcap=softcap,
                mask_ids=options.mask_ids,
                adapters=adapters,
            )
            losses, lse = reference_losses(logits, labels, options)
        loss = reduced(losses, weights, reduction)
    asked = (*((lse,) if return_lse else ()), *((logits,) if return_logits else ()))
    return (loss, *asked) if asked else loss


def _autocast_dtype(hidden: torch.Tensor, weight: torch.Tensor, backend: str) -> torch.dtype | None:
    """The dtype in which autocast, if it is on, would multiply; float32 where a narrower dtype would only add casts.

    `None` where nothing has to be cast: autocast itself covers the functions that "reference" and "torch" call.
    """
    kind = weight.device.type
    if (
        kind == "meta"
        or backend in ("reference", "torch")
        or not torch.is_autocast_enabled(kind)
        or torch.float64 in (hidden.dtype, weight.dtype)
    ):
        return None
    dtype = torch.get_autocast_dtype(kind)
    here = kind == "cpu" and not torch.compiler.is_compiling()  # torch.compile cannot trace `emulated`
    wide = here and backend == "chunked" and weight.dtype == torch.float32 and emulated(dtype)
    return torch.float32 if wide else dtype
