"""Makes chunks and blocks of the vocabulary so small that every case has several."""

from __future__ import annotations

import pytest

from bowline.functional.loss.chunks import chunk_size


@pytest.fixture(autouse=True)
def small_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "real_chunks" not in request.fixturenames:
        monkeypatch.setattr(chunk_size, "ROOFLINE", {"cpu": (3, 3), "cuda": (3, 3)})
        monkeypatch.setattr(chunk_size, "BLOCK_ROWS", (4, 4))


@pytest.fixture
def real_chunks() -> None:
    """Leaves chunk and block sizes at their real values."""
