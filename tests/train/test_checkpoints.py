"""What is in a checkpoint, and that nothing but a whole one is ever called so."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from bowline.checkpoint.durable import file_creation
from bowline.errors import CheckpointError, UsageError
from bowline.train import Trainer
from bowline.train.loop import run_checkpoints
from bowline.train.loop.run_checkpoints import Checkpoints, newest, steps_in
from tests.train.runs import Counting, run, same, settings, state, tiny


def names(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def test_a_checkpoint_is_two_safetensors_files_and_a_json(tmp_path: Path) -> None:
    model, _ = run(tmp_path)
    directory = tmp_path / "checkpoints" / "step-00000024"
    assert {path.name for path in directory.iterdir()} == {"model.safetensors", "optimizer.safetensors", "state.json"}
    assert json.loads((directory / "state.json").read_text())["step"] == 24
    with safe_open(directory / "model.safetensors", "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert set(stored) == {name for name, _ in model.named_parameters()}  # lm_head is the table, stored once
    assert all(torch.equal(stored[name], parameter) for name, parameter in model.named_parameters())
    with safe_open(directory / "optimizer.safetensors", "pt") as file:
        kept = set(file.keys())
    assert kept == {f"{name}.{key}" for name in stored for key in ("step", "exp_avg", "exp_avg_sq")}


def test_the_last_ones_stay(tmp_path: Path) -> None:
    run(tmp_path, save_every=5, keep=2)
    assert names(tmp_path) == ["step-00000020", "step-00000024"]


def test_older_ones_go_only_when_the_new_one_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename, seen = Path.rename, []

    def watched(self: Path, target: Path) -> Path:
        if target.name.endswith(".removed"):
            seen.append((self.name, max(steps_in(self.parent))))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", watched)
    run(tmp_path, save_every=10, keep=1)
    assert seen == [("step-00000010", 20), ("step-00000020", 24)]


def test_what_a_kill_leaves_is_no_checkpoint_and_is_removed_by_the_next_run(tmp_path: Path) -> None:
    run(tmp_path)
    for left in (".step-00000030.77-0123abcd.partial", ".step-00000015.removed"):
        (tmp_path / "checkpoints" / left).mkdir()
        (tmp_path / "checkpoints" / left / "model.safetensors").write_bytes(b"half")
    assert steps_in(tmp_path / "checkpoints") == [20, 24]
    run(tmp_path, resume=True)
    assert names(tmp_path) == ["step-00000020", "step-00000024"]


def test_two_runs_in_one_directory_are_one_too_many(tmp_path: Path) -> None:
    with (
        Checkpoints(tmp_path / "checkpoints", 2),
        pytest.raises(UsageError, match="another process is training in this directory"),
    ):
        run(tmp_path)


# --- a full disk ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_full_disk_ends_the_run_and_names_the_checkpoint_that_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    create = file_creation.create

    def full(path: Path, *mode: int) -> int:
        if path.name == file and ".step-00000015" in path.parent.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return create(path, *mode)

    monkeypatch.setattr(run_checkpoints, "create", full)
    with pytest.raises(CheckpointError) as caught:
        run(tmp_path)
    assert str(caught.value).startswith("step 15: ")
    assert "cannot be written: No space left on device" in str(caught.value)
    assert "the checkpoint of step 10 is complete (help: free space" in str(caught.value)
    assert names(tmp_path) == ["step-00000005", "step-00000010"]
    monkeypatch.undo()
    resumed, _ = run(tmp_path, resume=True)
    assert same(resumed, run()[0])


LIMITED = """
import resource, sys
from pathlib import Path
import torch
from bowline.errors import BowlineError
from tests.train.runs import run
torch.set_num_threads(1)
run(steps=2)
for name, limit in (("few", 900), ("many", 10_000)):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        run(Path(sys.argv[1]) / name, log_every=1)
    except BowlineError as error:
        print(error)
"""


def test_a_file_that_may_not_grow_ends_the_run_with_a_line(tmp_path: Path) -> None:
    """The log itself, or the first checkpoint."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for text, file in zip(done.stdout.splitlines(), ("log.jsonl", "step-00000005"), strict=True):
        assert f"{file}: cannot be written: File too large; there is no checkpoint (help: free space" in text
    for name in ("few", "many"):
        assert steps_in(tmp_path / name / "checkpoints") == []
        assert same(run(tmp_path / name, resume=True, log_every=1)[0], run()[0])


# --- what is not as it was --------------------------------------------------------------------------------------------


def test_another_models_checkpoint_is_refused_and_the_tensors_are_named(tmp_path: Path) -> None:
    run(tmp_path)
    other: Any = tiny(n_embd=16)
    with pytest.raises(CheckpointError, match=r"was saved from another model: transformer\.h\.0\.attn\.c_attn\.bias"):
        Trainer(other, Counting(), settings(), out=tmp_path, resume=True).train()


def test_a_damaged_checkpoint_is_named_with_the_way_to_the_one_before(tmp_path: Path) -> None:
    run(tmp_path)
    last = tmp_path / "checkpoints" / "step-00000024"
    for content in ("{", "[1]", '{"step": 24}'):
        (last / "state.json").write_text(content)
        with pytest.raises(
            CheckpointError,
            match=r"step-00000024: is damaged: .*state\.json.*help: remove it to resume from the checkpoint before",
        ):
            newest(tmp_path / "checkpoints")
    shutil.rmtree(last)
    assert newest(tmp_path / "checkpoints").step == 20  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("left", [None, 0, 100])
def test_half_a_file_or_none_of_the_newest_checkpoint_is_named_too(name: str, left: int | None, tmp_path: Path) -> None:
    run(tmp_path)
    damaged = tmp_path / "checkpoints" / "step-00000024" / name
    content = damaged.read_bytes()
    damaged.unlink()
    if left is not None:
        damaged.write_bytes(content[:left])
    model = tiny()
    before = state(model)
    with pytest.raises(
        CheckpointError, match=r"step-00000024: is damaged: .*\(help: remove it to resume from the checkpoint before"
    ):
        Trainer(model, Counting(), settings(), out=tmp_path, resume=True).train()
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


def test_a_run_that_is_ended_before_its_first_step_goes_on_from_there(tmp_path: Path) -> None:
    class Ended(Counting):
        def at(self, step: int, micro: int = 0) -> dict[str, torch.Tensor]:
            os.kill(os.getpid(), signal.SIGINT)
            return super().at(step, micro)

    with pytest.raises(KeyboardInterrupt, match="ended by Ctrl-C after step 0: the checkpoint of step 0 is complete"):
        Trainer(tiny(), Ended(), settings(), out=tmp_path).train()
    assert run(tmp_path, resume=True)[1].loss == run()[1].loss
