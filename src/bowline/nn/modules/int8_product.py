"""A few hidden states times an int8 matrix on the CPU, without the matrix in float.

A decoding step reads each entry of the head once and multiplies it once, so its time is that of reading the matrix,
and int8 has a quarter of float32's bytes. Two kernels of torch read it: `_weight_int8pack_mm` multiplies bfloat16, and
`_int_mm` int8. A float32 or float16 state is split into three int8 digits, which `_int_mm` multiplies exactly. Anything
else takes blocks of rows that are converted in a buffer as large as a cache.
"""

from __future__ import annotations

import functools

import torch
from torch.autograd import forward_ad

__all__ = ["block_rows", "fast_product", "only_plain_serves"]

MOST_STATES = 4
"""The number of hidden states up to which the kernels are faster than converted blocks."""
BUFFER_ELEMENTS, BUFFER_OF_THREADS = 1 << 19, 1 << 22
"""Entries of the buffer in which rows are converted. One thread keeps 2 MB of float32 in its cache. Several threads are
started twice for each block, and wait for a core each time where others work too: fewer blocks."""
ALIGNED = 32
"""Widths that `_weight_int8pack_mm` multiplies right: with others it reads past its rows (torch 2.13)."""
DIGITS, BASE = 3, 256
PIECE = 1 << 14
"""Logits that are put together at a time: so few that torch starts no threads for them, which would wait for a core."""
STEPS = 2**22
"""A state is rounded to multiples of its largest entry / 2^22, so that its first digit stays in int8."""


def fast_product(hidden: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor | None:
    """`hidden @ (scale[:, None] * values).T`, `(..., D)` to `(..., V)`; `None` where only the plain way serves.

    With scales `(V, D / G)` each group of G columns has its own, and blocks are converted.

    That is: where a gradient is wanted, in either mode of differentiation, on another device, while torch traces or
    compiles, under `torch.func` and under autocast. The sums are float32's (float64's for float64). A logit is rounded
    to the dtype of `hidden`; in blocks of bfloat16 twice, before and after it is scaled.
    """
    if only_plain_serves(hidden, values, scale):
        return None
    states = hidden.reshape(-1, hidden.shape[-1])
    few = len(states) <= MOST_STATES and scale.ndim == 1
    if few and hidden.dtype is torch.bfloat16 and values.shape[1] % ALIGNED == 0:
        logits = torch._weight_int8pack_mm(states.contiguous(), values, scale)
    elif few and hidden.dtype is not torch.float64 and _multiplies_int8():
        logits = _by_digits(states.float(), values, scale.float()).to(hidden.dtype)
    else:
        logits = _by_blocks(states, values, scale)
    return logits.view(*hidden.shape[:-1], len(values))


def only_plain_serves(hidden: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether only the float product of torch's own functions gives what the caller asks for."""
    traced = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    if traced or torch.is_autocast_enabled("cpu") or forward_ad._current_level >= 0:
        return True
    if torch._C._functorch.is_functorch_wrapped_tensor(hidden):
        return True
    plain = type(hidden) is torch.Tensor and hidden.is_cpu and values.is_cpu and hidden.dtype is scale.dtype
    if not plain or (torch.is_grad_enabled() and hidden.requires_grad):
        return True
    return hidden.numel() == 0 or len(values) == 0


@functools.cache
def _multiplies_int8() -> bool:
    """Whether the processor has int8 products (VNNI); without them `_int_mm` is slow."""
    ask = getattr(torch.cpu, "_is_vnni_supported", None)
    return bool(ask and ask()) and torch.backends.mkldnn.is_available()


def _by_digits(states: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Each state as three int8 digits of base 256: whole numbers are multiplied, and summed without rounding."""
    step = states.abs().amax(1, keepdim=True) / STEPS  # NaN and infinity stay what they are
    whole = (states.double() / step.clamp_min(torch.finfo(torch.float32).tiny)).round().to(torch.int32)
    digits = []
    for _ in range(DIGITS):
        digit = (whole + BASE // 2).remainder(BASE) - BASE // 2  # -128 ... 127
        digits.append(digit)
        whole = (whole - digit) // BASE
    stacked = torch.stack(digits, 1).to(torch.int8).flatten(0, 1)  # (states * digits, D)
    sums = torch._int_mm(stacked, values.t()).view(len(states), DIGITS, len(values))
    logits = torch.empty(len(states), len(values), device=states.device)
    for state, step_of_state in enumerate(step.flatten().tolist()):
        for start in range(0, len(values), PIECE):
            piece = slice(start, start + PIECE)
            part = torch.mul(sums[state, 0, piece], step_of_state, out=logits[state, piece])
            for power in range(1, DIGITS):
                part.add_(sums[state, power, piece].float(), alpha=step_of_state * BASE**power)
            part.mul_(scale[piece])
    return logits


def _by_blocks(states: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Rows converted block by block in one buffer; the logits are scaled, not the rows, unless groups have scales."""
    narrow = states.dtype is torch.float16 or (scale.ndim == 2 and states.dtype is torch.bfloat16)
    dtype = torch.float32 if narrow else states.dtype  # an unscaled sum overflows float16; scaled rows would be rounded
    states, rows, width = states.to(dtype), *values.shape
    step = block_rows(width)
    logits = torch.empty(len(states), rows, dtype=dtype, device=states.device)
    buffer = torch.empty(min(step, rows), width, dtype=dtype, device=states.device)
    for start in range(0, rows, step):
        block = buffer[: min(step, rows - start)]
        block.copy_(values[start : start + step])
        if scale.ndim == 2:
            steps = scale[start : start + step].to(dtype)
            block.view(*steps.shape, -1).mul_(steps.unsqueeze(-1))
        torch.mm(states, block.t(), out=logits[:, start : start + step])
    return (logits.mul_(scale.to(dtype)) if scale.ndim == 1 else logits).to(scale.dtype)


def block_rows(width: int) -> int:
    """The rows that are converted at a time."""
    return max(1, (BUFFER_ELEMENTS if torch.get_num_threads() == 1 else BUFFER_OF_THREADS) // width)
