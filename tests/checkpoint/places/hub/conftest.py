"""A Hub on the loopback interface, without this machine's login, proxies and waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bowline.checkpoint.places.hub import HubRepository, Patience
from tests.checkpoint.loopback_hub import LoopbackHub
from tests.checkpoint.places.hub.asking import COMMIT, CONFIG, TOKEN, WEIGHTS


@pytest.fixture(autouse=True)
def no_login_and_no_proxy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN", False)


@pytest.fixture(autouse=True, scope="package")
def certificates_read_once() -> Iterator[None]:
    """Reading the certificates of the world takes longer than most of these tests, and none of them needs any."""
    import httpx2

    once = httpx2.create_ssl_context()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpx2, "create_ssl_context", lambda: once)
        yield


@pytest.fixture
def hub() -> Iterator[LoopbackHub]:
    files = {"config.json": CONFIG, "model.safetensors": WEIGHTS, "empty.txt": b""}
    with LoopbackHub(
        branches={"main": COMMIT}, commits={COMMIT: files}, stored_apart=frozenset({"model.safetensors"})
    ) as loopback:
        yield loopback


@pytest.fixture
def waits() -> list[float]:
    """The waits between attempts, in place of waiting."""
    return []


@pytest.fixture
def patience(waits: list[float]) -> Patience:
    return Patience(connect=2, read=5, deadline=10, attempts=4, longest_wait=60, sleep=waits.append)


@pytest.fixture
def open_hub(hub: LoopbackHub, patience: Patience) -> Iterator[Callable[..., HubRepository]]:
    opened: list[HubRepository] = []

    def open_repository(name: str = "org/name", **options: Any) -> HubRepository:
        defaults: dict[str, Any] = {"endpoint": hub.endpoint, "token": TOKEN, "patience": patience}
        opened.append(HubRepository.open_repository(name, **(defaults | options)))
        return opened[-1]

    yield open_repository
    for repository in opened:
        repository.close()
