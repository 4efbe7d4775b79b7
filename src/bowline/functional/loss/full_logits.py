"""The backend "logits": keeps all logits, and allocates nothing else of their size, in either pass.

Under `torch.compile` it does allocate more, because there the work is not split into blocks.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from bowline.functional.loss.chunks.softmax_formulas import finite_or_0
from bowline.functional.loss.logits import cap_slope, linear_logits
from bowline.functional.loss.loss_options import Options
from bowline.functional.loss.once_differentiable import first_order_only
from bowline.functional.loss.reference import losses_of

__all__ = ["full_logits_losses"]

LOG2_E = 1 / math.log(2)


def full_logits_losses(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor, options: Options
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The losses and the lse of each position, (...), and the logits (..., V)."""
    head: Any = _Head  # `apply` has no types
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = head.apply(hidden, weight, bias, labels, options)
    return found


def _losses(logits: torch.Tensor, labels: torch.Tensor, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference_losses`, faster; powers are added pairwise, where log_softmax rounds more at V 262,144.

    `exp2` is torch's own, and faster than MKL's `exp` on some processors.
    """
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    most = finite_or_0(x.amax(-1, keepdim=True))
    lse = most[..., 0] + torch.sub(x, most).mul_(LOG2_E).exp2_().sum(-1).log()
    return losses_of(x, lse, labels, options), lse


class _Head(torch.autograd.Function):
    """hidden (..., D) and weight (V, D) to the reference's losses and lse, (...), and to the logits (..., V).

    The losses are computed some rows at a time. The backward pass goes over the vocabulary in blocks, each of
    which fills its own part of the weight's gradient, and only over rows with a label: the gradient of other rows
    is 0.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden, weight, bias, labels, options = args
        logits = linear_logits(
            hidden,
            weight,
            bias=bias,
            logit_scale=options.logit_scale,
            softcap=options.softcap,
            mask_ids=options.mask_ids,
        )
        flat = logits.reshape(-1, len(weight))  # (N, V)
        step = _rows(flat)
        parts = zip(flat.split(step), labels.reshape(-1).split(step), strict=True)
        pairs = [_losses(some, theirs, options) for some, theirs in parts]
        losses, lse = (torch.cat(both).view(labels.shape) for both in zip(*pairs, strict=True))
        ctx.save_for_backward(hidden, weight, labels, logits, lse)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return losses, lse, logits

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, labels, logits, lse = ctx.saved_tensors
        options = ctx.options
        shape, hidden = hidden.shape, hidden.reshape(-1, hidden.shape[-1])
        logits, labels, lse = logits.reshape(-1, len(weight)), labels.reshape(-1), lse.reshape(-1)
        grad_loss, grad_lse = (None if one is None else one.reshape(-1) for one in grads[:2])
        grad_logits = None if grads[2] is None else grads[2].reshape(-1, len(weight))
        counted = labels != options.ignore_index
        grad_loss = lse.new_zeros(lse.shape) if grad_loss is None else grad_loss.masked_fill(~counted, 0.0)
        p_factor = grad_loss * (1 + 2 * options.z_loss * lse)
        rows = None
        if grad_lse is not None:
            p_factor = p_factor + grad_lse
        elif grad_logits is None and labels.device.type == "cpu" and _has_values(labels):
            rows = counted.nonzero()[:, 0]
            rows = rows if len(rows) < len(labels) else None  # without ignored rows, copying is unnecessary
        some, target, lse, grad_loss, p_factor = (
            one if rows is None else one[rows]
            for one in (hidden, labels.masked_fill(~counted, 0), lse[:, None], grad_loss[:, None], p_factor[:, None])
        )
        smoothing, softcap, scale = options.label_smoothing, options.softcap, options.logit_scale

        def block(first: int, last: int) -> torch.Tensor:
            """The gradient of the product's columns from `first` to `last`."""
            x = logits[:, first:last] if rows is None else logits[:, first:last].index_select(0, rows)
            gradient: torch.Tensor = (x - lse).exp_().mul_(p_factor)
            if smoothing:
                gradient -= grad_loss * options.share(len(weight))
            at = (target - first)[:, None]
            inside = (at >= 0) & (at < last - first)
            gradient.scatter_add_(1, at.clamp(0, last - first - 1), (smoothing - 1) * grad_loss * inside)
            if grad_logits is not None:
                gradient += grad_logits[:, first:last]
            if softcap is not None:
                gradient *= cap_slope(x, softcap)
            if options.mask_ids:
                gradient.masked_fill_(x == -torch.inf, 0.0)
            return gradient.mul_(scale).to(logits.dtype) if scale != 1.0 else gradient.to(logits.dtype)

        wanted, size = ctx.needs_input_grad[:3], _columns(some, weight)
        if size >= len(weight):
            gradient = block(0, len(weight))
            grad_weight = gradient.t() @ some if wanted[1] else None
            grad_bias = gradient.sum(0) if wanted[2] else None
            grad_some = gradient @ weight if wanted[0] else None
        else:
            grad_weight = torch.empty_like(weight) if wanted[1] else None
            grad_bias = weight.new_empty(len(weight)) if wanted[2] else None
            total = torch.zeros_like(some, dtype=lse.dtype)  # in half precision, blocks are added in float32
            for first in range(0, len(weight), size):
                part = slice(first, min(first + size, len(weight)))
                gradient = block(part.start, part.stop)
                if grad_weight is not None:
                    torch.mm(gradient.t(), some, out=grad_weight[part])
                if grad_bias is not None:
                    torch.sum(gradient, 0, out=grad_bias[part])
                if wanted[0] and total.dtype == weight.dtype:
                    total.addmm_(gradient, weight[part])
                elif wanted[0]:
                    total += gradient @ weight[part]
            grad_some = total.to(some.dtype) if wanted[0] else None
        if grad_some is not None and rows is not None:
            grad_some = torch.zeros_like(hidden).index_copy_(0, rows, grad_some)
        grad_hidden = None if grad_some is None else grad_some.view(shape)
        return grad_hidden, grad_weight, grad_bias, None, None


def _has_values(labels: torch.Tensor) -> bool:
    """Whether the labels can be read; in a compiled graph and for a FakeTensor they cannot."""
    return type(labels) is torch.Tensor and not torch.compiler.is_compiling()


def _rows(logits: torch.Tensor) -> int:
    """Rows whose losses are computed at once: on the CPU, as many as its cache holds."""
    if torch.compiler.is_compiling():
        return max(1, len(logits))
    return max(1, 2 ** (18 if logits.device.type == "cpu" else 26) // max(1, logits.shape[1]))


def _columns(hidden: torch.Tensor, weight: torch.Tensor) -> int:
    """Columns of the logits whose gradient is in memory at once."""
    if torch.compiler.is_compiling():
        return len(weight)
    return max(256, 2 ** (21 if weight.device.type == "cpu" else 26) // max(1, len(hidden)))
