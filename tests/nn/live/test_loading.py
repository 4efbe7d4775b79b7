"""State into and out of a tied model: what torch does to the tie without a word, and what Bowline does."""

from __future__ import annotations

import inspect
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from bowline.errors import CheckpointError, TieError
from bowline.nn import check_ties, find_ties
from bowline.nn.state.load_checkpoint import load_checkpoint
from bowline.nn.state.load_state import load_state
from bowline.nn.state.save_checkpoint import save_checkpoint
from tests.nn.models import HEAD, TinyLM, tied

IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def lm(seed: int = 0) -> TinyLM:
    return tied(TinyLM(seed=seed))


def is_tied(model: TinyLM) -> bool:
    return model.head.weight is model.emb.weight


def step(model: TinyLM, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(IDS).square().sum().backward()
    optimizer.step()


# --- assign=True ------------------------------------------------------------------------------------------------------


def test_torch_assigns_two_parameters_and_the_optimizer_trains_neither() -> None:
    model = lm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.load_state_dict(lm(seed=1).state_dict(), assign=True)
    assert not is_tied(model)
    assert check_ties(model)["head.weight"].state == "ALIAS"
    before = model(IDS).detach()
    step(model, optimizer)
    assert torch.equal(model(IDS), before), "a step of the optimizer changes nothing"


def test_load_state_assigns_memory_and_keeps_the_tie_and_the_optimizer() -> None:
    model, other = lm(), lm(seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    load_state(model, other.state_dict(), assign=True)
    assert is_tied(model)
    assert model.emb.weight.data_ptr() == other.emb.weight.data_ptr(), "nothing was copied"
    assert torch.equal(model(IDS), other(IDS))
    assert check_ties(model, optimizer=optimizer)
    before = model(IDS).detach()
    step(model, optimizer)
    assert not torch.equal(model(IDS), before)


@pytest.mark.parametrize("name", HEAD)
def test_torch_leaves_the_other_end_old_when_a_file_has_one_key(name: str) -> None:
    model, state = lm(), lm(seed=1).state_dict()
    old = model.emb.weight.detach().clone()
    other = next(end for end in HEAD if end != name)
    del state[other]
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(state, assign=True)
    model.load_state_dict(state, assign=True, strict=False)
    assert torch.equal(model.get_parameter(name), state[name])
    assert torch.equal(model.get_parameter(other), old)


@pytest.mark.parametrize("name", HEAD)
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_load_state_loads_both_ends_from_either_key(name: str, assign: bool) -> None:
    model, other = lm(), lm(seed=1)
    state = other.state_dict()
    del state[next(end for end in HEAD if end != name)]
    report = load_state(model, state, assign=assign)
    assert report
    assert [(tie.target, tie.source) for tie in report.tied] == [HEAD]
    assert is_tied(model)
    assert torch.equal(model(IDS), other(IDS))


def test_the_flag_sticks_in_a_dict_that_torch_has_assigned_from() -> None:
    state = lm(seed=1).state_dict()
    lm().load_state_dict(state, assign=True)
    later = lm()
    later.load_state_dict(state, assign=False)
    assert not is_tied(later), "assign=False, and assigned all the same"


def test_load_state_leaves_no_flag_behind_and_heeds_none() -> None:
    state = lm(seed=1).state_dict()
    load_state(lm(), state, assign=True)
    later = lm()
    later.load_state_dict(state, assign=False)
    assert is_tied(later)

    lm().load_state_dict(state, assign=True)
    later = lm()
    load_state(later, state, assign=False)
    assert is_tied(later)
    assert later.emb.weight.data_ptr() != state["emb.weight"].data_ptr(), "copied, as was asked"


# --- an untied checkpoint into a tied model ---------------------------------------------------------------------------


def test_torch_lets_the_last_key_win() -> None:
    model, untied = lm(), TinyLM(seed=1)
    model.load_state_dict(untied.state_dict())
    assert torch.equal(model.emb.weight, untied.head.weight)
    assert not torch.equal(model.emb.weight, untied.emb.weight), "the trained embedding is lost, without a word"


def test_load_state_compares_and_refuses() -> None:
    model, untied = lm(), TinyLM(seed=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(TieError, match=r"head\.weight.*emb\.weight.*11 of 11 rows differ"):
        load_state(model, untied.state_dict())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert is_tied(model)


@pytest.mark.parametrize(("policy", "kept"), [("source", "emb"), ("target", "head")])
@pytest.mark.parametrize("turned", [False, True], ids=["embedding-first", "head-first"])
def test_load_state_follows_a_policy_whatever_the_order_of_keys(policy: Any, kept: str, turned: bool) -> None:
    model, untied = lm(), TinyLM(seed=1)
    state = untied.state_dict()
    load_state(model, dict(reversed(state.items())) if turned else state, on_conflict=policy)
    assert is_tied(model)
    assert torch.equal(model.emb.weight, state[f"{kept}.weight"])


def test_load_state_unties_on_request_and_computes_what_the_checkpoint_did() -> None:
    model, untied = lm(), TinyLM(seed=1)
    load_state(model, untied.state_dict(), on_conflict="untie")
    assert not is_tied(model)
    assert torch.equal(model(IDS), untied(IDS))


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    model, before = lm(), lm().state_dict()
    state = lm(seed=1).state_dict()
    state["norm.weight"] = torch.ones(5)
    with pytest.raises(CheckpointError, match="norm"):
        load_state(model, state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    torchs = lm()
    with pytest.raises(RuntimeError, match="size mismatch"):
        torchs.load_state_dict(state)
    assert torch.equal(torchs.emb.weight, state["emb.weight"]), "torch stops half-way"


# --- a full state dict ------------------------------------------------------------------------------------------------


def test_torch_writes_both_keys_and_loads_them_as_an_alias() -> None:
    file = io.BytesIO()
    torch.save(lm().state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    assert [name for name in state if name in HEAD] == ["emb.weight", "head.weight"]
    model = TinyLM(seed=1)
    model.load_state_dict(state, assign=True)
    assert not find_ties(model).ties
    assert len(find_ties(model).aliases) == 1


def test_safetensors_refuses_a_shared_matrix_and_a_clone_costs_it_twice(tmp_path: Path) -> None:
    state = tied(TinyLM(1000, 64)).state_dict()
    with pytest.raises(RuntimeError, match="share memory"):
        save_file(state, tmp_path / "shared.safetensors")
    save_file({name: value.clone() for name, value in state.items()}, tmp_path / "cloned.safetensors")
    assert (tmp_path / "cloned.safetensors").stat().st_size > 2 * 1000 * 64 * 4


@pytest.mark.parametrize(
    ("keep", "stored"),
    [("source", ["emb.weight"]), ("target", ["head.weight"]), ("both", ["emb.weight", "head.weight"])],
)
def test_save_checkpoint_drops_by_declaration_and_loads_tied(keep: Any, stored: list[str], tmp_path: Path) -> None:
    model = tied(TinyLM(1000, 64))
    save_checkpoint(model, tmp_path, keep=keep)
    held = load_file(tmp_path / "model.safetensors")
    assert [name for name in sorted(held) if name in HEAD] == stored
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size // (1000 * 64 * 4) == len(stored)
    again = tied(TinyLM(1000, 64, seed=1))
    assert load_checkpoint(again, tmp_path)
    assert is_tied(again)
    assert torch.equal(again(IDS), model(IDS))


def test_an_untied_model_is_saved_with_both_ends_under_every_policy(tmp_path: Path) -> None:
    for keep in ("source", "target", "both"):
        save_checkpoint(TinyLM(), tmp_path, keep=keep)
        assert set(HEAD) <= set(load_file(tmp_path / "model.safetensors"))


# Without the argument torch 2.6 sees for itself that there is no group. Both warn of that, and 2.6 of its storages.
ALONE: dict[str, Any] = {"no_dist": True} if "no_dist" in inspect.signature(save).parameters else {}


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable or uninitialized):UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_a_distributed_checkpoint_of_one_process_holds_both_and_one_is_enough(tmp_path: Path) -> None:
    model = tied(TinyLM(1000, 64, seed=1))
    save(dict(model.state_dict()), checkpoint_id=tmp_path / "both", **ALONE)
    assert set(HEAD) <= set(FileSystemReader(tmp_path / "both").read_metadata().state_dict_metadata)
    assert sum(file.stat().st_size for file in (tmp_path / "both").iterdir()) > 2 * 1000 * 64 * 4

    borrowed = {tie.target for tie in find_ties(model)}
    owned = {name: value for name, value in model.state_dict().items() if name not in borrowed}
    save(owned, checkpoint_id=tmp_path / "one", **ALONE)
    assert sum(file.stat().st_size for file in (tmp_path / "one").iterdir()) < 1.1 * 1000 * 64 * 4
    read = {name: torch.empty_like(value) for name, value in owned.items()}
    load(read, checkpoint_id=tmp_path / "one", **ALONE)
    again = tied(TinyLM(1000, 64))
    assert load_state(again, read)
    assert is_tied(again)
    assert torch.equal(again(IDS), model(IDS))


def test_a_model_on_meta_is_loaded_tied(tmp_path: Path) -> None:
    model = lm()
    save_checkpoint(model, tmp_path)
    with torch.device("meta"):
        plain, ours = lm(), lm()
    plain.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True, strict=False)
    assert plain.head.weight.is_meta, "torch leaves the head without values"
    load_checkpoint(ours, tmp_path)
    assert is_tied(ours)
    assert not any(p.is_meta for p in nn.ParameterList(ours.parameters()))
    assert torch.equal(ours(IDS), model(IDS))
