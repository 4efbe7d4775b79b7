"""One pass over the tokens: losses, and gradients where they are wanted, without the logits of all tokens.

`sweep_cpu` and `sweep_gpu` go over chunks of tokens; `by_vocabulary` over blocks of the
vocabulary, for less memory.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from bowline.functional.loss.chunks.cpu_loop import sweep_on_cpu
from bowline.functional.loss.chunks.gpu_loop import sweep_on_gpu
from bowline.functional.loss.chunks.loss_job import Job, Sweep
from bowline.functional.loss.chunks.vocabulary_blocks import needs_blocks, sweep_by_vocabulary

__all__ = ["sweep"]

WORTH_WAITING = 2**39
"""Operations on a GPU, about a millisecond: for less, it is not waited for how many rows have a label."""


@torch.no_grad()
def sweep(job: Job, *, skip: bool = False) -> Sweep:
    """The losses of the rows of hidden, and the wanted gradients for what comes back.

    `skip`: rows without a label are left out, and so is what they hold, infinities included.
    """
    if not skip:
        return _swept(job)
    counted = job.labels != job.options.ignore_index
    if not _may_wait(job):
        return _swept(replace(job, hidden=torch.where(counted[:, None], job.hidden, 0.0)))
    rows = counted.nonzero()[:, 0]
    return _swept(job) if len(rows) == len(counted) else _swept(job.of(rows)).spread(rows, len(counted))


def _may_wait(job: Job) -> bool:
    """For how many rows have a label: once, which costs a GPU's queue less than rows without one would."""
    if job.hidden.device.type == "cpu":
        return True
    return 6 * job.hidden.numel() * len(job.weight) > WORTH_WAITING and not torch.cuda.is_current_stream_capturing()


def _swept(job: Job) -> Sweep:
    if job.hidden.device.type == "cpu":
        return sweep_on_cpu(job)
    return sweep_by_vocabulary(job) if needs_blocks(job) else sweep_on_gpu(job)
