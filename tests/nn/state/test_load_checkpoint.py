"""`load_checkpoint`: what it costs, whose memory the parameters have, and every kind of file that can be loaded."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from bowline.errors import (
    CheckpointError,
    FormatError,
    NoCheckpointError,
    TieError,
    UnsafePickleError,
    UsageError,
)
from bowline.nn import find_ties, load_checkpoint, save_checkpoint
from tests.checkpoint.loopback_hub import LoopbackHub, commit_of
from tests.nn.models import TinyLM, backward, tied
from tests.nn.state.snapshots import snapshot

IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])
MIB = 1 << 20


class Untied(TinyLM):
    """The same model, of which nobody says that it is tied."""

    ties: ClassVar[object] = ()


def lm(seed: int = 0) -> TinyLM:
    return tied(TinyLM(seed=seed))


def on_meta() -> TinyLM:
    with torch.device("meta"):
        return lm()


def same(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def train(model: TinyLM) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model(IDS).square().sum())
    optimizer.step()


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A tied model's checkpoint."""
    save_checkpoint(lm(seed=1), tmp_path / "model")
    return tmp_path / "model"


# --- mapped memory ----------------------------------------------------------------------------------------------------

COST = """
import json, re, sys
from pathlib import Path
import torch
from bowline.nn import load_checkpoint
from tests.nn.models import TinyLM, tied

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

with torch.device("meta"):
    model = tied(TinyLM(1 << 18, 64))
load_checkpoint(tied(TinyLM()), sys.argv[2])  # what is imported on the way
before = anonymous()
load_checkpoint(model, sys.argv[1], mmap=sys.argv[3] == "mapped")
after = anonymous()
where = model.emb.weight.data_ptr()
lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
home = [line[5] if len(line) > 5 else "" for line in lines
        if int(line[0].split("-")[0], 16) <= where < int(line[0].split("-")[1], 16)]
print(json.dumps({"took": after - before, "home": home[0], "tied": model.head.weight is model.emb.weight}))
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks Linux where memory lies")
@pytest.mark.parametrize("how", ["mapped", "read"])
def test_a_mapped_parameter_lies_in_the_file_and_costs_no_memory(stored: Path, tmp_path: Path, how: str) -> None:
    save_checkpoint(tied(TinyLM(1 << 18, 64)), tmp_path / "large")
    command = [sys.executable, "-c", COST, str(tmp_path / "large"), str(stored), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["tied"]
    if how == "mapped":
        assert seen["home"].endswith("model.safetensors")
        assert seen["took"] < 8 * MIB, "of the 64 MiB that the table has"
    else:
        assert not seen["home"].endswith(".safetensors")
        assert 56 * MIB < seen["took"] < 90 * MIB, "the table once"


@pytest.mark.parametrize("mmap", [True, False])
def test_training_does_not_write_to_the_file(stored: Path, mmap: bool) -> None:
    before = (stored / "model.safetensors").read_bytes()
    model, again = on_meta(), on_meta()
    load_checkpoint(model, stored, mmap=mmap)
    load_checkpoint(again, stored, mmap=mmap)
    plain = lm(seed=1)
    train(model)
    train(plain)
    assert same(model, plain)
    assert same(again, lm(seed=1)), "another model on the same file has pages of its own"
    assert (stored / "model.safetensors").read_bytes() == before


def test_a_file_may_be_replaced_under_a_model_that_is_mapped_from_it(stored: Path) -> None:
    model = on_meta()
    load_checkpoint(model, stored)
    save_checkpoint(lm(seed=2), stored)
    assert same(model, lm(seed=1))
    save_checkpoint(model, stored)
    train(model)
    loaded = on_meta()
    load_checkpoint(loaded, stored)
    assert same(loaded, lm(seed=1))


def test_without_a_mapping_the_file_may_go_and_be_overwritten(stored: Path) -> None:
    model = on_meta()
    load_checkpoint(model, stored, mmap=False)
    (stored / "model.safetensors").write_bytes(bytes((stored / "model.safetensors").stat().st_size))
    assert same(model, lm(seed=1))


def test_a_parameter_keeps_its_object_and_what_depends_on_it(stored: Path) -> None:
    model = lm()
    weight, optimizer = model.emb.weight, torch.optim.SGD(model.parameters(), lr=0.1)
    load_checkpoint(model, stored)
    assert model.emb.weight is weight is model.head.weight
    before = model(IDS).detach()
    backward(model(IDS).square().sum())
    optimizer.step()
    assert not torch.equal(model(IDS), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_keeps_its_dtype(stored: Path, dtype: torch.dtype) -> None:
    model = lm().to(dtype)
    load_checkpoint(model, stored)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert torch.equal(model.head.weight, lm(seed=1).head.weight.to(dtype))
    assert model.head.weight is model.emb.weight


@pytest.mark.parametrize("made", [lm, on_meta])
def test_what_was_loaded_in_inference_mode_can_be_trained(stored: Path, made: Callable[[], TinyLM]) -> None:
    model = made()
    with torch.inference_mode():
        load_checkpoint(model, stored)
    train(model)
    plain = lm(seed=1)
    train(plain)
    assert same(model, plain)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mmap", [True, False])
def test_shards_and_an_index_named_by_itself(tmp_path: Path, mmap: bool) -> None:
    files = save_checkpoint(lm(seed=1), tmp_path, max_shard_size=100)
    assert len(files) > 2
    for place in (tmp_path, tmp_path / files[-1]):
        model = on_meta()
        load_checkpoint(model, place, mmap=mmap)
        assert same(model, lm(seed=1))


def test_a_shard_alone_or_missing_is_no_checkpoint(tmp_path: Path) -> None:
    files = save_checkpoint(lm(seed=1), tmp_path, max_shard_size=100)
    model = lm()
    untouched = snapshot(model)
    with pytest.raises(CheckpointError, match="one shard of several"):
        load_checkpoint(model, tmp_path / files[0])
    (tmp_path / files[1]).unlink()
    with pytest.raises(CheckpointError, match=f"the checkpoint is incomplete: .*{files[1]}.*which is missing"):
        load_checkpoint(model, tmp_path)
    assert snapshot(model) == untouched


@pytest.mark.parametrize("mmap", [True, False])
def test_a_pickle_of_a_tied_model_loads_tied(tmp_path: Path, mmap: bool) -> None:
    torch.save(lm(seed=1).state_dict(), tmp_path / "pytorch_model.bin")
    model = on_meta()
    assert load_checkpoint(model, tmp_path, mmap=mmap)
    assert model.head.weight is model.emb.weight
    assert same(model, lm(seed=1))


@pytest.mark.parametrize("mmap", [True, False])
def test_one_storage_under_two_names_gives_an_untied_model_two_matrices(tmp_path: Path, mmap: bool) -> None:
    torch.save(lm(seed=1).state_dict(), tmp_path / "pytorch_model.bin")
    model = Untied()
    load_checkpoint(model, tmp_path, mmap=mmap)
    assert same(model, lm(seed=1))
    assert not find_ties(model).ties
    assert not find_ties(model).aliases, "an alias trains as a tie that nobody asked for"


@pytest.mark.parametrize("mmap", [True, False])
def test_views_in_a_pickle_hold_what_torch_says_they_hold_and_can_be_trained(tmp_path: Path, mmap: bool) -> None:
    storage = torch.arange(200.0)
    state = {
        "emb.weight": storage[3:47].view(4, 11).T,
        "norm.weight": torch.full((1,), 3.0).expand(4),
        "norm.bias": storage[60::2][:4],
    }
    torch.save(state, tmp_path / "pytorch_model.bin")
    model, plain = lm(), lm()
    load_checkpoint(model, tmp_path, mmap=mmap)
    plain.load_state_dict(torch.load(tmp_path / "pytorch_model.bin") | {"head.weight": state["emb.weight"]})
    assert same(model, plain)
    train(model)
    train(plain)
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))


def test_tensors_that_begin_at_odd_bytes_are_read_as_they_are(tmp_path: Path) -> None:
    tensors = {name: value for name, value in lm(seed=1).state_dict().items() if name != "head.weight"}
    header: dict[str, Any] = {"_": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    data = b"\7"
    for name, value in tensors.items():
        content = value.numpy().tobytes()
        end = len(data) + len(content)
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [len(data), end]}
        data += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    model = on_meta()
    load_checkpoint(model, tmp_path, strict=False)
    assert same(model, lm(seed=1))
    assert model.emb.weight.data_ptr() % 4 == 0


def test_hostile_and_broken_files_change_nothing(stored: Path) -> None:
    model = lm()
    untouched = snapshot(model)
    file = stored / "model.safetensors"
    whole = file.read_bytes()
    for broken in (b"", whole[:20], whole[:-1], b"\xff" * 8 + whole[8:], np.random.default_rng(0).bytes(400)):
        file.write_bytes(broken)
        with pytest.raises(FormatError):
            load_checkpoint(model, stored)
    file.unlink()
    with pytest.raises(NoCheckpointError):
        load_checkpoint(model, stored)
    torch.save(model, stored / "pytorch_model.bin")  # a whole module: its classes would have to be run
    with pytest.raises(UnsafePickleError):
        load_checkpoint(model, stored)
    assert snapshot(model) == untouched


def test_a_dtype_that_torch_does_not_have_is_named(tmp_path: Path) -> None:
    header = json.dumps({"norm.bias": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    header += b" " * (-len(header) % 8)
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    with pytest.raises(FormatError, match=r"norm\.bias: stored as F4"):
        load_checkpoint(lm(), tmp_path)


def test_a_checkpoint_comes_from_a_hub_as_from_a_directory(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {path.name: path.read_bytes() for path in stored.iterdir()}
    commit = commit_of("one")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with LoopbackHub(branches={"main": commit}, commits={commit: files}) as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
        model = on_meta()
        load_checkpoint(model, "org/name@main")
    assert same(model, lm(seed=1))


# --- what fits --------------------------------------------------------------------------------------------------------


def test_two_different_ends_are_refused_or_kept_as_asked(tmp_path: Path) -> None:
    save_checkpoint(Untied(seed=1), tmp_path)
    model = on_meta()
    with pytest.raises(TieError, match=r"two different ones, head\.weight and emb\.weight: 11 of 11 rows differ"):
        load_checkpoint(model, tmp_path)
    assert all(parameter.is_meta for parameter in model.parameters())
    load_checkpoint(model, tmp_path, on_conflict="untie")
    assert same(model, Untied(seed=1))
    for policy, kept in (("source", "emb.weight"), ("target", "head.weight")):
        model = on_meta()
        choice: Any = policy
        load_checkpoint(model, tmp_path, on_conflict=choice)
        assert torch.equal(model.head.weight, Untied(seed=1).get_parameter(kept))
        assert model.head.weight is model.emb.weight


def test_a_table_of_another_size_is_refused_before_anything_changes(tmp_path: Path) -> None:
    save_checkpoint(tied(TinyLM(rows=12)), tmp_path)
    model = lm()
    untouched = snapshot(model)
    with pytest.raises(CheckpointError, match=r"emb\.weight is \(12, 4\), the model's is \(11, 4\).*resize_vocab"):
        load_checkpoint(model, tmp_path)
    assert snapshot(model) == untouched


def test_what_no_file_holds_is_named_when_it_stays_on_meta(tmp_path: Path) -> None:
    class Positioned(TinyLM):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("positions", torch.arange(9), persistent=False)

    save_checkpoint(tied(Positioned()), tmp_path)
    assert "positions" not in load_file(tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = tied(Positioned())
    with pytest.raises(CheckpointError, match="positions: still on meta after loading"):
        load_checkpoint(model, tmp_path)


def test_a_file_that_safetensors_wrote_for_a_tied_model_loads_tied(tmp_path: Path) -> None:
    from safetensors.torch import save_model

    save_model(lm(seed=1), str(tmp_path / "model.safetensors"))
    assert len(load_file(tmp_path / "model.safetensors")) == 3
    model = on_meta()
    load_checkpoint(model, tmp_path)
    assert same(model, lm(seed=1))
    save_file({name: value.clone() for name, value in lm(seed=2).state_dict().items()}, tmp_path / "model.safetensors")
    load_checkpoint(model, tmp_path)
    assert same(model, lm(seed=2))


# --- names that wrappers changed --------------------------------------------------------------------------------------


def wrapped(tmp_path: Path, change: Callable[[str], str]) -> Path:
    """The tensors of `lm(seed=1)`, each under the name that `change` gives it."""
    state = {change(name): tensor for name, tensor in lm(seed=1).state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("part", ["_orig_mod.", "module.", "_fsdp_wrapped_module.", "net."])
def test_the_error_says_which_part_of_the_names_to_strip_and_strip_removes_it(tmp_path: Path, part: str) -> None:
    path, model = wrapped(tmp_path, lambda name: part + name), lm()
    before = snapshot(model)
    with pytest.raises(CheckpointError, match=re.escape(f"stored names have the part {part!r}")) as caught:
        load_checkpoint(model, path)
    assert caught.value.help == f"load_checkpoint(model, path, strip={part!r}) removes it"
    assert snapshot(model) == before
    assert load_checkpoint(model, path, strip=part)
    assert same(model, lm(seed=1))
    assert load_checkpoint(lm(), path, strip=part.rstrip("."))


def test_parts_in_the_middle_and_at_the_front_are_stripped_in_one_go(tmp_path: Path) -> None:
    path = wrapped(tmp_path, lambda name: "_fsdp_wrapped_module." + name.replace(".weight", "._orig_mod.weight"))
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(lm(), path)
    assert "strip=['_fsdp_wrapped_module.', '_orig_mod.']) removes them" in (caught.value.help or "")
    model = lm()
    assert load_checkpoint(model, path, strip=["_fsdp_wrapped_module.", "_orig_mod."])
    assert same(model, lm(seed=1))


def test_an_adapters_names_are_not_to_be_stripped(tmp_path: Path) -> None:
    path = wrapped(tmp_path, lambda name: "base_model.model." + name)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(lm(), path)
    assert "merge the adapter" in (caught.value.help or "")


def test_strip_that_strips_nothing_or_makes_two_names_one_is_an_error(tmp_path: Path, stored: Path) -> None:
    with pytest.raises(UsageError, match=r"strip='module.': no tensor name"):
        load_checkpoint(lm(), stored, strip="module.")
    state = lm().state_dict()
    save_file(
        {"emb.weight": state["emb.weight"], "module.emb.weight": state["emb.weight"].clone()},
        tmp_path / "a.safetensors",
    )
    with pytest.raises(CheckpointError, match=r"are both called emb\.weight"):
        load_checkpoint(lm(), tmp_path / "a.safetensors", strip="module.")
