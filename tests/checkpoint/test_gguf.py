"""GGUF files as checkpoints: one file, several in a directory, one model in parts, and their rows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bowline.checkpoint import checkpoints_at, find_checkpoints, open_checkpoint
from bowline.checkpoint.formats.gguf.split_files import gguf_models
from bowline.errors import CheckpointError, FormatError, NoCheckpointError, UsageError
from tests.checkpoint.gguf_files import EMBEDDING, HEAD, LLAMA, Stored, gguf_file, q4_0, q8_0, vocabulary
from tests.checkpoints import GPT2, WTE, table, tied_gpt2, write

TABLE = table(64, 32)


def parts(path: Path, count: int = 3, **changed: Any) -> list[Path]:
    """A model in parts, a tensor in each; `changed` has keys that the second part states otherwise."""
    names = [path / f"m-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
    for number, name in enumerate(names):
        values = {"split.no": number, "split.count": count, "split.tensors.count": count}
        values |= {key.replace("_", ".", 1): value for key, value in changed.items()} if number == 1 else {}
        values |= vocabulary(64) if number == 0 else {}
        tensor = EMBEDDING if number == 0 else f"blk.{number}.norm"
        name.write_bytes(gguf_file({tensor: TABLE + number}, values))
    return names


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert caught.value.help
    return caught.value.message


# --- one file -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [".", "model.gguf"])
def test_a_gguf_file_is_a_checkpoint(tmp_path: Path, place: str) -> None:
    values = vocabulary(["<s>", "é"], bos_token_id=0)
    (tmp_path / "model.gguf").write_bytes(gguf_file({EMBEDDING: TABLE}, values))
    with open_checkpoint(tmp_path / place) as checkpoint:
        assert checkpoint.weight_files == ("model.gguf",)
        assert checkpoint.complete
        assert checkpoint.lints == ()
        assert checkpoint.gguf is not None
        assert checkpoint.gguf.architecture == "llama"
        assert checkpoint.config == {**LLAMA, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.bos_token_id": 0}
        assert np.array_equal(checkpoint.rows(EMBEDDING, 3, 7), TABLE[3:7])
        tokens = checkpoint.token_ids()
        assert tokens is not None
        assert dict(tokens) == {"<s>": 0, "é": 1}


def test_a_config_beside_a_gguf_file_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[")
    (tmp_path / "model.gguf").write_bytes(gguf_file({EMBEDDING: TABLE}))
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.config == LLAMA
        assert checkpoint.lints == ()
        assert checkpoint.token_ids() is None


def test_other_formats_have_no_gguf_header(tmp_path: Path) -> None:
    with open_checkpoint(tied_gpt2(tmp_path)) as checkpoint:
        assert checkpoint.gguf is None
        assert checkpoint.token_ids() is None


@pytest.mark.parametrize("quantise", [q8_0, q4_0])
def test_quantised_rows_are_the_same_one_by_one_in_blocks_and_together(tmp_path: Path, quantise: Any) -> None:
    (tmp_path / "model.gguf").write_bytes(gguf_file({EMBEDDING: quantise(TABLE)}))
    with open_checkpoint(tmp_path) as checkpoint:
        whole = checkpoint.rows(EMBEDDING)
        assert whole.shape == (64, 32)
        assert whole.dtype == np.float32
        assert np.abs(whole - TABLE).mean() < 0.2
        assert np.array_equal(whole, np.concatenate([checkpoint.rows(EMBEDDING, row, row + 1) for row in range(64)]))
        found = list(checkpoint.blocks(EMBEDDING, 100))
        assert len(found) > 10
        assert np.array_equal(whole, np.concatenate([rows for _, rows in found]))
        assert checkpoint.rows(EMBEDDING, 5, 5).shape == (0, 32)
        with pytest.raises(UsageError, match="rows 0 to 65 were requested"):
            checkpoint.rows(EMBEDDING, 0, 65)


def test_a_quantised_vector_is_dequantised_as_a_whole(tmp_path: Path) -> None:
    stored = q8_0(TABLE)
    vector = Stored("Q8_0", (64 * 32,), stored.raw)
    (tmp_path / "model.gguf").write_bytes(gguf_file({"a": stored, "b": vector}))
    with open_checkpoint(tmp_path) as checkpoint:
        whole = checkpoint.rows("a").reshape(-1)
        assert np.array_equal(checkpoint.rows("b", 33, 70), whole[33:70])
        ((start, rows),) = checkpoint.blocks("b", 64)
        assert start == 0
        assert np.array_equal(rows, whole)
        with pytest.raises(FormatError, match="a vector of Q8_0"):
            checkpoint.read_rows_into("b", 0, memoryview(bytearray(4)))


def test_a_type_that_is_not_dequantised_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(gguf_file({EMBEDDING: Stored("IQ2_XXS", (2, 256), bytes(132))}))
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(FormatError, match="IQ2_XXS is not dequantised"):
        checkpoint.rows(EMBEDDING)


def test_a_file_that_is_cut_after_it_was_opened_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf_file({EMBEDDING: TABLE}))
    with open_checkpoint(file) as checkpoint:
        file.write_bytes(file.read_bytes()[:-4000])
        with pytest.raises(FormatError):
            checkpoint.rows(EMBEDDING)


# --- several files --------------------------------------------------------------------------------------------------


def test_several_gguf_files_are_several_checkpoints(tmp_path: Path) -> None:
    for name in ("b-Q8_0.gguf", "a-Q4_0.gguf"):
        (tmp_path / name).write_bytes(gguf_file({EMBEDDING: TABLE}))
    with pytest.raises(NoCheckpointError) as caught:
        open_checkpoint(tmp_path)
    files = (tmp_path / "a-Q4_0.gguf", tmp_path / "b-Q8_0.gguf")
    assert caught.value.message == (f"{tmp_path}: 2 GGUF files, each a model of its own ('a-Q4_0.gguf', 'b-Q8_0.gguf')")
    assert str(files[0]) in (caught.value.help or "")
    assert checkpoints_at(tmp_path) == files
    assert find_checkpoints(tmp_path) == files


def test_a_directory_with_one_gguf_file_stands_for_itself(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(gguf_file({EMBEDDING: TABLE}))
    assert checkpoints_at(tmp_path) == (tmp_path,)
    assert find_checkpoints(tmp_path) == (tmp_path,)
    assert checkpoints_at(tmp_path / "model.gguf") == (tmp_path / "model.gguf",)
    assert checkpoints_at("org/name") == (Path("org/name"),)


def test_gguf_files_beside_other_weights_are_found_below_and_not_taken_for_the_model(tmp_path: Path) -> None:
    write(tmp_path, {WTE: table()}, GPT2)
    (tmp_path / "model.gguf").write_bytes(gguf_file({EMBEDDING: TABLE}))
    assert checkpoints_at(tmp_path) == (tmp_path,)
    assert find_checkpoints(tmp_path) == (tmp_path, tmp_path / "model.gguf")


def test_parts_count_as_one_model() -> None:
    names = ["q-00002-of-00002.gguf", "p-00001-of-00003.gguf", "p-00002-of-00003.gguf", "p-00001-of-00002.gguf"]
    assert gguf_models(names) == ["p-00001-of-00002.gguf", "p-00001-of-00003.gguf", "q-00002-of-00002.gguf"]


# --- one model in parts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [None, 0, 2])
def test_a_model_in_parts_is_read_whole_whichever_part_is_named(tmp_path: Path, named: int | None) -> None:
    files = parts(tmp_path)
    with open_checkpoint(tmp_path if named is None else files[named]) as checkpoint:
        assert checkpoint.weight_files == tuple(file.name for file in files)
        assert list(checkpoint.tensors) == [EMBEDDING, "blk.1.norm", "blk.2.norm"]
        assert np.array_equal(checkpoint.rows("blk.2.norm"), TABLE + 2)
        tokens = checkpoint.token_ids()
        assert tokens is not None
        assert len(tokens) == 64
        assert checkpoint.complete


@pytest.mark.parametrize("named", [None, 0, 2])
def test_a_missing_part_is_named(tmp_path: Path, named: int | None) -> None:
    files = parts(tmp_path)
    files[1].unlink()
    message = refused(tmp_path if named is None else files[named])
    assert "one part of 3, and 1 of them is missing: 'm-00002-of-00003.gguf'" in message


def test_without_the_first_part_the_others_are_named(tmp_path: Path) -> None:
    files = parts(tmp_path)
    files[0].unlink()
    assert "m-00002-of-00003.gguf: one part of 3, and 1 of them is missing" in refused(tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"split_no": 2}, "m-00002-of-00003.gguf: split.no is 2, expected 1"),
        ({"split_count": 4}, "m-00002-of-00003.gguf: split.count is 4, expected 3"),
        ({"split_count": "3"}, "m-00002-of-00003.gguf: split.count is '3', expected 3"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    files = parts(tmp_path, **changed)
    assert message in refused(files[0])


def test_parts_with_the_same_tensor_or_another_number_of_tensors_are_refused(tmp_path: Path) -> None:
    files = parts(tmp_path, 2)
    second = {"split.no": 1, "split.count": 2}
    files[1].write_bytes(gguf_file({EMBEDDING: TABLE}, second))
    assert "tensor 'token_embd.weight' is also in m-00001-of-00002.gguf" in refused(tmp_path)
    files[1].write_bytes(gguf_file({HEAD: TABLE, "more": TABLE}, second))
    assert "split.tensors.count is 2, but the 2 parts hold 3" in refused(tmp_path)


def test_a_part_under_another_name_and_a_whole_model_named_like_a_part_are_refused(tmp_path: Path) -> None:
    files = parts(tmp_path)
    renamed = files[0].rename(tmp_path / "model.gguf")
    assert "model.gguf: by its name it is a whole model, but split.count is 3" in refused(renamed)
    whole = tmp_path / "n-00001-of-00002.gguf"
    whole.write_bytes(gguf_file({EMBEDDING: TABLE}))
    assert "by its name it is one part of 2, but it has no split.count" in refused(whole)
    single = tmp_path / "n-00001-of-00001.gguf"
    single.write_bytes(gguf_file({EMBEDDING: TABLE}))
    open_checkpoint(single).close()


def test_an_absurd_number_of_parts_is_refused_before_any_is_looked_for(tmp_path: Path) -> None:
    file = tmp_path / "m-00001-of-99999.gguf"
    file.write_bytes(gguf_file({}, {"split.no": 0, "split.count": 99999}))
    assert "one part of 99999, expected at most 1000" in refused(file)


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    files = parts(tmp_path)
    files[2].write_bytes(files[2].read_bytes()[:-40])
    assert re.search(r"m-00003-of-00003\.gguf: truncated: tensor 'blk\.2\.norm'", refused(tmp_path))
