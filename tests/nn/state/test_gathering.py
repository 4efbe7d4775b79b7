"""What the processes of a save say if one of them is lost or fails; the deaths themselves are in tests/distributed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed

from bowline.errors import CheckpointError
from bowline.nn.state.gathering import Whole, first_writes

pytestmark = [
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
        reason="this torch has no gloo",
    ),
    pytest.mark.usefixtures("one_process"),
]
TENSORS = {"a": torch.zeros(2)}


def spread() -> dict[str, torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    return {"a": distribute_tensor(torch.zeros(2), init_device_mesh("cpu", (1,)), [Shard(0)])}


def nobody_answers(*arguments: Any, **options: Any) -> None:
    raise RuntimeError("Connection closed by peer\nmore")


def test_the_writers_own_error_is_raised_although_nobody_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(whole: Whole) -> None:
        raise CheckpointError("no room")

    monkeypatch.setattr(distributed, "broadcast_object_list", nobody_answers)
    with pytest.raises(CheckpointError, match=r"^no room$"):
        first_writes(TENSORS, write)


def test_a_tensor_that_cannot_be_gathered_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    held = spread()
    monkeypatch.setattr(distributed, "broadcast_object_list", nobody_answers)
    with pytest.raises(CheckpointError, match=r"^a: cannot be gathered from all processes: Connection closed by peer "):
        first_writes(held, lambda whole: whole("a"))


def test_a_process_that_is_lost_after_the_write_does_not_hide_that_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "broadcast_object_list", nobody_answers)
    with pytest.raises(CheckpointError, match="the checkpoint is written, but not all processes could be told"):
        first_writes(TENSORS, lambda whole: 3)


def test_an_error_of_memory_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    held = spread()
    monkeypatch.setattr("bowline.nn.state.gathering.whole_tensor", full)
    with pytest.raises(torch.OutOfMemoryError):
        first_writes(held, lambda whole: whole("a"))
