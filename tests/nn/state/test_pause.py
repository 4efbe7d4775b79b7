"""Loading pauses garbage collection, and leaves it as it was."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

from bowline.errors import BowlineError
from bowline.nn import load_checkpoint, save_checkpoint
from bowline.nn.state import load_checkpoint as module
from bowline.nn.state.load_inventory import survey


@pytest.mark.parametrize("enabled", [True, False])
def test_after_a_load_and_after_a_failed_one_it_is_as_before(tmp_path: Path, enabled: bool) -> None:
    model = nn.ModuleDict({"wte": nn.Embedding(5, 3)})
    save_checkpoint(model, tmp_path / "saved")
    try:
        (gc.enable if enabled else gc.disable)()
        load_checkpoint(model, tmp_path / "saved")
        assert gc.isenabled() is enabled
        with pytest.raises(BowlineError):
            load_checkpoint(nn.ModuleDict({"wte": nn.Embedding(7, 3)}), tmp_path / "saved")
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


def test_within_it_nothing_is_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleDict({"wte": nn.Embedding(5, 3)})
    save_checkpoint(model, tmp_path / "saved")
    seen = []

    def observed(model: nn.Module) -> object:
        seen.append(gc.isenabled())
        return survey(model)

    monkeypatch.setattr(module, "survey", observed)
    load_checkpoint(model, tmp_path / "saved")
    assert seen == [False]
    assert torch.is_tensor(model["wte"].weight)
