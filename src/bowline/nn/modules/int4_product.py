"""A few hidden states times a table of 4-bit codes on the CPU, without the whole matrix in float."""

from __future__ import annotations

import torch

from bowline.nn.modules.int8_product import block_rows, only_plain_serves

__all__ = ["fast_int4_product"]


def fast_int4_product(
    hidden: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor
) -> torch.Tensor | None:
    """`hidden @ rows.T` of an `Int4Table`, `(..., D)` to `(..., V)`; `None` where only the plain way serves.

    The conditions are those of `fast_product`. The sums are float32's (float64's for float64), and a logit is rounded
    once, to the dtype of `hidden`: each row is `scale * code` less the group's `scale * zero / 16`, which is multiplied
    by the sum of the state over the group.
    """
    if only_plain_serves(hidden, values, scale):
        return None
    states = hidden.reshape(-1, hidden.shape[-1])
    return _by_blocks(states, values, scale, zero).view(*hidden.shape[:-1], len(values))


def _by_blocks(states: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    dtype = torch.float64 if states.dtype is torch.float64 else torch.float32
    wide, (rows, groups), width = states.to(dtype), scale.shape, states.shape[1]
    half = width // groups // 2
    sums = wide.view(len(wide), groups, -1).sum(-1) / 16
    step = min(rows, block_rows(width))
    logits = torch.empty(len(wide), rows, dtype=dtype, device=states.device)
    buffer = torch.empty(step, groups, 2, half, dtype=dtype, device=states.device)
    octets = torch.empty(step, groups, half, dtype=torch.uint8, device=states.device)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        packed = values[start:stop].view(stop - start, groups, half)
        codes, part = buffer[: stop - start], octets[: stop - start]
        codes[:, :, 0].copy_(torch.bitwise_and(packed, 15, out=part))
        codes[:, :, 1].copy_(torch.bitwise_right_shift(packed, 4, out=part))
        steps = scale[start:stop].to(dtype)
        codes.mul_(steps[:, :, None, None])
        block = logits[:, start:stop]
        torch.mm(wide, codes.view(stop - start, width).t(), out=block)
        block.sub_(sums @ (steps * zero[start:stop]).t())
    return logits.to(states.dtype)
