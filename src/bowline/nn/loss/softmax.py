"""Between the products: a chunk of them becomes its losses and, in place, its gradient.

With y = c tanh(s x / c), masked tokens at -inf, lse = log(sum(exp(y))), p = exp(y - lse), and a target of 1 - e on the
label and u on every token, loss = lse - (1 - e) y[label] - u sum(y) + z lse². Where `of_loss` comes back for it and
`of_lse` for the lse, the gradient of x is s (1 - (y / c)²) (p (of_loss (1 + 2 z lse) + of_lse) - of_loss target).

The label's own column is left out of the chunk (0) and returned in float32 beside it: in half precision it is most of
the gradient, and so it is never rounded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from bowline.nn.loss.options import Options
from bowline.nn.loss.resources import Resources

__all__ = ["Chunk", "chunk_loss"]

LOG = logging.getLogger(__name__)
CACHED = 2**18
"""Logits that the plain operations take at once, so that what is between them stays in a cache."""
WORTH_COMPILING = 2**32
"""Logits that were computed without before a compilation, which takes ten seconds or more, begins to pay."""

Part = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Powers = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Of n rows: their losses and lse, and of the gradient the column of each row's own label; (n,), float32 or wider.

    The lse counts for rows without a label too; their losses and gradients are 0.
    """

    losses: torch.Tensor
    lse: torch.Tensor
    of_label: torch.Tensor | None


def chunk_loss(
    x: torch.Tensor,
    labels: torch.Tensor,
    of_loss: torch.Tensor | None,
    of_lse: torch.Tensor | None,
    options: Options,
    allowed: Resources,
) -> Chunk:
    """Products x (n, V), which are overwritten: by their gradient where there is an `of_loss` (n,), else by anything.

    labels (n,) may be `ignore_index`; `of_lse` (n,) or `None`.
    """
    size = x.shape[1]
    wide = torch.promote_types(x.dtype, torch.float32)
    counted = labels != options.ignore_index
    at = torch.arange(len(x), device=x.device), labels.masked_fill(~counted, 0)
    label = x[at].to(wide)
    rule = _Rule(options.logit_scale, options.softcap, options.z_loss, options.share(size))
    banned = None
    if options.mask_ids:
        banned = torch.zeros(size, dtype=torch.bool, device=x.device)
        banned[torch.as_tensor(options.mask_ids, device=x.device)] = True
    of_each = None if of_loss is None else of_loss.to(wide).masked_fill(~counted, 0.0)
    lse, added = _over_rows(x, banned, of_each, None if of_lse is None else of_lse.to(wide), rule, allowed)
    label = label * rule.scale
    if rule.softcap is not None:
        label = torch.tanh(label / rule.softcap) * rule.softcap
    losses = lse - (1 - options.label_smoothing) * label + rule.z_loss * lse.square() - rule.share * added
    losses = losses.masked_fill(~counted, 0.0)
    if of_each is None:
        return Chunk(losses=losses, lse=lse, of_label=None)
    own = (label - lse).exp() * rule.of_p(lse, of_each, of_lse) - (rule.share + 1 - options.label_smoothing) * of_each
    x[at] = 0.0
    return Chunk(losses=losses, lse=lse, of_label=own * rule.slope(label))


@dataclass(frozen=True, slots=True)
class _Rule:
    """The numbers of the formula above."""

    scale: float
    softcap: float | None
    z_loss: float
    share: float

    def of_p(self, lse: torch.Tensor, of_loss: torch.Tensor, of_lse: torch.Tensor | None) -> torch.Tensor:
        found = of_loss * (1 + 2 * self.z_loss * lse) if self.z_loss else of_loss
        return found if of_lse is None else found + of_lse

    def slope(self, y: torch.Tensor) -> torch.Tensor | float:
        """Of y by x."""
        return self.scale if self.softcap is None else self.scale * (1 - (y / self.softcap).square())


