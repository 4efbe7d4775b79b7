"""The definition of the loss, in a few lines of torch, and the reduction over positions."""

from __future__ import annotations

import torch

from bowline.functional.loss.loss_options import Options, Reduction

__all__ = ["losses_of", "position_losses", "position_weights", "reduced", "reference_losses", "without"]


def reference_losses(logits: torch.Tensor, labels: torch.Tensor, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """-(1 - e) log p[label] - e mean(log p) + z lse², 0 where there is no label: (...), and lse (...)."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    lse = logits.logsumexp(-1)
    return losses_of(logits, lse, labels, options), lse


def losses_of(logits: torch.Tensor, lse: torch.Tensor, labels: torch.Tensor, options: Options) -> torch.Tensor:
    """The formula of `reference_losses`: of logits (..., V) in float32 or wider and their lse (...)."""
    counted = labels != options.ignore_index
    target = logits.gather(-1, labels.masked_fill(~counted, 0)[..., None])[..., 0]
    spread = None
    if options.label_smoothing:
        spread = options.share(logits.shape[-1]) * without(logits, options.mask_ids).sum(-1)
    losses = position_losses(lse, target, spread, label_share=1 - options.label_smoothing, z_loss=options.z_loss)
    return losses.masked_fill(~counted, 0.0)


def position_losses(
    lse: torch.Tensor, target: torch.Tensor, spread: torch.Tensor | None, *, label_share: float, z_loss: float
) -> torch.Tensor:
    """The losses lse - (1 - e) y[label] - u sum(y) + z lse², from the label's logit `target`; all of one shape.

    `label_share` is 1 - e, and `spread` is u sum(y), or `None` without smoothing.
    """
    losses = lse - label_share * target + z_loss * lse.square()
    return losses if spread is None else losses - spread


def without(logits: torch.Tensor, mask_ids: tuple[int, ...]) -> torch.Tensor:
    """The logits with 0 for masked ids, because smoothing does not spread over them."""
    if not mask_ids:
        return logits
    return logits.index_fill(-1, torch.tensor(mask_ids, dtype=torch.int64, device=logits.device), 0.0)


def position_weights(
    labels: torch.Tensor, ignore_index: int, class_weight: torch.Tensor | None, dtype: torch.dtype, reduction: Reduction
) -> torch.Tensor:
    """The factor of each position's loss, (...): 0 without a label; for a mean, its share of the mean.

    If no position has a label, the mean and its gradient are 0.
    """
    counted = labels != ignore_index
    weights = counted.to(dtype)
    if class_weight is None and reduction == "mean":
        return weights / counted.sum().clamp(min=1)
    if class_weight is not None:
        weights = weights * class_weight.to(dtype)[labels.masked_fill(~counted, 0)]
    if reduction != "mean":
        return weights
    divisor = weights.sum()
    return weights / divisor.masked_fill(divisor == 0, 1.0)


def reduced(losses: torch.Tensor, weights: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    """Reduces losses (...) with their factors to one number, or to (...) for "none"."""
    losses = losses * weights
    return losses if reduction == "none" else losses.sum()
