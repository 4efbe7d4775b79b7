"""The loss at the output head: cross entropy of `hidden @ weight.T`, by one function for every family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.errors import UsageError

__all__ = ["linear_cross_entropy", "linear_logits"]

Reduction = Literal["mean", "sum", "none"]
BACKENDS = ("auto", "reference", "logits")


def linear_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    mask_ids: Sequence[int] | None = None,
) -> torch.Tensor:
    """logits = c tanh(s (hidden weightᵀ + bias) / c), without tanh where there is no softcap c; `mask_ids` at -inf.

    hidden (..., D), weight (V, D), bias (V,); logits (..., V) in the dtype of the product.

    Raises:
        UsageError: shapes that do not fit, a masked id that is no token, a softcap of 0 or less.

    Example:
        >>> linear_logits(torch.ones(1, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), mask_ids=[0])
        tensor([[-inf, 7.]])
    """
    if hidden.ndim < 1 or weight.ndim != 2 or hidden.shape[-1] != weight.shape[1]:
        raise UsageError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}: do not fit, expected (..., D) and (V, D)"
        )
    size = weight.shape[0]
    if bias is not None and bias.shape != (size,):
        raise UsageError(f"bias {tuple(bias.shape)} for weight {tuple(weight.shape)}: expected {(size,)}")
    if softcap is not None and not softcap > 0:
        raise UsageError(f"softcap={softcap!r}: expected more than 0, or None")
    for token in mask_ids or ():
        if not 0 <= token < size:
            raise UsageError(f"mask_ids has {token}, and the head has {size} rows: expected 0 to {size - 1}")
    logits = F.linear(hidden, weight, bias)
    if logit_scale != 1.0:
        logits = logits * logit_scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if mask_ids:
        logits = logits.index_fill(-1, torch.as_tensor(tuple(mask_ids), device=logits.device), -torch.inf)
    return logits


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
    backend: str = "auto",
) -> Any:
    """The mean over labelled positions of -log softmax(logits)[label] + z lse², of the logits of `linear_logits`.

    Args:
        hidden: (..., D), what the head is given.
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
        reduction: "mean" over labelled positions (NaN where there are none, as torch gives), "sum", or "none": (...).
        return_lse: the lse (...), in float32 or wider, is returned after the loss.
        return_logits: the logits (..., V) are returned last.
        backend: "reference" is a few lines of torch; "logits" keeps the logits and nothing else of their size for the
            backward pass, with a softcap its tanh too; "auto" picks.

    Returns:
        The loss, or a tuple of the loss and what was asked for, in float32; in float64 for float64.

    Raises:
        UsageError: shapes that do not fit, a label that is no token, or a backend that is none.

    Example:
        >>> hidden, weight = torch.zeros(2, 3, 4), torch.zeros(9, 4)
        >>> loss = linear_cross_entropy(hidden, weight, torch.tensor([[1, 2, -100], [0, 8, 3]]))
        >>> round(loss.item(), 4), round(torch.tensor(9.0).log().item(), 4)
        (2.1972, 2.1972)
    """
    if backend not in BACKENDS:
        raise UsageError(f"backend={backend!r}: expected one of {', '.join(BACKENDS)}")
    if reduction not in ("mean", "sum", "none"):
        raise UsageError(f"reduction={reduction!r}: expected 'mean', 'sum' or 'none'")
    if labels.shape != hidden.shape[:-1]:
        raise UsageError(
            f"labels {tuple(labels.shape)} for hidden {tuple(hidden.shape)}: expected {tuple(hidden.shape[:-1])}"
        )
    if labels.dtype != torch.int64:
        raise UsageError(f"labels of {labels.dtype}: expected torch.int64", help="labels.long()")
    if class_weight is not None and class_weight.shape != weight.shape[:1]:
        raise UsageError(f"class_weight {tuple(class_weight.shape)}: expected {tuple(weight.shape[:1])}, one a token")
    if not 0 <= label_smoothing <= 1:
        raise UsageError(f"label_smoothing={label_smoothing!r}: expected 0 to 1")
    mask_ids = tuple(dict.fromkeys(mask_ids or ()))  # smoothing counts them
    _check_labels(labels, weight.shape[0], ignore_index, mask_ids)
    logits = linear_logits(hidden, weight, bias=bias, logit_scale=logit_scale, softcap=softcap, mask_ids=mask_ids)
    losses = _reference if backend == "reference" else _Losses.apply
    one, lse = losses(logits, labels, ignore_index, label_smoothing, z_loss, mask_ids)
    total = _reduced(one, labels, ignore_index, class_weight, reduction)
    asked = (*((lse,) if return_lse else ()), *((logits,) if return_logits else ()))
    return (total, *asked) if asked else total


def _check_labels(labels: torch.Tensor, size: int, ignore_index: int, mask_ids: Sequence[int] | None) -> None:
    """On the CPU; elsewhere reading values would stop the queue, and the kernel's own assertion must do."""
    if torch.compiler.is_compiling() or labels.device.type != "cpu" or labels.numel() == 0:
        return
    wrong = (labels != ignore_index) & ((labels < 0) | (labels >= size))
    if wrong.any():
        raise UsageError(
            f"label {int(labels[wrong][0])}: expected 0 to {size - 1}, or {ignore_index} where there is none"
        )
    for token in mask_ids or ():
        if (labels == token).any():
            raise UsageError(
                f"label {token}: is masked, so its loss would be infinite",
                help=f"label such positions {ignore_index}; or do not mask the token",
            )


