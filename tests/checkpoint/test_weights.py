"""The choice of the files that hold the model, their merging into one mapping, and the lints about other files."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from bowline.checkpoint import LintKind, open_checkpoint
from bowline.checkpoint.places.byte_source import ByteSource, LocalFile
from bowline.checkpoint.places.file_set import FileSet
from bowline.checkpoint.places.local_directory import LocalDirectory
from bowline.checkpoint.weights import Weights, read_weights
from bowline.errors import CheckpointError, FormatError, NoCheckpointError, UnsafePickleError
from tests.checkpoint.pickled import dictionary, name, saved, tensor
from tests.checkpoints import GPT2, OWN, WTE, Tensors, shards, table, write

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
NORM = "transformer.ln_f.weight"
PARTS = {FIRST: {WTE: table()}, SECOND: {NORM: np.ones(8, np.float32)}}
PICKLE = saved(dictionary({"from_pickle": tensor()}))


def read(path: Path, only: str | None = None) -> Weights:
    return read_weights(LocalDirectory(path), only)


def kinds(weights: Weights) -> list[LintKind]:
    return [lint.kind for lint in weights.lints]


# --- which files hold the model -------------------------------------------------------------------------------------


def test_the_single_safetensors_file_comes_before_everything_else(tmp_path: Path) -> None:
    shards(tmp_path, PARTS)
    write(tmp_path, {"single": OWN})
    (tmp_path / "pytorch_model.bin").write_bytes(PICKLE)
    assert read(tmp_path).files == ("model.safetensors",)


def test_the_safetensors_index_comes_before_pickles(tmp_path: Path) -> None:
    shards(tmp_path, PARTS)
    (tmp_path / "pytorch_model.bin").write_bytes(PICKLE)
    assert read(tmp_path).files == (FIRST, SECOND)


def test_a_pickle_is_read_where_there_is_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(PICKLE)
    assert list(read(tmp_path).tensors) == ["from_pickle"]


def test_an_index_of_pickles_is_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model-00001-of-00001.bin").write_bytes(PICKLE)
    index = {"weight_map": {"from_pickle": "pytorch_model-00001-of-00001.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    found = read(tmp_path)
    assert (list(found.tensors), found.lints) == (["from_pickle"], ())


def test_a_lone_file_under_another_name_is_the_model(tmp_path: Path) -> None:
    write(tmp_path, {"adapter": OWN}, name="adapter_model.safetensors")
    assert read(tmp_path).files == ("adapter_model.safetensors",)


def test_two_files_under_other_names_are_not_guessed_between(tmp_path: Path) -> None:
    write(tmp_path, {"a": OWN}, name="a.safetensors")
    write(tmp_path, {"b": OWN}, name="b.safetensors")
    with pytest.raises(
        NoCheckpointError, match=r"several files could be the model \('a.safetensors', 'b.safetensors'\)"
    ):
        read(tmp_path)


@pytest.mark.parametrize("file", ["training_args.bin", "model.onnx_data", "config.json", "model.safetensors.tmp"])
def test_other_files_are_no_model(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_bytes(b"{}")
    with pytest.raises(NoCheckpointError, match=f"no model here.*found '{file}'"):
        read(tmp_path)


def test_many_other_files_are_counted_and_not_listed(tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / f"{number}.txt").touch()
    with pytest.raises(NoCheckpointError, match=r"'0.txt', '1.txt', '2.txt' and 6 more"):
        read(tmp_path)


def test_a_file_asked_for_by_name_is_read_alone(tmp_path: Path) -> None:
    write(shards(tmp_path, PARTS), {"single": OWN})
    found = read(tmp_path, SECOND)
    assert (list(found.tensors), found.files, found.lints) == ([NORM], (SECOND,), ())


def test_an_index_asked_for_by_name_is_followed(tmp_path: Path) -> None:
    write(shards(tmp_path, PARTS), {"single": OWN})
    assert read(tmp_path, INDEX).files == (FIRST, SECOND)


# --- one mapping ----------------------------------------------------------------------------------------------------


def test_tensors_of_all_shards_are_one_mapping_and_each_knows_its_file(tmp_path: Path) -> None:
    found = read(shards(tmp_path, PARTS))
    assert {name: stored.file for name, stored in found.tensors.items()} == {WTE: FIRST, NORM: SECOND}


@pytest.mark.parametrize("home", [FIRST, SECOND])
def test_of_two_tensors_of_one_name_the_one_that_the_index_names_counts(tmp_path: Path, home: str) -> None:
    parts: dict[str, Tensors] = {FIRST: {WTE: table(), "a": np.ones(1)}, SECOND: {WTE: OWN, NORM: np.ones(1)}}
    found = read(shards(tmp_path, parts, {"a": FIRST, WTE: home, NORM: SECOND}))
    assert found.tensors[WTE].file == home
    assert kinds(found) == [LintKind.NAME_IN_TWO_SHARDS]


def test_what_the_index_does_not_name_is_there_all_the_same(tmp_path: Path) -> None:
    found = read(shards(tmp_path, PARTS, {WTE: FIRST, "lost": SECOND}))
    assert set(found.tensors) == {WTE, NORM}
    assert [lint.tensors for lint in found.lints] == [("lost",), (NORM,)]


def test_a_tied_pickle_counts_its_storage_once_or_twice_in_the_total(tmp_path: Path) -> None:
    shard = "pytorch_model-00001-of-00001.bin"
    (tmp_path / shard).write_bytes(saved(dictionary({"a": tensor(), "b": tensor()})))
    for total, expected in ((24, []), (48, []), (72, [LintKind.WRONG_TOTAL_SIZE])):
        index = {"metadata": {"total_size": total}, "weight_map": {"a": shard, "b": shard}}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        assert kinds(read(tmp_path)) == expected


def test_metadata_of_all_files_comes_together(tmp_path: Path) -> None:
    write(tmp_path, {"a": OWN}, name=FIRST, metadata={"format": "pt"})
    write(tmp_path, {"b": OWN}, name=SECOND, metadata={"made": "here"})
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": FIRST, "b": SECOND}}))
    assert read(tmp_path).metadata == {"format": "pt", "made": "here"}


def test_shards_without_an_index_are_read_together(tmp_path: Path) -> None:
    (shards(tmp_path, PARTS) / INDEX).unlink()
    found = read(tmp_path)
    assert (set(found.tensors), kinds(found)) == ({WTE, NORM}, [LintKind.INDEX_MISSING])


def test_a_single_shard_without_an_index_is_called_one_shard(tmp_path: Path) -> None:
    write(tmp_path, {"a": OWN}, name="model-00001-of-00001.safetensors")
    (lint,) = read(tmp_path).lints
    assert lint.message == "1 shard, but no index; transformers does not load it"


def test_only_headers_are_read(tmp_path: Path) -> None:
    path = shards(tmp_path, PARTS)
    asked: list[tuple[str, int, int]] = []

    class WatchedFile(LocalFile):
        def _fill(self, offset: int, buffer: memoryview) -> None:
            asked.append((self.name, offset, len(buffer)))
            super()._fill(offset, buffer)

    class Watched(LocalDirectory):
        def open(self, name: str) -> LocalFile:
            return WatchedFile(self.path / name, name)

    found = read_weights(Watched(path))
    assert all(offset + length <= found.tensors[WTE].offset for file, offset, length in asked if file == FIRST)


class Remote(FileSet):
    """Files that are worth reading at once, as those of the Hub are."""

    location = "org/name"
    parallel_reads = 4

    def __init__(self, path: Path) -> None:
        self.files = LocalDirectory(path)

    def sizes(self) -> Mapping[str, int]:
        return self.files.sizes()

    def open(self, name: str) -> ByteSource:
        return self.files.open(name)


def test_shards_that_are_read_at_once_give_what_one_after_another_gives(tmp_path: Path) -> None:
    many = {f"model-{at:05d}-of-00006.safetensors": {f"t{at}": table(seed=at)} for at in range(1, 6)}
    many["model-00006-of-00006.safetensors"] = {"t1": OWN}
    weight_map = {f"t{at}": f"model-{at:05d}-of-00006.safetensors" for at in range(1, 6)} | {
        "t6": "model-00006-of-00006.safetensors"
    }
    path = shards(tmp_path, many, weight_map)
    (path / "model-00003-of-00006.safetensors").write_bytes(b"")
    one_by_one, at_once = read(path), read_weights(Remote(path))
    assert one_by_one == at_once
    assert LintKind.SHARD_MALFORMED in kinds(at_once)


# --- what cannot be read at all -------------------------------------------------------------------------------------


def test_an_empty_file_is_a_format_error(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(FormatError, match=r"model.safetensors: 0 bytes"):
        read(tmp_path)


def test_shards_of_which_none_can_be_read_are_an_error_with_the_first_reason(tmp_path: Path) -> None:
    for shard in PARTS:
        (shards(tmp_path, PARTS) / shard).write_bytes(b"")
    (tmp_path / FIRST).write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"none of the 2 shards that {INDEX} names can be read: {FIRST}: 0 bytes"):
        read(tmp_path)


def test_shards_without_an_index_of_which_none_can_be_read_are_an_error(tmp_path: Path) -> None:
    (tmp_path / FIRST).touch()
    (tmp_path / SECOND).touch()
    with pytest.raises(CheckpointError, match=f"{SECOND}: 0 bytes"):
        read(tmp_path)


def test_a_checkpoint_whose_every_shard_lies_outside_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"leaves the directory with '\.\.'"):
        read(shards(tmp_path, {}, {WTE: "../model.safetensors"}))


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", "null", '"x"', '{"weight_map": null}', '{"weight_map": ["a"]}', '{"weight_map": {"a": null}}',
     '{"weight_map": {"a": ["b"]}}', '{"weight_map": {"a": "b", "a": "c"}}', "\ufeff{}", "[" * 500,
     '{"weight_map": {"a": NaN}}'],
)  # fmt: skip
def test_an_index_that_is_none_is_a_format_error_that_names_it(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(FormatError, match=f"^{INDEX}: ") as caught:
        read(tmp_path)
    assert caught.value.help


def test_a_pickle_that_asks_for_more_is_refused_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(saved(name("os", "system")))
    with pytest.raises(UnsafePickleError, match="os"):
        read(tmp_path)


def test_a_numpy_archive_called_bin_is_a_format_error(tmp_path: Path) -> None:
    file = io.BytesIO()
    np.savez(file, OWN)
    (tmp_path / "pytorch_model.bin").write_bytes(file.getvalue())
    with pytest.raises(FormatError):
        read(tmp_path)


def test_every_lint_kind_is_one_rule() -> None:
    """A lint that no rule reads would be seen and never said."""
    import bowline.auditing.rules.file_structure as file_structure
    import bowline.auditing.rules.metadata as knowledge

    text = "".join(Path(str(room.__file__)).read_text() for room in (file_structure, knowledge))
    assert [kind for kind in LintKind if text.count(f"LintKind.{kind.name}") != 1] == []


def test_lints_come_with_what_was_wrong_with_the_config(tmp_path: Path) -> None:
    with open_checkpoint(write(tmp_path, {WTE: table()}, "[")) as checkpoint:
        assert [lint.kind for lint in checkpoint.lints] == [LintKind.CONFIG_MALFORMED]
        assert checkpoint.config is None
    with open_checkpoint(write(tmp_path, {WTE: table()}, GPT2)) as checkpoint:
        assert checkpoint.lints == ()


def test_an_adapter_is_not_taken_for_a_model(tmp_path: Path) -> None:
    write(tmp_path, {"base_model.model.lm_head.lora_A.weight": table()}, name="adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(NoCheckpointError, match="PEFT adapter"):
        open_checkpoint(tmp_path)


def test_a_damaged_gguf_file_is_said_to_be_so(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(FormatError, match=r"model\.gguf: the version at byte 4 needs 4 bytes, but only 0 follow"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"{}")
    with pytest.raises(FormatError, match=r"model\.gguf: begins with b'{}', expected b'GGUF'"):
        open_checkpoint(tmp_path)
