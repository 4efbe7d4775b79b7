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
        backend: "reference" is a few lines of torch; "logits" keeps the logits and makes nothing else of their size,
            nor does its backward pass; "auto" picks.

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
    options = ignore_index, label_smoothing, z_loss, mask_ids
    if backend == "auto" and _in_torch_func():
        backend = "reference"
    if backend == "reference":
        logits = linear_logits(hidden, weight, bias=bias, logit_scale=logit_scale, softcap=softcap, mask_ids=mask_ids)
        one, lse = _reference(logits, labels, *options)
    else:
        ends = _cast(hidden), _cast(weight), None if bias is None else _cast(bias)
        head: Any = _Head  # `apply` has no types
        one, lse, logits = head.apply(*ends, labels, logit_scale, softcap, *options)
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


def _losses(
    logits: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    masked: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_reference`, faster: log_softmax reads half precision and writes float32, without a copy between."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    log_p = logits.log_softmax(-1, dtype=wide)
    lse = logits.amax(-1).to(wide) - log_p.amax(-1)  # of the likeliest token, where the least is lost
    counted = labels != ignore_index
    target = log_p.gather(-1, labels.masked_fill(~counted, 0)[..., None])[..., 0]
    losses = z_loss * lse.square() - (1 - smoothing) * target
    if smoothing:
        finite = log_p.masked_fill_(log_p == -torch.inf, 0.0)
        losses = losses - smoothing * finite.sum(-1) / (logits.shape[-1] - len(masked))
    return losses.masked_fill(~counted, 0.0), lse


class _Head(torch.autograd.Function):
    """hidden (..., D) and weight (V, D) to `_reference`'s losses and lse, (...), and to the logits (..., V).

    Of the size of the logits nothing else is ever made. The backward pass goes over the vocabulary in blocks, each of
    which is a part of the weight's gradient of its own, and over rows with a label only: the others' gradient is 0.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden, weight, bias, labels, scale, softcap, *options = args
        logits = linear_logits(hidden, weight, bias=bias, logit_scale=scale, softcap=softcap, mask_ids=options[-1])
        flat = logits.reshape(-1, len(weight))  # (N, V)
        step = _rows(flat)
        parts = zip(flat.split(step), labels.reshape(-1).split(step), strict=True)
        pairs = [_losses(some, theirs, *options) for some, theirs in parts]
        losses, lse = (torch.cat(both).view(labels.shape) for both in zip(*pairs, strict=True))
        ctx.save_for_backward(hidden, weight, labels, logits, lse)
        ctx.options = scale, softcap, *options
        ctx.set_materialize_grads(False)
        return losses, lse, logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, labels, logits, lse = ctx.saved_tensors
        scale, softcap, ignore_index, smoothing, z_loss, masked = ctx.options
        shape, hidden = hidden.shape, hidden.reshape(-1, hidden.shape[-1])
        logits, labels, lse = logits.reshape(-1, len(weight)), labels.reshape(-1), lse.reshape(-1)
        of_loss, of_lse = (None if one is None else one.reshape(-1) for one in grads[:2])
        of_logits = None if grads[2] is None else grads[2].reshape(-1, len(weight))
        counted = labels != ignore_index
        of_loss = lse.new_zeros(lse.shape) if of_loss is None else of_loss.masked_fill(~counted, 0.0)
        of_p = of_loss * (1 + 2 * z_loss * lse)
        rows = None
        if of_lse is not None:
            of_p = of_p + of_lse
        elif of_logits is None and labels.device.type == "cpu" and not torch.compiler.is_compiling():
            rows = counted.nonzero()[:, 0]
            rows = rows if len(rows) < len(labels) else None  # nothing is copied where nothing is left out
        some, target, lse, of_loss, of_p = (
            one if rows is None else one[rows]
            for one in (hidden, labels.masked_fill(~counted, 0), lse[:, None], of_loss[:, None], of_p[:, None])
        )

        def block(first: int, last: int) -> torch.Tensor:
            """The gradient of the product's columns from `first` to `last`."""
            x = logits[:, first:last] if rows is None else logits[:, first:last].index_select(0, rows)
            gradient: torch.Tensor = (x - lse).exp_().mul_(of_p)
            if smoothing:
                gradient -= of_loss * (smoothing / (len(weight) - len(masked)))
            at = (target - first)[:, None]
            inside = (at >= 0) & (at < last - first)
            gradient.scatter_add_(1, at.clamp(0, last - first - 1), (smoothing - 1) * of_loss * inside)
            if of_logits is not None:
                gradient += of_logits[:, first:last]
            if softcap is not None:
                gradient *= 1 - (x / softcap).square()
            if masked:
                gradient.masked_fill_(x == -torch.inf, 0.0)
            return gradient.mul_(scale).to(logits.dtype) if scale != 1.0 else gradient.to(logits.dtype)

        wanted, size = ctx.needs_input_grad[:3], _columns(some, weight)
        if size >= len(weight):
            gradient = block(0, len(weight))
            of_weight = gradient.t() @ some if wanted[1] else None
            of_bias = gradient.sum(0) if wanted[2] else None
            of_some = gradient @ weight
        else:
            of_weight = torch.empty_like(weight) if wanted[1] else None
            of_bias = weight.new_empty(len(weight)) if wanted[2] else None
            of_some = torch.zeros_like(some, dtype=lse.dtype)  # in half precision, blocks are added in float32
            for first in range(0, len(weight), size):
                part = slice(first, min(first + size, len(weight)))
                gradient = block(part.start, part.stop)
                if of_weight is not None:
                    torch.mm(gradient.t(), some, out=of_weight[part])
                if of_bias is not None:
                    torch.sum(gradient, 0, out=of_bias[part])
                if wanted[0] and of_some.dtype == weight.dtype:
                    of_some.addmm_(gradient, weight[part])
                elif wanted[0]:
                    of_some += gradient @ weight[part]
            of_some = of_some.to(some.dtype)
        of_hidden = of_some if rows is None else torch.zeros_like(hidden).index_copy_(0, rows, of_some)
        return of_hidden.view(shape), of_weight, of_bias, *[None] * 7


def _in_torch_func() -> bool:
    """Inside torch.func's transforms, which a Function with one `forward` knows nothing of."""
    ask: Any = getattr(torch._C, "_are_functorch_transforms_active", None)
    return bool(ask is not None and ask())


def _rows(logits: torch.Tensor) -> int:
    """Rows whose losses are computed at once: on the CPU what its cache holds."""
    if torch.compiler.is_compiling() or logits.device.type != "cpu":
        return max(1, len(logits))
    return max(1, 2**18 // logits.shape[1])


def _columns(hidden: torch.Tensor, weight: torch.Tensor) -> int:
    """Columns of the logits whose gradient there is at once."""
    if torch.compiler.is_compiling():
        return len(weight)
    return max(256, 2 ** (21 if weight.device.type == "cpu" else 26) // max(1, len(hidden)))


def _cast(tensor: torch.Tensor) -> torch.Tensor:
    """As autocast would before a product."""
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind) and tensor.dtype != torch.float64:
        return tensor.to(torch.get_autocast_dtype(kind))
    return tensor


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
