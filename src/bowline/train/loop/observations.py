"""Measurements of a model in training for the log: tie, memory, split of the gradient, and divergence."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch
from torch import nn

from bowline.errors import TrainingError, UsageError
from bowline.nn.modules.gradient_split import SplitMeter, split_gradient
from bowline.nn.ties.ends import makes_logits
from bowline.nn.ties.shared_parameters import shared_ties
from bowline.nn.tree.slots import slots

__all__ = ["diverged", "peak_memory", "split_of_gradient", "tie_state"]

MEGABYTE = 2**20


def tie_state(model: nn.Module) -> str:
    """Return "tied" if the head's weight is the table now, and "untied" otherwise.

    Example:
        >>> model = nn.ModuleDict({"wte": nn.Embedding(9, 4), "lm_head": nn.Linear(4, 9)})
        >>> tie_state(model)
        'untied'
        >>> model["lm_head"].weight = model["wte"].weight
        >>> tie_state(model)
        'tied'
    """
    known = slots(model)
    ends = ((known[tie.target], known[tie.source]) for tie in shared_ties(model, known))
    return "tied" if any(makes_logits(target, source) for target, source in ends) else "untied"


def peak_memory(device: torch.device) -> float:
    """Return the peak memory until now in MB: of the accelerator for CUDA, otherwise of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MEGABYTE
    status = Path("/proc/self/status")
    if status.exists():  # `ru_maxrss` also counts the process that started this one
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / (MEGABYTE if sys.platform == "darwin" else 1024)


@contextmanager
def split_of_gradient(model: nn.Module, wanted: bool) -> Iterator[SplitMeter | None]:
    """Run `split_gradient(model)` if `wanted`; yields `None` if not, or if there is not exactly one tied matrix."""
    with ExitStack() as stack:
        meter = None
        if wanted:
            with suppress(UsageError):  # several tied matrices: it is unclear which to split
                meter = stack.enter_context(split_gradient(model))
        yield meter


def diverged(
    model: nn.Module, step: int, seen: Mapping[str, float], before: tuple[float, float, float] | None, kept: str
) -> TrainingError:
    """Make the error for a loss or gradient that is not finite, with the likely cause.

    Args:
        model: the model in training.
        step: the step at which it happened, counted from 1.
        seen: the values at that step; the error names the first one that is not finite.
        before: the run's first loss, its last loss before `step`, and the gradient's norm then; None at the first step.
        kept: a sentence on what is left of the run.
    """
    what, value = next((name, value) for name, value in seen.items() if not math.isfinite(value))
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    uniform = math.log(size) if isinstance(size, int) and size > 1 else math.inf
    if before is None:
        cause = (
            "the usual cause at the first step is NaN or infinity in the weights or labels, or a recipe that makes the "
            "logits too large"
        )
        way_out = "bowline.measure_loss(model) computes the loss before any training"
    elif before[0] > 2 * uniform:
        head = "tied head" if tie_state(model) == "tied" else "head"
        cause = (
            f"the first loss was {before[0]:.4g}, {before[0] / uniform:.0f} times ln V: the recipe makes the logits of "
            f"the {head} too large"
        )
        way_out = "initialise the model by another recipe (bowline init-loss compares them), or lower the learning rate"
    else:
        cause = f"before, the loss was {before[1]:.4g} and the gradient's norm {before[2]:.3g}: the steps are too large"
        way_out = "use a lower learning rate, a longer warm-up, or a smaller clip"
    return TrainingError(f"step {step}: the {what} is {value}; {cause}; {kept}", help=way_out)
