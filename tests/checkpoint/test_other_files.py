"""Files that hold no whole model, and directories of checkpoints: the error says what they are and what to give."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bowline.checkpoint import find_checkpoints, open_checkpoint
from bowline.checkpoint.formats.other_files import holds_adapter
from bowline.errors import NoCheckpointError
from tests.checkpoint.gguf_files import gguf_file
from tests.checkpoints import GPT2, OWN, WTE, table, tied_gpt2, write

LORA = {f"base_model.model.lm_head.lora_{end}.weight": OWN for end in "AB"}
ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "org/base", "r": 8}


def refused(place: Path) -> NoCheckpointError:
    with pytest.raises(NoCheckpointError) as caught:
        open_checkpoint(place)
    return caught.value


def in_file(path: Path, name: str) -> Path:
    return path / name


def in_directory(path: Path, name: str) -> Path:
    return path


@pytest.mark.parametrize("place", [in_file, in_directory])
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "lora.safetensors"])
def test_an_adapter_is_named_with_its_base(tmp_path: Path, place: Callable[[Path, str], Path], name: str) -> None:
    write(tmp_path, LORA, name=name, files={"adapter_config": ADAPTER})
    error = refused(place(tmp_path, name))
    assert error.message.endswith("a PEFT adapter (LORA) for 'org/base', expected a whole model")
    assert "--base" in (error.help or "")


@pytest.mark.parametrize("place", [in_file, in_directory])
def test_an_adapter_without_its_config_is_known_by_its_tensors(
    tmp_path: Path, place: Callable[[Path, str], Path]
) -> None:
    write(tmp_path, LORA, name="some.safetensors")
    error = refused(place(tmp_path, "some.safetensors"))
    assert "some.safetensors: a PEFT adapter whose base is not stated, expected a whole model" in error.message


def test_a_malformed_config_of_an_adapter_is_no_second_error(tmp_path: Path) -> None:
    write(tmp_path, LORA, name="adapter_model.safetensors", files={"adapter_config": "{"})
    assert "a PEFT adapter whose base is not stated" in refused(tmp_path).message


def test_a_whole_model_with_an_adapter_in_it_is_no_adapter() -> None:
    whole = ["base_model.model.lm_head.base_layer.weight", *LORA]
    assert holds_adapter(LORA)
    assert not holds_adapter(whole)
    assert not holds_adapter([WTE])
    assert not holds_adapter([])


def test_a_model_beside_such_files_is_still_the_model(tmp_path: Path) -> None:
    tied_gpt2(tmp_path)
    (tmp_path / "model.gguf").write_bytes(gguf_file({}))
    with open_checkpoint(tmp_path) as checkpoint:
        assert list(checkpoint.tensors) == [WTE]


# --- directories of checkpoints -------------------------------------------------------------------------------------


def trainer_output(path: Path) -> Path:
    """The output directory of a transformers Trainer: no model at the top, and two checkpoints."""
    for step in (1000, 500):
        tied_gpt2(path / f"checkpoint-{step}")
    (path / "runs").mkdir()
    (path / "training_args.bin").write_bytes(b"")
    tied_gpt2(path / ".cache" / "hidden")
    return path


def test_checkpoints_are_found_in_the_order_of_their_steps(tmp_path: Path) -> None:
    path = trainer_output(tmp_path)
    assert find_checkpoints(path) == (path / "checkpoint-500", path / "checkpoint-1000")
    write(path, {WTE: table()}, GPT2)
    assert find_checkpoints(path)[0] == path


def test_a_link_to_a_directory_is_not_entered(tmp_path: Path) -> None:
    tied_gpt2(tmp_path / "a")
    (tmp_path / "a" / "again").symlink_to(tmp_path)
    assert find_checkpoints(tmp_path) == (tmp_path / "a",)


def test_the_error_about_a_trainers_output_names_its_checkpoints_and_the_option(tmp_path: Path) -> None:
    error = refused(trainer_output(tmp_path))
    assert error.message == f"{tmp_path}: no model here, but 2 checkpoints below: checkpoint-500, checkpoint-1000"
    assert "--recursive" in (error.help or "")


def test_a_directory_without_checkpoints_below_keeps_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text(json.dumps(GPT2))
    assert "no model here; expected model.safetensors" in refused(tmp_path).message
