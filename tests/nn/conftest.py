"""What the tests of live models share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import distributed


@pytest.fixture
def one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process alone, which asks nobody for its own name."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()
