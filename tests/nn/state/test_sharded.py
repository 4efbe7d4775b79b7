"""State into and out of a model whose matrices are sharded (FSDP2, one process): as if they were whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bowline.errors import TieError
from bowline.nn import load_checkpoint, load_state, save_checkpoint
from tests.nn.models import TinyLM, tied

pytestmark = [
    pytest.mark.usefixtures("one_process"),
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed"),
]


def sharded(seed: int = 0) -> TinyLM:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = tied(TinyLM(seed=seed))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


def whole(model: TinyLM) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("assign", [False, True])
def test_a_sharded_models_own_state_has_both_names_of_one_matrix(assign: bool) -> None:
    model, other = sharded(), sharded(seed=1)
    assert load_state(model, other.state_dict(), assign=assign)
    assert model.head.weight is model.emb.weight
    expected = tied(TinyLM(seed=1)).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in whole(model).items())


def test_a_whole_file_is_loaded_into_shards(tmp_path: Path) -> None:
    expected = tied(TinyLM(seed=1))
    save_checkpoint(expected, tmp_path / "model")
    model = sharded()
    held = model.head.weight
    load_checkpoint(model, tmp_path / "model")
    assert model.head.weight is model.emb.weight is held
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in whole(model).items())
    load_state(model, tied(TinyLM(seed=2)).state_dict())
    assert torch.equal(whole(model)["emb.weight"], TinyLM(seed=2).emb.weight)


def test_ends_that_differ_are_refused_for_shards_too(tmp_path: Path) -> None:
    model = sharded()
    before = whole(model)
    with pytest.raises(TieError, match="differ"):
        load_state(model, TinyLM(seed=1).state_dict())
    assert all(torch.equal(value, before[name]) for name, value in whole(model).items())


def test_shards_are_saved_as_the_whole(tmp_path: Path) -> None:
    assert save_checkpoint(sharded(), tmp_path / "model") == ("model.safetensors",)
    again = tied(TinyLM(seed=1))
    load_checkpoint(again, tmp_path / "model")
    assert torch.equal(again.emb.weight, TinyLM(seed=0).emb.weight)
