"""The loss of a head whose rows are split over processes: each computes its own rows, and no logits are gathered.

With y the logits, loss = lse - (1 - e) y[label] - u sum(y) + z lse². Each process has the lse of its rows, the label's
logit if the label is one of them, and its part of the sum. Per position, one number is reduced to its maximum and two
are summed: exp(lse - maximum), and (1 - e) y[label] + u sum(y). (Megatron-LM, Shoeybi et al., 2019, does so with
logits; here each process's numbers come from any backend of `linear_cross_entropy`.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bowline.errors import UsageError
from bowline.functional.loss.loss_options import Options, Reduction, check_labels
from bowline.functional.loss.peer_backends import PEERS
from bowline.functional.loss.reference import position_losses, position_weights, reduced
from bowline.functional.row_shard import RowShard

__all__ = ["vocabulary_parallel_loss"]

UNLABELLED = -100
"""The label of positions whose label is another process's row; the caller's `ignore_index` may be one of ours."""


# traced, the gradients of replicated DTensors would not be summed
@torch.compiler.disable  # type: ignore[untyped-decorator]
def vocabulary_parallel_loss(
    compute: Callable[..., Any],
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    options: Options,
    class_weight: torch.Tensor | None,
    reduction: Reduction,
    return_lse: bool,
    return_logits: bool,
    backend: str,
) -> Any:
    """`linear_cross_entropy` of a DTensor weight (V, D) that is `Shard(0)`; `compute` is that function.

    hidden (..., D), labels (...) and class_weight (V,) are the same on every process; bias (V,) is too, or is split as
    the weight. Loss and lse are plain tensors, the same on every process; logits are a DTensor, split by tokens.

    Raises:
        UsageError: the weight is split in another way, the labels differ between processes (on a GPU the loss is NaN),
            or the backend returns no lse.
    """
    if backend == "torch" or backend in PEERS:
        raise UsageError(
            f"backend={backend!r} has no loss of a weight whose rows are split over processes",
            help='backend="auto"',
            argument="backend",
        )
    shard = RowShard.of(weight)
    labels, class_weight = shard.gathered(labels), None if class_weight is None else shard.gathered(class_weight)
    same = shard.same_everywhere("labels", labels)
    check_labels(labels, len(weight), options)
    hidden, rows = shard.replicated(hidden), shard.part()
    local_bias = None if bias is None else shard.rows_of(bias)
    lead, labels = labels.shape, labels.reshape(-1)
    flat, counted = hidden.reshape(-1, hidden.shape[-1]), labels != options.ignore_index
    weights = position_weights(
        labels, options.ignore_index, class_weight, torch.promote_types(hidden.dtype, torch.float32), reduction
    )
    some = None
    if not (return_lse or return_logits) and labels.device.type == "cpu":
        some = counted.nonzero()[:, 0]
        some = some if len(some) < len(labels) else None
    if some is not None:
        flat, labels, counted = flat[some], labels[some], counted[some]
    ends = flat, rows, local_bias, labels, counted
    lse, share, logits = _local(compute, shard, *ends, options, return_logits, backend)
    across: Any = _Across  # `apply` has no types
    lse, share = across.apply(lse, share, shard.mesh.get_group())
    losses = position_losses(lse, share, None, label_share=1.0, z_loss=options.z_loss).masked_fill(~counted, 0.0)
    if labels.device.type != "cpu":  # where nothing has been raised
        losses = losses.masked_fill(~same | (counted & ((labels < 0) | (labels >= len(weight)))), torch.nan)
    if some is not None:
        losses = losses.new_zeros(weights.shape).index_copy(0, some, losses)
    loss = reduced(losses, weights, reduction)
    loss = loss.view(lead) if reduction == "none" else loss
    asked = (
        *((lse.view(lead),) if return_lse else ()),
        *((shard.split(logits.view(*lead, logits.shape[-1])),) if logits is not None else ()),
    )
    return (loss, *asked) if asked else loss


def _local(
    compute: Callable[..., Any],
    shard: RowShard,
    hidden: torch.Tensor,
    rows: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    counted: torch.Tensor,
    options: Options,
    return_logits: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """This process's lse (N,), its part of (1 - e) y[label] + u sum(y) (N,), and its logits (N, V') if asked for."""
    masked = tuple(token - shard.first for token in options.mask_ids if shard.first <= token < shard.last)
    mine = counted & (labels >= shard.first) & (labels < shard.last)
    if len(masked) == len(rows):
        nothing: Any = _Masked
        lse, share, *rest = nothing.apply(hidden, rows, bias, return_logits)
        return lse, share, rest[0] if rest else None
    common: dict[str, Any] = {
        "bias": bias,
        "logit_scale": options.logit_scale,
        "softcap": options.softcap,
        "ignore_index": UNLABELLED,
        "mask_ids": masked,
        "reduction": "none",
        "return_lse": True,
        "backend": backend,
    }
    there = (labels - shard.first).masked_fill(~mine, UNLABELLED)
    losses, lse, *rest = compute(hidden, rows, there, return_logits=return_logits, **common)
    share = (1 - options.label_smoothing) * (lse - losses).masked_fill(~mine, 0.0)
    if options.label_smoothing:
        each = options.share(len(shard.weight))
        if options.softcap is None:
            total = options.logit_scale * _logit_sum(hidden, rows, bias, masked, lse.dtype)
        else:  # the loss with the whole target spread is lse - mean(y)
            kept = next(token for token in range(len(rows)) if token not in set(masked))
            spread, again = compute(hidden, rows, torch.full_like(labels, kept), label_smoothing=1.0, **common)
            total = (len(rows) - len(masked)) * (again - spread)
        share = share + each * total
    return lse, share, rest[0] if rest else None


def _logit_sum(
    hidden: torch.Tensor,
    rows: torch.Tensor,
    bias: torch.Tensor | None,
    masked: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    """The sum over unmasked rows of hidden @ rows.T + bias, (N,), without the logits."""
    row_sum = rows.sum(0, dtype=dtype)
    bias_sum = None if bias is None else bias.sum(dtype=dtype)
    if masked:
        ids = torch.tensor(masked, device=rows.device)
        row_sum = row_sum - rows[ids].sum(0, dtype=dtype)
        bias_sum = None if bias is None or bias_sum is None else bias_sum - bias[ids].sum(dtype=dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        total = hidden.to(dtype) @ row_sum
    return total if bias_sum is None else total + bias_sum


class _Across(torch.autograd.Function):
    """Each process's lse (N,) and share (N,) to those of the whole vocabulary, which are the same on every process."""

    @staticmethod
    def forward(ctx: Any, lse: torch.Tensor, share: torch.Tensor, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
        most = lse.detach().clone()
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group)
        both = torch.stack([(lse - most).exp(), share])
        torch.distributed.all_reduce(both, torch.distributed.ReduceOp.SUM, group)
        whole = both[0].log().add_(most)
        ctx.save_for_backward(lse, whole)
        return whole, both[1].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        lse, whole = ctx.saved_tensors
        grad_lse, grad_share = grads
        return grad_lse * (lse - whole).exp(), grad_share, None


class _Masked(torch.autograd.Function):
    """The results of a process whose rows are all masked: lse -inf, share 0, and logits of -inf if asked for.

    Their gradients are 0, and not missing, because every process takes part in the sums of the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None, return_logits: bool
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(hidden, rows, bias)
        lse = hidden.new_full(hidden.shape[:1], -torch.inf, dtype=torch.promote_types(hidden.dtype, torch.float32))
        logits = (hidden.new_full((len(hidden), len(rows)), -torch.inf),) if return_logits else ()
        return lse, torch.zeros_like(lse), *logits

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *(None if one is None else torch.zeros_like(one) for one in ctx.saved_tensors), None
