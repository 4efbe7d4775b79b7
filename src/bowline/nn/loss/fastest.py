"""Which library multiplies here: timed once, before the first large product.

Other work on the machine slows one moment down and not the next, so the libraries take turns, and another than
`torch.mm` is chosen only where it is clearly the faster by its best time and by its median. Chosen wrongly, it would
slow down every step of the process.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache

import torch

from bowline.nn.loss.products import Products
from bowline.nn.loss.resources import Resources
from bowline.nn.wide_products import emulated

__all__ = ["clearly_faster", "in_turns", "products_for"]

LOG = logging.getLogger(__name__)
WORTH_TIMING = 2**34
"""Multiplications of one product over all rows, about what the timing itself needs."""
CLEARLY = 0.75
"""Another library has to take less than this share of `torch.mm`'s time: what it makes has to be copied, too.

On AMD Zen 4 oneDNN's products took 0.75 to 0.95 of it from one minute to the next, and whole steps 0.91 to 1.09.
"""
ROUNDS = 7
ROLES = ("logits", "of_hidden", "of_weight")


def products_for(hidden: torch.Tensor, weight: torch.Tensor, allowed: Resources) -> Products:
    """What to multiply hidden (N, D) and weight (V, D) with."""
    work = hidden.shape[0] * weight.numel()
    if weight.device.type == "cpu" and hidden.dtype.itemsize == 2 and emulated(hidden.dtype):
        return Products(logits="float32", of_hidden="float32", of_weight="float32")
    if weight.device.type != "cpu" or work < WORTH_TIMING or hidden.dtype == torch.float64:
        return Products()
    fastest = _timed(hidden.dtype, torch.get_num_threads())
    if allowed.onednn:
        return fastest
    return Products(**{role: "mm" if name == "onednn" else name for role, name in asdict(fastest).items()})


@lru_cache(maxsize=8)
@torch.no_grad()
def _timed(dtype: torch.dtype, threads: int) -> Products:
    """The fastest of each product, of 512 tokens, 2048 rows of the matrix and a width of 768.

    Of 128 tokens oneDNN's may be no faster where of 512 they take three quarters of the time (AMD Zen 4).
    """
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 768, generator=generator).to(dtype) for rows in (512, 2048))
    x = torch.randn(len(weight), len(hidden), generator=generator).to(dtype)
    of_hidden, of_weight = torch.zeros_like(hidden, dtype=torch.float32), torch.zeros_like(weight)
    rival = "onednn" if dtype == torch.float32 else "float32"

    def call(role: str, name: str) -> Callable[[], object]:
        by = Products(logits=name, of_hidden=name, of_weight=name)
        ready, into = by.ready(hidden), torch.empty(x.shape, dtype=by.dtype_of_logits(hidden))
        return {
            "logits": lambda: by.make_turned_logits(ready, weight, into),
            "of_hidden": lambda: by.add_of_hidden(of_hidden, x.t(), weight),
            "of_weight": lambda: by.add_block_of_weight(of_weight, x, ready, first=False),
        }[role]

    best = dict.fromkeys(ROLES, "mm")
    for role in ROLES:
        try:
            times = in_turns({name: call(role, name) for name in ("mm", rival)})
        except Exception as error:  # it is not there, or not as it was
            LOG.info("no %s products here: %s", rival, str(error).splitlines()[0][:100])
            break
        if clearly_faster(times[rival], times["mm"]):
            best[role] = rival
    LOG.info("products of %s with %d threads: %s", dtype, threads, best)
    return Products(**best)


def clearly_faster(times: Sequence[float], than: Sequence[float]) -> bool:
    """Whether the best and the median of `times` are both less than 0.75 of the other's.

    Example:
        >>> clearly_faster([5, 7, 8], [10, 10, 11]), clearly_faster([5, 11, 12], [10, 10, 11])
        (True, False)
    """
    return all(of(times) < CLEARLY * of(than) for of in (min, statistics.median))


def in_turns(
    calls: Mapping[str, Callable[[], object]], clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """The times of each of `calls`, one after the other, round by round; a first round warms up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(1 + ROUNDS):
        for name, call in calls.items():
            started = clock()
            call()
            if number:
                times[name].append(clock() - started)
    return times