def _reference(
    logits: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    masked: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """-(1 - e) log p[label] - e mean(log p) + z lse², 0 where there is no label: (...), and lse (...)."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    lse = logits.logsumexp(-1)
    counted = labels != ignore_index
    target = logits.gather(-1, labels.masked_fill(~counted, 0)[..., None])[..., 0]
    losses = lse - (1 - smoothing) * target + z_loss * lse.square()
    if smoothing:
        finite = logits.masked_fill(logits == -torch.inf, 0.0)
        losses = losses - smoothing * finite.sum(-1) / (logits.shape[-1] - len(masked))
    return losses.masked_fill(~counted, 0.0), lse


class _Losses(torch.autograd.Function):
    """`_reference`, keeping the logits alone for the backward pass and making one buffer of their size in each pass.

    log_softmax and softmax read half precision and write float32, without a copy between.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits, labels, ignore_index, smoothing, z_loss, masked = args
        wide = torch.promote_types(logits.dtype, torch.float32)
        log_p = logits.log_softmax(-1, dtype=wide)
        lse = logits.amax(-1).to(wide) - log_p.amax(-1)  # of the likeliest token, where the least is lost
        counted = labels != ignore_index
        target = log_p.gather(-1, labels.masked_fill(~counted, 0)[..., None])[..., 0]
        losses = z_loss * lse.square() - (1 - smoothing) * target
        if smoothing:
            finite = log_p.masked_fill_(log_p == -torch.inf, 0.0)
            losses = losses - smoothing * finite.sum(-1) / (logits.shape[-1] - len(masked))
        losses = losses.masked_fill(~counted, 0.0)
        ctx.save_for_backward(logits, labels, lse)
        ctx.options = ignore_index, smoothing, z_loss, len(masked)
        return losses, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, labels, lse = ctx.saved_tensors
        ignore_index, smoothing, z_loss, masked = ctx.options
        counted = labels != ignore_index
        of_loss = grads[0].masked_fill(~counted, 0.0)[..., None]
        of_lse = of_loss * (1 + 2 * z_loss * lse[..., None]) + grads[1][..., None]
        gradient = logits.softmax(-1, dtype=lse.dtype).mul_(of_lse)
        if smoothing:
            spread = of_loss * (smoothing / (logits.shape[-1] - masked))
            gradient.sub_(spread).masked_fill_(logits == -torch.inf, 0.0)  # as it was: their probability is zero
        target = labels.masked_fill(~counted, 0)[..., None]
        gradient.scatter_add_(-1, target, -(1 - smoothing) * of_loss)
        return gradient.to(logits.dtype), None, None, None, None, None


def _reduced(
    losses: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int,
    class_weight: torch.Tensor | None,
    reduction: Reduction,
) -> torch.Tensor:
    counted = labels != ignore_index
    weights = counted.to(losses.dtype)
    if class_weight is not None:
        weights = weights * class_weight.to(losses.dtype)[labels.masked_fill(~counted, 0)]
        losses = losses * weights
    if reduction == "none":
        return losses
    return losses.sum() / weights.sum() if reduction == "mean" else losses.sum()
