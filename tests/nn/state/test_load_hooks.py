"""`load_state` where modules have a say in loading: hooks, old versions, extra state. The rules are torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bowline.errors import CheckpointError, TieError
from bowline.nn import load_checkpoint, load_state, save_checkpoint
from tests.nn.models import TinyLM, tied
from tests.nn.state.snapshots import snapshot


class Normed(TinyLM):
    """With a module that loads states of its older versions in its own way."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.statistics = nn.BatchNorm1d(4)


class Counting(TinyLM):
    """With extra state, an object that is no tensor."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.steps = seed

    def get_extra_state(self) -> Any:
        return {"steps": self.steps}

    def set_extra_state(self, state: Any) -> None:
        self.steps = state["steps"]


def renamed(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """What a class does that used to call its norm's weight `gamma`."""
    if prefix + "gamma" in state:
        state[prefix + "weight"] = state.pop(prefix + "gamma")


def with_hook(model: TinyLM) -> TinyLM:
    model.norm.register_load_state_dict_pre_hook(renamed)
    return model


def old_state() -> dict[str, torch.Tensor]:
    state = dict(tied(TinyLM(seed=1)).state_dict())
    state["norm.gamma"] = state.pop("norm.weight") + 1
    return state


# --- hooks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("assign", [False, True])
def test_a_hook_that_renames_is_run_and_the_tie_is_kept(assign: bool) -> None:
    model, plain = with_hook(tied(TinyLM())), with_hook(tied(TinyLM()))
    plain.load_state_dict(old_state())
    assert load_state(model, old_state(), assign=assign)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())
    assert model.head.weight is model.emb.weight


def test_a_hook_does_not_make_strict_loading_lax() -> None:
    model = with_hook(tied(TinyLM()))
    with pytest.raises(RuntimeError, match="Missing key"):
        with_hook(tied(TinyLM())).load_state_dict({"emb.weight": torch.ones(11, 4)})
    untouched = snapshot(model)
    with pytest.raises(CheckpointError, match=r"missing norm\.weight, norm\.bias"):
        load_state(model, {"emb.weight": torch.ones(11, 4)})
    assert snapshot(model) == untouched


def test_what_does_not_fit_a_model_with_hooks_changes_nothing_either() -> None:
    model = with_hook(tied(TinyLM()))
    untouched = snapshot(model)
    with pytest.raises(CheckpointError, match="norm"):
        load_state(model, old_state() | {"norm.gamma": torch.ones(5)})
    assert snapshot(model) == untouched


def test_weight_norm_whose_hook_reads_old_names_is_loaded_strictly() -> None:
    def model(seed: int) -> TinyLM:
        made = tied(TinyLM(seed=seed))
        made.mix = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        return made

    state = dict(model(1).state_dict())
    loaded = model(0)
    assert load_state(loaded, state)
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())
    del state["norm.bias"]
    with pytest.raises(CheckpointError, match=r"missing norm\.bias"):
        load_state(model(0), state)


def test_a_mapped_file_reaches_a_model_on_meta_through_a_renaming_hook(tmp_path: Any) -> None:
    torch.save(old_state(), tmp_path / "pytorch_model.bin")
    with torch.device("meta"):
        model = with_hook(tied(TinyLM()))
    load_checkpoint(model, tmp_path)
    assert torch.equal(model.norm.weight, old_state()["norm.gamma"])
    assert model.head.weight is model.emb.weight


# --- older versions of a module ---------------------------------------------------------------------------------------


def test_a_state_from_before_batches_were_counted_is_loaded_as_torch_loads_it() -> None:
    state = {name: value for name, value in tied(Normed(1)).state_dict().items() if "num_batches" not in name}
    state = {name: value + 1 for name, value in state.items()}
    plain, model = tied(Normed()), tied(Normed())
    plain.load_state_dict(state)
    assert load_state(model, state)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_state_that_says_its_version_is_held_to_it() -> None:
    state = tied(Normed(1)).state_dict()  # carries `_metadata`, in which the norm is of version 2
    del state["statistics.num_batches_tracked"]
    with pytest.raises(RuntimeError, match="num_batches_tracked"):
        tied(Normed()).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"missing statistics\.num_batches_tracked"):
        load_state(tied(Normed()), state)


@pytest.mark.parametrize("assign", [False, True])
def test_buffers_are_loaded_whatever_their_dtype(assign: bool) -> None:
    state = {name: value.clone() for name, value in tied(Normed(1)).state_dict().items()}
    state["statistics.num_batches_tracked"] += 7
    state["statistics.running_mean"] += 0.5
    model = tied(Normed())
    assert load_state(model, state, assign=assign)
    assert model.get_buffer("statistics.num_batches_tracked") == 7
    assert torch.equal(model.get_buffer("statistics.running_mean"), torch.full((4,), 0.5))


def test_names_that_a_checkpoint_has_too_many_do_not_keep_the_rest_from_a_model_on_meta(tmp_path: Any) -> None:
    state = {name: value for name, value in tied(Normed(1)).state_dict().items() if "num_batches" not in name}
    torch.save({**state, "position_ids": torch.arange(3)}, tmp_path / "pytorch_model.bin")
    with torch.device("meta"):
        model = tied(Normed())
    report = load_checkpoint(model, tmp_path, strict=False)
    assert report.unexpected == ("position_ids",)
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    assert model.get_buffer("statistics.num_batches_tracked") == 0


# --- extra state ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("assign", [False, True])
def test_extra_state_is_given_to_the_module_that_asks_for_it(assign: bool) -> None:
    model = tied(Counting())
    assert load_state(model, tied(Counting(5)).state_dict(), assign=assign)
    assert model.steps == 5


def test_extra_state_that_is_missing_or_not_asked_for_is_said() -> None:
    state = tied(TinyLM(seed=1)).state_dict()
    with pytest.raises(CheckpointError, match="missing _extra_state"):
        load_state(tied(Counting()), state)
    with pytest.raises(CheckpointError, match="unexpected _extra_state"):
        load_state(tied(TinyLM()), tied(Counting()).state_dict())


def test_a_conflict_is_found_before_any_hook_runs() -> None:
    called: list[str] = []
    model = tied(Counting())
    hooked: Any = model
    hooked.register_load_state_dict_pre_hook(lambda *_: called.append("hook"))
    untied = Counting(5)
    with pytest.raises(TieError):
        load_state(model, untied.state_dict())
    assert not called
    assert model.steps == 0


def test_extra_state_cannot_be_saved_as_safetensors(tmp_path: Any) -> None:
    with pytest.raises(CheckpointError, match="_extra_state: extra state of type dict, expected a tensor"):
        save_checkpoint(tied(Counting()), tmp_path / "model")
    assert not (tmp_path / "model").exists()