def _over_rows(
    x: torch.Tensor,
    banned: torch.Tensor | None,
    of_loss: torch.Tensor | None,
    of_lse: torch.Tensor | None,
    rule: _Rule,
    allowed: Resources,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The lse and the sum of the logits of each row, (n,) and (n,)."""
    part = compiled(rule) if _pays(x, allowed) and len(x) > 1 else None  # a size of 1 would be compiled again
    if part is not None:
        return part(x, banned, of_loss, of_lse)
    plain, step = _part(rule, _kept_powers), max(1, CACHED // x.shape[1])
    if x.device.type != "cpu" or step >= len(x):
        return plain(x, banned, of_loss, of_lse)
    parts = [
        plain(rows, banned, *(None if one is None else one[first : first + len(rows)] for one in (of_loss, of_lse)))
        for first, rows in zip(range(0, len(x), step), x.split(step), strict=True)
    ]
    lse, added = (torch.cat(both) for both in zip(*parts, strict=True))
    return lse, added


def _part(rule: _Rule, powers: Powers) -> Part:
    """All that reads or writes each logit, in one function, which a compiler makes one loop over a row."""

    def part(
        x: torch.Tensor, banned: torch.Tensor | None, of_loss: torch.Tensor | None, of_lse: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        if rule.scale != 1.0:
            y = y * rule.scale
        if rule.softcap is not None:
            y = torch.tanh(y / rule.softcap) * rule.softcap
        finite = y
        if banned is not None:
            finite, y = y.masked_fill(banned, 0.0), y.masked_fill(banned, -torch.inf)
        lse, power, share = powers(y)
        added = finite.sum(1) if rule.share else torch.zeros_like(lse)
        if of_loss is None:
            return lse, added
        gradient = power * (rule.of_p(lse, of_loss, of_lse) * share)[:, None]
        if rule.share:
            gradient = gradient - rule.share * of_loss[:, None]
        if rule.scale != 1.0 or rule.softcap is not None:
            gradient = gradient * rule.slope(finite)
        if banned is not None:
            gradient = gradient.masked_fill(banned, 0.0)
        x.copy_(gradient)
        return lse, added

    return part


def _kept_powers(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The lse (n,), and p as powers (n, V) and their share (n,): each power is made once and kept."""
    most = y.amax(1)
    most = most.masked_fill(most.isinf(), 0.0)
    power = (y - most[:, None]).exp_()
    total = power.sum(1)
    return most + total.log(), power, total.reciprocal()


def _fused_powers(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same with each power made twice: kept, a compiler would write all of them to memory, in float32."""
    lse = y.logsumexp(1)
    return lse, (y - lse[:, None]).exp(), torch.ones_like(lse)


class _Compiler:
    """Whether `torch.compile` works here, which is not known before it was tried, and how much was done without."""

    works = True
    done = 0


def _pays(x: torch.Tensor, allowed: Resources) -> bool:
    """Whether to compile now, if ever: in float32 there is little between the products that could be saved."""
    if (
        allowed.compiler is False
        or x.dtype.itemsize != 2
        or x.device.type != "cpu"
        or torch.is_inference_mode_enabled()
    ):
        return False
    _Compiler.done += x.numel()
    return allowed.compiler or _Compiler.done > WORTH_COMPILING


@lru_cache(maxsize=8)
def compiled(rule: _Rule) -> Part | None:
    """`_part` compiled, or `None`, and one line in the log, where there is no compiler."""
    if not _Compiler.works:
        return None
    try:
        part: Any = torch.compile(_part(rule, _fused_powers), dynamic=True)
        trial = torch.zeros(3, 70, dtype=torch.bfloat16)
        part(trial[:2, :65], None, torch.ones(2), None)
    except Exception as error:  # of whatever kind: the plain operations do the same
        _Compiler.works = False
        LOG.warning("no torch.compile here (%s): the loss runs without, slower", str(error).splitlines()[0][:100])
        return None
    return part  # type: ignore[no-any-return]
