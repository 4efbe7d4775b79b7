"""Chooses the fastest library for matrix products on this CPU by timing them once, before the first large product.

Other work on the machine may slow down any moment, so the libraries are timed in turns, and `torch.mm` is replaced
only by one that is clearly faster in both its best time and its median. A wrong choice would slow down every step of
the process. If torch has to be deterministic, nothing is timed.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import torch

from bowline.functional.kernels.half_precision_emulation import emulated
from bowline.functional.loss.chunks.cpu_matmul import LIBRARIES, contiguous_in, keep_freed_blocks
from bowline.functional.loss.chunks.matmul import Products
from bowline.functional.loss.resource_limits import Resources

__all__ = ["clearly_faster", "in_turns", "products_for"]

LOG = logging.getLogger(__name__)
WORTH_TIMING = 2**34
"""Multiplications of one product over all rows from which timing pays off: about as many as timing needs."""
CLEARLY = 0.95
"""Another library is chosen if it takes less than this share of `torch.mm`'s time.

On AMD Zen 4 oneDNN's three products took 0.73 to 0.82 of it in 16 processes, and as long when the machine was quiet.
"""
ROUNDS = 7


def products_for(hidden: torch.Tensor, weight: torch.Tensor, allowed: Resources) -> Products:
    """The library to multiply hidden (N, D) and weight (V, D) with."""
    work = hidden.shape[0] * weight.numel()
    if weight.device.type == "cpu" and hidden.dtype.itemsize == 2 and emulated(hidden.dtype):
        return LIBRARIES["float32"]
    if weight.device.type != "cpu" or work < WORTH_TIMING or hidden.dtype == torch.float64:
        return LIBRARIES["mm"]
    if not allowed.onednn or torch.are_deterministic_algorithms_enabled():
        return LIBRARIES["mm"]
    return LIBRARIES[_timed(hidden.dtype, torch.get_num_threads())]


@lru_cache(maxsize=8)
@torch.no_grad()
def _timed(dtype: torch.dtype, threads: int) -> str:
    """The fastest library for the three products with 512 tokens, 2032 rows of the matrix and a width of 768.

    With 128 tokens oneDNN may be no faster even if it takes three quarters of the time with 512 (AMD Zen 4).
    """
    generator = torch.Generator("cpu").manual_seed(0)
    hidden, weight = (torch.randn(rows, 768, generator=generator, device="cpu").to(dtype) for rows in (512, 2032))
    grad_hidden, grad_weight = torch.zeros_like(hidden, dtype=torch.float32), torch.zeros_like(weight)
    rival = "onednn" if dtype == torch.float32 else "float32"
    if rival == "onednn":
        keep_freed_blocks()

    def call(library: str) -> Callable[[], object]:
        by = LIBRARIES[library]
        ready = by.ready(hidden)
        room = hidden.new_empty(len(weight), len(hidden), dtype=by.logits_dtype(hidden))

        def products() -> None:
            x = by.make_transposed_logits(ready, weight, room)
            by.add_grad_hidden(grad_hidden, x.t(), weight)
            x = x if x.is_contiguous() else contiguous_in(room, x)
            by.add_block_grad_weight(grad_weight, x, ready, first=True)

        return products

    try:
        times = in_turns({library: call(library) for library in ("mm", rival)})
    except Exception as error:  # a private operator is missing or has changed
        LOG.info("no %s products here: %s", rival, str(error).splitlines()[0][:100])
        return "mm"
    best = rival if clearly_faster(times[rival], times["mm"]) else "mm"
    LOG.info("products of %s with %d threads: %s", dtype, threads, best)
    return best


def clearly_faster(times: Sequence[float], than: Sequence[float]) -> bool:
    """Whether the best and the median of `times` are both below 0.95 of those of `than`.

    Example:
        >>> clearly_faster([5, 7, 8], [10, 10, 11]), clearly_faster([5, 11, 12], [10, 10, 11])
        (True, False)
    """
    return all(of(times) < CLEARLY * of(than) for of in (min, statistics.median))


def in_turns(
    calls: Mapping[str, Callable[[], object]], clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """The times of each of `calls`, run one after the other in rounds; a first round warms up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(1 + ROUNDS):
        for name, call in calls.items():
            started = clock()
            call()
            if number:
                times[name].append(clock() - started)
    return times
