"""The backend "torch": `torch.nn.functional.linear_cross_entropy`, in versions of torch that have it."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.errors import UsageError
from bowline.functional.loss.loss_options import Options

__all__ = ["torch_losses"]


def torch_losses(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor, options: Options
) -> torch.Tensor:
    """Each position's loss (...), in float32 or wider; for half precision, torch has rounded it before.

    Raises:
        UsageError: this torch lacks the function, or the function lacks an option.
    """
    function: Any = getattr(F, "linear_cross_entropy", None)
    if function is None:
        raise UsageError(
            f"backend='torch': torch {torch.__version__} has no linear_cross_entropy", help='backend="auto"'
        )
    plain = Options(ignore_index=options.ignore_index, label_smoothing=options.label_smoothing)
    for name in ("logit_scale", "softcap", "z_loss", "mask_ids"):
        if getattr(options, name) != getattr(plain, name):
            raise UsageError(
                f"backend='torch' with {name}={getattr(options, name)!r}: torch's own has no such option",
                help='backend="auto"',
            )
    losses: torch.Tensor = function(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels.reshape(-1),
        linear_bias=bias,
        reduction="none",
        ignore_index=options.ignore_index,
        label_smoothing=options.label_smoothing,
    )
    return losses.to(torch.promote_types(losses.dtype, torch.float32)).view(labels.shape)
