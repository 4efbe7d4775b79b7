"""Skipped without a GPU: its kernels, its queue, its memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

HERE = torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu/" in str(item.path) and not HERE:
            item.add_marker(pytest.mark.skip(reason="there is no GPU here"))


@pytest.fixture
def peak() -> Callable[[Callable[[], object]], float]:
    """MiB that a second call holds at its peak, above what was held before it."""

    def measured(call: Callable[[], object]) -> float:
        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return float(torch.cuda.max_memory_allocated() - before) / 2**20

    return measured
