"""The formulas from products to losses, and of their gradient, which all chunk loops share.

With y = c tanh(s x / c), masked tokens at -inf, lse = log(sum(exp(y))), p = exp(y - lse), and a target of 1 - e on the
label and u on every token, loss = lse - (1 - e) y[label] - u sum(y) + z lse². With the gradients `grad_loss` of the
loss and `grad_lse` of the lse, the gradient of x is
s (1 - (y / c)²) (p (grad_loss (1 + 2 z lse) + grad_lse) - grad_loss target).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from bowline.functional.loss.logits import cap_slope, scaled_and_capped
from bowline.functional.loss.loss_options import Options
from bowline.functional.loss.reference import position_losses

__all__ = ["Chunk", "SoftmaxRule", "finite_or_0"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The losses and lse of n rows, and the gradient at each row's label; all (n,), in float32 or wider.

    Rows without a label have an lse too; their losses and gradients are 0. If there is a `factor` (n,), the gradient of
    the products is their new content times that factor.
    """

    losses: torch.Tensor
    lse: torch.Tensor
    grad_label: torch.Tensor | None
    factor: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class SoftmaxRule:
    """The constants of the formulas: s, c, z, u and 1 - e."""

    scale: float
    softcap: float | None
    z_loss: float
    share: float
    label_share: float

    @classmethod
    def of(cls, options: Options, size: int) -> Self:
        """The constants for a vocabulary of `size`."""
        share = options.share(size)
        return cls(options.logit_scale, options.softcap, options.z_loss, share, 1 - options.label_smoothing)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """The logits y of products x, before the mask; x itself if they are equal."""
        return scaled_and_capped(x, self.scale, self.softcap)

    def logits_(self, x: torch.Tensor) -> torch.Tensor:
        """`logits` in place."""
        if self.scale != 1.0:
            x *= self.scale
        return x if self.softcap is None else x.div_(self.softcap).tanh_().mul_(self.softcap)

    def p_factor(self, lse: torch.Tensor, grad_loss: torch.Tensor, grad_lse: torch.Tensor | None) -> torch.Tensor:
        """The factor of p in the gradient: grad_loss (1 + 2 z lse) + grad_lse."""
        found = grad_loss * (1 + 2 * self.z_loss * lse) if self.z_loss else grad_loss
        return found if grad_lse is None else found + grad_lse

    def slope(self, y: torch.Tensor) -> torch.Tensor | float:
        """The derivative of y by x."""
        return self.scale if self.softcap is None else self.scale * cap_slope(y, self.softcap)

    def finish(
        self,
        x: torch.Tensor,
        lse: torch.Tensor,
        added: torch.Tensor,
        counted: torch.Tensor,
        grad_each: torch.Tensor | None,
        grad_lse: torch.Tensor | None,
    ) -> Chunk:
        """The chunk's result, from the product x at each row's label, its lse and the sum of its logits, all (n,).

        `counted`: which rows have a label. `grad_each`: `grad_loss`, with 0 for other rows, or `None` for no gradient.
        """
        y = self.logits(x)
        losses = position_losses(lse, y, self.share * added, label_share=self.label_share, z_loss=self.z_loss)
        losses = losses.masked_fill(~counted, 0.0)
        if grad_each is None:
            return Chunk(losses=losses, lse=lse, grad_label=None)
        grad_label = (y - lse).exp() * self.p_factor(lse, grad_each, grad_lse) - (
            self.share + self.label_share
        ) * grad_each
        return Chunk(losses=losses, lse=lse, grad_label=grad_label * self.slope(y))


def finite_or_0(most: torch.Tensor) -> torch.Tensor:
    """The numbers to subtract from the logits before `exp`: `most`, with 0 where it is infinite."""
    return most.masked_fill(most.isinf(), 0.0)
