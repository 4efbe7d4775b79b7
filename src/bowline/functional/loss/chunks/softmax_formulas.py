"""From products to losses, and back: the formulas that every way of going through the logits shares.

With y = c tanh(s x / c), masked tokens at -inf, lse = log(sum(exp(y))), p = exp(y - lse), and a target of 1 - e on the
label and u on every token, loss = lse - (1 - e) y[label] - u sum(y) + z lse². Where `of_loss` comes back for it and
`of_lse` for the lse, the gradient of x is s (1 - (y / c)²) (p (of_loss (1 + 2 z lse) + of_lse) - of_loss target).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from bowline.functional.loss.loss_options import Options

__all__ = ["Chunk", "SoftmaxRule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Of n rows: their losses and lse, and of the gradient the column of each row's own label; (n,), float32 or wider.

    The lse counts for rows without a label too; their losses and gradients are 0. Where there is a `factor` (n,), the
    gradient of the products is what they were overwritten by times that.
    """

    losses: torch.Tensor
    lse: torch.Tensor
    of_label: torch.Tensor | None
    factor: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class SoftmaxRule:
    """The numbers of the formulas: s, c, z, u and 1 - e."""

    scale: float
    softcap: float | None
    z_loss: float
    share: float
    kept: float

    @classmethod
    def of(cls, options: Options, size: int) -> Self:
        """Of a vocabulary of `size`."""
        share = options.share(size)
        return cls(options.logit_scale, options.softcap, options.z_loss, share, 1 - options.label_smoothing)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Y of x, before the mask; x itself where they are the same."""
        y = x if self.scale == 1.0 else x * self.scale
        return y if self.softcap is None else torch.tanh(y / self.softcap) * self.softcap

    def logits_(self, x: torch.Tensor) -> torch.Tensor:
        """The same in place."""
        if self.scale != 1.0:
            x *= self.scale
        return x if self.softcap is None else x.div_(self.softcap).tanh_().mul_(self.softcap)

    def of_p(self, lse: torch.Tensor, of_loss: torch.Tensor, of_lse: torch.Tensor | None) -> torch.Tensor:
        """What p is multiplied by."""
        found = of_loss * (1 + 2 * self.z_loss * lse) if self.z_loss else of_loss
        return found if of_lse is None else found + of_lse

    def slope(self, y: torch.Tensor) -> torch.Tensor | float:
        """Of y by x."""
        return self.scale if self.softcap is None else self.scale * (1 - (y / self.softcap).square())

    def finish(
        self,
        x: torch.Tensor,
        lse: torch.Tensor,
        added: torch.Tensor,
        counted: torch.Tensor,
        of_each: torch.Tensor | None,
        of_lse: torch.Tensor | None,
    ) -> Chunk:
        """From the product x of each row's own label, its lse, and the sum of its logits, all (n,).

        `counted`: the rows that have a label; `of_each` is `of_loss`, 0 for the others, or `None` for no gradient.
        """
        y = self.logits(x)
        losses = lse - self.kept * y + self.z_loss * lse.square() - self.share * added
        losses = losses.masked_fill(~counted, 0.0)
        if of_each is None:
            return Chunk(losses=losses, lse=lse, of_label=None)
        own = (y - lse).exp() * self.of_p(lse, of_each, of_lse) - (self.share + self.kept) * of_each
        return Chunk(losses=losses, lse=lse, of_label=own * self.slope(y))
