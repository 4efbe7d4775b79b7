"""Computes losses and wanted gradients chunk by chunk, without holding the logits of all tokens.

`cpu_loop` and `gpu_loop` go over chunks of tokens; `vocabulary_blocks` goes over blocks of the vocabulary, which needs
less memory.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from bowline.functional.loss.chunks.cpu_loop import run_on_cpu
from bowline.functional.loss.chunks.gpu_loop import run_on_gpu
from bowline.functional.loss.chunks.loss_job import LossJob, LossResult
from bowline.functional.loss.chunks.vocabulary_blocks import needs_blocks, run_by_vocabulary

__all__ = ["run_job"]

WORTH_WAITING = 2**39
"""GPU operations, about a millisecond's worth, above which waiting for the count of labelled rows pays off."""


@torch.no_grad()
def run_job(job: LossJob, *, skip: bool = False) -> LossResult:
    """The losses of the rows of hidden, and the wanted gradients.

    `skip`: leave out rows without a label, so that infinities in them do no harm.
    """
    if not skip:
        return _run_on_device(job)
    counted = job.labels != job.options.ignore_index
    if not _may_wait(job):
        return _run_on_device(replace(job, hidden=torch.where(counted[:, None], job.hidden, 0.0)))
    rows = counted.nonzero()[:, 0]
    return _run_on_device(job) if len(rows) == len(counted) else _run_on_device(job.of(rows)).spread(rows, len(counted))


def _may_wait(job: LossJob) -> bool:
    """Whether to wait once for the count of labelled rows: cheaper than computing unlabelled rows."""
    if job.hidden.device.type == "cpu":
        return True
    return 6 * job.hidden.numel() * len(job.weight) > WORTH_WAITING and not torch.cuda.is_current_stream_capturing()


def _run_on_device(job: LossJob) -> LossResult:
    if job.hidden.device.type == "cpu":
        return run_on_cpu(job)
    return run_by_vocabulary(job) if needs_blocks(job) else run_on_gpu(job)
