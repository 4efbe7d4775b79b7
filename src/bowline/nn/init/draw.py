"""Draws one tensor in place from a distribution, by a given generator."""

from __future__ import annotations

import torch

from bowline.errors import UsageError
from bowline.recipes import Distribution

__all__ = ["draw_"]

BLOCK_ELEMENTS = 1 << 22
"""Numbers per block of a draw, so that a half-precision table needs no float32 copy."""


@torch.no_grad()
def draw_(
    tensor: torch.Tensor, how: Distribution, scale: float, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Fill `tensor` from `how`, with `scale` the value of its scale: `how.scale(sizes)`. Returns `tensor`.

    float32 and float64 are drawn in themselves, half precision in float32 and rounded once: what is drawn in bfloat16
    is what would be drawn in float32, rounded. A truncated normal is exact: what lies beyond is drawn again.

    Raises:
        UsageError: an unknown kind of distribution.

    Example:
        >>> from bowline.recipes import truncated
        >>> drawn = draw_(torch.empty(1000), truncated(0.02), 0.02, torch.Generator().manual_seed(0))
        >>> bool(drawn.abs().max() <= 0.04), round(float(drawn.std()), 2)
        (True, 0.02)
    """
    if how.kind == "constant":
        return tensor.fill_(scale)
    if how.kind not in ("normal", "truncated", "uniform"):
        raise UsageError(f"unknown kind of distribution {how.kind!r}, expected normal, truncated, uniform or constant")
    dtype = tensor.dtype if tensor.dtype in (torch.float32, torch.float64) else torch.float32
    if not tensor.is_contiguous():
        whole = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
        return tensor.copy_(draw_(whole, how, scale, generator))
    for block in tensor.view(-1).split(BLOCK_ELEMENTS):
        if dtype == tensor.dtype:
            _fill(block, how, scale, generator)
        else:
            block.copy_(_fill(torch.empty(block.shape, dtype=dtype, device=block.device), how, scale, generator))
    return tensor


def _fill(block: torch.Tensor, how: Distribution, scale: float, generator: torch.Generator | None) -> torch.Tensor:
    if how.kind == "uniform":
        return block.uniform_(-scale, scale, generator=generator)
    if how.kind == "normal" or scale == 0:
        return block.normal_(0.0, scale, generator=generator)
    block.normal_(generator=generator)  # nn.init.trunc_normal_ draws whole blocks again: 3 times slower
    beyond = (block.abs() > how.cut).nonzero()[:, 0]
    while len(beyond):
        again = torch.empty(len(beyond), dtype=block.dtype, device=block.device).normal_(generator=generator)
        block[beyond] = again
        beyond = beyond[again.abs() > how.cut]
    return block.mul_(scale)
