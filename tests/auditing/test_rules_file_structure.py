"""BW301 to BW316, files that contradict each other: each code with the smallest directory that shows it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bowline.auditing import Severity
from bowline.checkpoint.formats.numpy_writer import Bits
from tests.checkpoint.pickled import NONE, dictionary, saved, storage, tensor
from tests.checkpoints import GPT2, HEAD, OWN, WTE, codes, findings, one, shards, table, tied_gpt2, write

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
NORM = {"transformer.ln_f.weight": np.ones(8, np.float32)}
PARTS = {FIRST: {WTE: table()}, SECOND: NORM}


def raw(directory: Path, header: dict[str, object], data: bytes) -> Path:
    """A file whose header is written as it is given: compact, without padding."""
    text = json.dumps(header, separators=(",", ":")).encode()
    tied_gpt2(directory)
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return directory


def test_shards_that_the_index_describes_have_nothing_to_find(tmp_path: Path) -> None:
    assert codes(shards(tmp_path, PARTS, total_size=64 * 8 * 4 + 32)) == []


# --- BW301 two-models -----------------------------------------------------------------------------------------------


def test_bw301_a_single_file_beside_an_index(tmp_path: Path) -> None:
    found = one(write(shards(tmp_path, PARTS), {WTE: table()}, GPT2), "BW301")
    assert (found.severity, found.file, found.fixable) == (Severity.WARNING, "model.safetensors", False)


def test_bw301_is_not_said_of_an_index_that_names_the_single_file(tmp_path: Path) -> None:
    assert codes(shards(tmp_path, {"model.safetensors": {WTE: table()}})) == []


def test_bw301_is_not_said_of_an_index_for_another_format(tmp_path: Path) -> None:
    tied_gpt2(tmp_path)
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {}}')
    assert codes(tmp_path) == []


# --- BW302 index-disagrees ------------------------------------------------------------------------------------------


def test_bw302_the_index_names_what_its_shard_lacks(tmp_path: Path) -> None:
    weight_map = {WTE: FIRST, "transformer.ln_f.weight": SECOND, "lost.weight": SECOND}
    found = one(shards(tmp_path, PARTS, weight_map), "BW302")
    assert (found.severity, found.tensors, found.file) == (Severity.ERROR, ("lost.weight",), INDEX)


def test_bw302_a_shard_holds_what_the_index_does_not_name(tmp_path: Path) -> None:
    parts = {FIRST: {WTE: table()}, SECOND: {**NORM, "extra.weight": np.ones(1, np.float32)}}
    found = one(shards(tmp_path, parts, {WTE: FIRST, "transformer.ln_f.weight": SECOND}), "BW302")
    assert (found.tensors, found.file) == (("extra.weight",), INDEX)


def test_bw302_the_shards_swapped_in_the_index(tmp_path: Path) -> None:
    found = one(shards(tmp_path, PARTS, {WTE: SECOND, "transformer.ln_f.weight": FIRST}), "BW302")
    assert set(found.tensors) == {WTE, "transformer.ln_f.weight"}


def test_bw302_an_index_that_names_the_single_file_and_another_tensor(tmp_path: Path) -> None:
    weight_map = {WTE: "model.safetensors", "lost.weight": "model.safetensors"}
    assert codes(shards(tmp_path, {"model.safetensors": {WTE: table()}}, weight_map)) == ["BW302"]


def test_bw302_is_not_said_of_a_missing_shard(tmp_path: Path) -> None:
    assert "BW302" not in codes(shards(tmp_path, PARTS, {WTE: FIRST, "transformer.ln_f.weight": "gone.safetensors"}))


# --- BW303 name-in-two-shards ---------------------------------------------------------------------------------------


def test_bw303_one_name_in_two_shards(tmp_path: Path) -> None:
    parts = {FIRST: {WTE: table()}, SECOND: {WTE: OWN, **NORM}}
    found = one(shards(tmp_path, parts, {WTE: FIRST, "transformer.ln_f.weight": SECOND}), "BW303")
    assert (found.severity, found.tensors, found.file) == (Severity.ERROR, (WTE,), FIRST)
    assert FIRST in found.message and SECOND in found.message


def test_bw303_is_said_once_of_all_names_in_the_same_shards(tmp_path: Path) -> None:
    twice = {"a" * 40_000: OWN, **NORM}
    files = {**dict.fromkeys(twice, SECOND), WTE: FIRST}
    found = one(shards(tmp_path, {FIRST: {WTE: table(), **twice}, SECOND: twice}, files), "BW303")
    assert set(found.tensors) == set(twice)
    assert "and 1 more are stored in" in found.message and len(found.message) < 400


def test_bw303_is_not_said_of_two_names_with_the_same_bytes(tmp_path: Path) -> None:
    assert codes(shards(tmp_path, {FIRST: {WTE: table()}, SECOND: {HEAD: table()}})) == ["BW105"]


# --- BW304 orphan-shard ---------------------------------------------------------------------------------------------


def test_bw304_a_shard_left_from_an_earlier_save(tmp_path: Path) -> None:
    left = "model-00003-of-00003.safetensors"
    found = one(
        shards(tmp_path, {**PARTS, left: {"old.weight": table()}}, {WTE: FIRST, "transformer.ln_f.weight": SECOND}),
        "BW304",
    )
    assert (found.severity, found.file) == (Severity.WARNING, left)


def test_bw304_shards_beside_a_single_file(tmp_path: Path) -> None:
    tied_gpt2(tmp_path)
    write(tmp_path, NORM, name=FIRST)
    assert codes(tmp_path) == ["BW304"]


def test_bw304_shards_beside_an_empty_index(tmp_path: Path) -> None:
    assert "BW304" in codes(shards(tmp_path, PARTS, {}))


def test_bw304_is_not_said_of_shards_of_another_format(tmp_path: Path) -> None:
    tied_gpt2(tmp_path)
    (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(b"")
    assert codes(tmp_path) == []


def test_bw304_is_not_said_when_one_shard_is_audited_by_name(tmp_path: Path) -> None:
    assert codes(shards(tmp_path, PARTS) / FIRST) == []


# --- BW305 wrong-total-size -----------------------------------------------------------------------------------------


def test_bw305_a_total_that_is_not_the_sum(tmp_path: Path) -> None:
    found = one(shards(tmp_path, PARTS, total_size=64 * 8 * 4), "BW305")
    assert (found.severity, found.file) == (Severity.WARNING, INDEX)
    assert "total_size 2048, but its tensors have 2080 bytes" in found.message


@pytest.mark.parametrize("total", [2080, 2080.0, None, "2080"])
def test_bw305_is_not_said_of_the_sum_however_it_is_written(tmp_path: Path, total: object) -> None:
    assert codes(shards(tmp_path, PARTS, total_size=total)) == []


@pytest.mark.parametrize("total", [2048, 3072, 2560])
def test_bw305_is_not_said_of_a_storage_that_tensors_share(tmp_path: Path, total: int) -> None:
    """Storages once, as transformers counts; every name; or the bytes that some tensor has."""
    name, of = "pytorch_model-00001-of-00001.bin", storage(numel=512)
    tensors = {WTE: tensor((64, 8), (8, 1), of=of), "part": tensor((16, 8), (8, 1), of=of, offset=128)}
    if total == 3072:
        tensors = {WTE: tensors[WTE], HEAD: tensors[WTE], "part": tensor((32, 8), (8, 1), of=storage("1", numel=256))}
    (tmp_path / name).write_bytes(saved(dictionary(tensors), {"0": table().tobytes(), "1": table(32).tobytes()}))
    index = {"weight_map": dict.fromkeys(tensors, name), "metadata": {"total_size": total}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    assert "BW305" not in codes(tmp_path)


def test_bw305_is_not_said_while_a_shard_is_missing(tmp_path: Path) -> None:
    (shards(tmp_path, PARTS, total_size=2080) / SECOND).unlink()
    assert codes(tmp_path) == ["BW307"]


# --- BW306 path-leaves-directory ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "outside", ["../secret.safetensors", "/etc/passwd", "a/../../secret.safetensors", "", ".", "a\\b", "a\0b"]
)
def test_bw306_a_name_that_is_no_file_of_the_checkpoint(tmp_path: Path, outside: str) -> None:
    write(tmp_path, {"secret.weight": table()}, name="secret.safetensors")
    found = one(shards(tmp_path / "model", {FIRST: {WTE: table()}}, {WTE: FIRST, HEAD: outside}), "BW306")
    assert (found.severity, found.file) == (Severity.ERROR, INDEX)
    assert found.message.endswith("it was not opened")
    assert "\0" not in found.message


def test_bw306_a_link_that_leads_out(tmp_path: Path) -> None:
    write(tmp_path, {HEAD: OWN}, name="secret.safetensors")
    path = shards(tmp_path / "model", {FIRST: {WTE: table()}}, {WTE: FIRST, HEAD: SECOND})
    (path / SECOND).symlink_to(tmp_path / "secret.safetensors")
    assert codes(path) == ["BW306"]


def test_bw306_is_not_said_of_a_link_that_stays_inside(tmp_path: Path) -> None:
    path = shards(tmp_path, {"real.safetensors": {WTE: table()}}, {WTE: FIRST})
    (path / FIRST).symlink_to("real.safetensors")
    assert codes(path) == []


def test_bw306_is_not_said_of_a_snapshot_in_the_hubs_cache(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    path = shards(repository / "snapshots" / "0a1b", PARTS)
    for number, name in enumerate((FIRST, SECOND, INDEX, "config.json")):
        blob = repository / "blobs" / str(number)
        blob.parent.mkdir(exist_ok=True)
        (path / name).rename(blob)
        (path / name).symlink_to(f"../../blobs/{number}")
    assert codes(path) == []


# --- BW307 shard-missing --------------------------------------------------------------------------------------------


def test_bw307_a_shard_that_is_not_there(tmp_path: Path) -> None:
    (shards(tmp_path, PARTS) / SECOND).unlink()
    found = one(tmp_path, "BW307")
    assert (found.severity, found.file) == (Severity.ERROR, INDEX)
    assert repr(SECOND) in found.message


def test_bw307_several_shards_are_one_finding_that_names_them(tmp_path: Path) -> None:
    others = {f"t{at}": f"model-{at:05d}-of-00012.safetensors" for at in range(2, 13)}
    found = one(shards(tmp_path, {FIRST: {WTE: table()}}, {WTE: FIRST, **others}), "BW307")
    assert found.message.startswith(f"{INDEX} names 11 shards that are missing: 'model-00002-of-00012.safetensors', ")
    assert found.message.endswith("'model-00009-of-00012.safetensors' and 3 more")


def test_bw307_is_not_said_of_a_shard_in_a_folder(tmp_path: Path) -> None:
    path = shards(tmp_path, {FIRST: {WTE: table()}}, {WTE: "weights/" + FIRST})
    (path / "weights").mkdir()
    (path / FIRST).rename(path / "weights" / FIRST)
    assert codes(path) == []


# --- BW308 shard-malformed ------------------------------------------------------------------------------------------


def test_bw308_one_truncated_shard_among_good_ones(tmp_path: Path) -> None:
    shard = shards(tmp_path, PARTS) / SECOND
    shard.write_bytes(shard.read_bytes()[:-1])
    found = one(tmp_path, "BW308")
    assert (found.severity, found.file) == (Severity.ERROR, SECOND)
    assert "truncated" in found.message


def test_bw308_a_broken_link_in_place_of_a_shard(tmp_path: Path) -> None:
    shard = shards(tmp_path, PARTS) / SECOND
    shard.unlink()
    shard.symlink_to("gone.safetensors")
    assert codes(tmp_path) == ["BW308"]


def test_bw308_a_folder_in_place_of_a_shard(tmp_path: Path) -> None:
    shard = shards(tmp_path, PARTS) / SECOND
    shard.unlink()
    shard.mkdir()
    assert codes(tmp_path) == ["BW308"]


def test_bw308_is_not_said_of_a_shard_without_tensors(tmp_path: Path) -> None:
    assert codes(shards(tmp_path, {FIRST: {WTE: table()}, SECOND: {}}, {WTE: FIRST})) == ["BW304"]


# --- BW309 index-missing --------------------------------------------------------------------------------------------


def test_bw309_shards_without_their_index(tmp_path: Path) -> None:
    (shards(tmp_path, PARTS) / INDEX).unlink()
    found = one(tmp_path, "BW309")
    assert (found.severity, found.file) == (Severity.ERROR, FIRST)


def test_bw309_names_the_shards_that_are_missing(tmp_path: Path) -> None:
    for number in (1, 4):
        write(tmp_path, {f"t{number}": table()}, GPT2, name=f"model-0000{number}-of-00005.safetensors")
    found = one(tmp_path, "BW309")
    assert found.message == (
        "2 shards, but no index; transformers loads none of them; of 5 shards, 3 are missing: "
        "model-00002-of-00005.safetensors, model-00003-of-00005.safetensors, model-00005-of-00005.safetensors"
    )
    assert found.help == "fetch the missing shards and the index (model.safetensors.index.json)"


def test_bw309_names_a_few_of_very_many_missing_shards(tmp_path: Path) -> None:
    write(tmp_path, {WTE: table()}, GPT2, name="model-00003-of-99999.safetensors")
    message = one(tmp_path, "BW309").message
    assert "of 99999 shards, 99998 are missing: model-00001-of-99999.safetensors, " in message
    assert message.endswith("model-00005-of-99999.safetensors and 99994 more")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model-00001-of-00001.safetensors", "1 shard, but no index; transformers does not load it"),
        (
            "model-00002-of-00001.safetensors",
            "1 shard, but no index; transformers does not load it; "
            "of 1 shard, 1 is missing: model-00001-of-00001.safetensors",
        ),
    ],
)
def test_bw309_counts_one_shard_in_the_singular(tmp_path: Path, name: str, message: str) -> None:
    write(tmp_path, {WTE: table()}, GPT2, name=name)
    assert one(tmp_path, "BW309").message == message


def test_bw309_is_not_said_of_one_file_under_another_name(tmp_path: Path) -> None:
    write(tmp_path, {WTE: table()}, GPT2, name="weights.safetensors")
    assert codes(tmp_path) == []


# --- BW310 index-malformed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "\x00", "null"]
)
def test_bw310_an_index_beside_the_single_file_that_is_none(tmp_path: Path, text: str) -> None:
    (tied_gpt2(tmp_path) / INDEX).write_text(text)
    found = one(tmp_path, "BW310")
    assert (found.severity, found.file) == (Severity.ERROR, INDEX)


def test_bw310_is_not_said_of_a_stale_index_that_can_be_read(tmp_path: Path) -> None:
    (tied_gpt2(tmp_path) / INDEX).write_text(json.dumps({"weight_map": {WTE: FIRST}}))
    assert codes(tmp_path) == ["BW301"]


# --- BW311 misaligned, BW312 odd-name -------------------------------------------------------------------------------


def entry(begin: int, size: int, dtype: str = "U8") -> dict[str, object]:
    return {"dtype": dtype, "shape": [size], "data_offsets": [begin, begin + size * (4 if dtype == "F32" else 1)]}


EMBEDDING = {"dtype": "F32", "shape": [64, 8], "data_offsets": [0, 2048]}


def header_ending_on(residue: int) -> dict[str, object]:
    """A header whose data begins at `residue` of 8."""
    for padding in range(9):
        header: dict[str, object] = {"__metadata__": {"padding": " " * padding}, WTE: EMBEDDING}
        if len(json.dumps(header, separators=(",", ":"))) % 8 == residue:
            return header
    raise AssertionError


def test_bw311_data_that_begins_beside_its_elements(tmp_path: Path) -> None:
    found = one(raw(tmp_path, header_ending_on(1), table().tobytes()), "BW311")
    assert (found.severity, found.tensors, found.file) == (Severity.INFO, (WTE,), "model.safetensors")
    assert found.message.startswith("model.safetensors: 1 of 1 tensors do not begin")


def test_bw311_is_not_said_of_the_smallest_alignment(tmp_path: Path) -> None:
    assert codes(raw(tmp_path, header_ending_on(4), table().tobytes())) == []


@pytest.mark.parametrize("name", ["", "a\0b"])
def test_bw312_an_empty_name_and_one_with_a_nul(tmp_path: Path, name: str) -> None:
    found = one(write(tmp_path, {WTE: table(), name: np.ones(4, np.float32)}, GPT2), "BW312")
    assert (found.severity, found.tensors, found.file) == (Severity.WARNING, (name,), "model.safetensors")


def test_bw312_is_not_said_of_spaces_and_letters_of_any_script(tmp_path: Path) -> None:
    assert codes(write(tmp_path, {WTE: table(), "vocabulaire à moi 重み": np.ones(4, np.float32)}, GPT2)) == []


# --- BW313 odd-bool --------------------------------------------------------------------------------------------------


def masked(directory: Path, byte: int) -> Path:
    mask = Bits("BOOL", np.array([0, 1, byte], np.uint8))
    return write(directory, {WTE: table(), "mask": mask}, GPT2)


@pytest.mark.parametrize("byte", [2, 255])
def test_bw313_a_bool_of_another_byte(tmp_path: Path, byte: int) -> None:
    found = one(masked(tmp_path, byte), "BW313")
    assert (found.severity, found.tensors, found.fixable) == (Severity.WARNING, ("mask",), False)


def test_bw313_is_said_once_of_all_in_a_file(tmp_path: Path) -> None:
    odd = Bits("BOOL", np.array([2], np.uint8))
    path = shards(tmp_path, {FIRST: {WTE: table(), "a" * 40_000: odd, "b": odd, "c": odd}, SECOND: {"d": odd}})
    of_first, of_second = (found for found in findings(path) if found.code == "BW313")
    assert (of_first.file, of_first.tensors[1:], of_second.file) == (FIRST, ("b", "c"), SECOND)
    assert "characters) and 2 more are BOOL, and hold bytes" in of_first.message and len(of_first.message) < 300
    assert of_second.message == "'d' is BOOL, and holds bytes that are neither 0 nor 1"


@pytest.mark.parametrize("byte", [0, 1])
def test_bw313_is_not_said_of_0_and_1(tmp_path: Path, byte: int) -> None:
    assert codes(masked(tmp_path, byte)) == []


# --- BW314 nested-tensors --------------------------------------------------------------------------------------------


def pickled(directory: Path, *, under: str | None) -> Path:
    """A tied GPT-2 in a pickle, with an entry that is no tensor."""
    tensors = {WTE: tensor((64, 8), (8, 1), of=storage(numel=512))}
    whole = tensors if under is None else {under: dictionary(tensors)}
    pickle = saved(dictionary({**whole, "optimizer": NONE}), {"0": table().tobytes()})
    (directory / "pytorch_model.bin").write_bytes(pickle)
    (directory / "config.json").write_text(json.dumps(GPT2))
    return directory


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_bw314_tensors_in_a_dictionary_of_the_pickle(tmp_path: Path, key: str) -> None:
    found = one(pickled(tmp_path, under=key), "BW314")
    assert (found.severity, found.file, found.fixable) == (Severity.ERROR, "pytorch_model.bin", False)
    assert found.message == f"pytorch_model.bin: the tensors are nested under {key!r}, expected at the top level"


def test_bw314_is_said_of_a_shard(tmp_path: Path) -> None:
    name = "pytorch_model-00001-of-00001.bin"
    (pickled(tmp_path, under="state_dict") / "pytorch_model.bin").rename(tmp_path / name)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {WTE: name}}))
    assert one(tmp_path, "BW314").file == name


def test_bw314_is_not_said_of_an_entry_beside_the_tensors(tmp_path: Path) -> None:
    assert codes(pickled(tmp_path, under=None)) == []


# --- BW315 second-format --------------------------------------------------------------------------------------------

IDS = {f"t{at}": at for at in range(64)}


def beside(directory: Path, values: Any, name: str = "pytorch_model.bin", tensor_name: str = WTE) -> Path:
    """A tied GPT-2 in safetensors, and its table in a pickle."""
    tensors = {tensor_name: tensor(values.shape, (values.shape[1], 1), of=storage(numel=values.size))}
    (directory / name).write_bytes(saved(dictionary(tensors), {"0": values.tobytes()}))
    return tied_gpt2(directory)


def with_change(*rows: int) -> Any:
    changed = table()
    changed[list(rows)] += 1
    return changed


def test_bw315_a_pickle_that_differs_in_some_rows(tmp_path: Path) -> None:
    path = beside(tmp_path, with_change(3, 7))
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": IDS}}))
    found = one(path, "BW315")
    assert (found.severity, found.file, found.tensors) == (Severity.WARNING, "pytorch_model.bin", (WTE,))
    assert found.message == (
        f"pytorch_model.bin and model.safetensors differ: {WTE}: 2 of 64 rows differ (3, 7), by at most 1; among them "
        "'t3', 't7'. transformers, vLLM, mlx-lm and llama.cpp's converter read model.safetensors, unless they are made "
        "to read pytorch_model.bin"
    )
    assert codes(path) == ["BW315"]


def test_bw315_a_pickle_of_another_length(tmp_path: Path) -> None:
    found = one(beside(tmp_path, table(72)), "BW315")
    assert found.severity is Severity.WARNING
    assert "64 rows; 8 rows fewer than its 72" in found.message


def test_bw315_an_equal_pickle_wastes_its_bytes(tmp_path: Path) -> None:
    found = one(beside(tmp_path, table()), "BW315")
    size = (tmp_path / "pytorch_model.bin").stat().st_size / 1e6
    assert (found.severity, found.tensors) == (Severity.INFO, ())
    assert found.message.startswith(
        f"pytorch_model.bin ({size:.3g} MB) holds the same embedding and head as model.safetensors. "
    )


def test_bw315_a_cast_is_not_a_difference(tmp_path: Path) -> None:
    write(beside(tmp_path, table()), {WTE: table().astype(np.float16)}, GPT2)
    found = one(tmp_path, "BW315")
    assert found.severity is Severity.INFO
    assert "but for noise from a cast through F16" in found.message


def test_bw315_a_head_of_its_own_in_the_pickle(tmp_path: Path) -> None:
    embedding = tensor((64, 8), (8, 1), of=storage(numel=512))
    head = tensor((64, 8), (8, 1), of=storage("1", numel=512))
    whole = saved(dictionary({WTE: embedding, HEAD: head}), {"0": table().tobytes(), "1": OWN.tobytes()})
    (tmp_path / "pytorch_model.bin").write_bytes(whole)
    assert f"differ: {WTE}: 64 of 64 rows differ, by at most" in one(tied_gpt2(tmp_path), "BW315").message


def test_bw315_original_names(tmp_path: Path) -> None:
    found = one(beside(tmp_path, with_change(5), "consolidated.00.pth", "tok_embeddings.weight"), "BW315")
    assert found.severity is Severity.WARNING
    assert "1 of 64 rows differ (5), by at most 1. transformers, vLLM, mlx-lm" in found.message
    assert found.message.endswith("Meta's own code reads consolidated.00.pth")
    write(tmp_path, {"tok_embeddings.weight": table(), "output.weight": OWN}, name="consolidated.safetensors")
    _, other = (found for found in findings(tmp_path) if found.code == "BW315")
    assert other.severity is Severity.WARNING
    assert "64 of 64 rows differ" in other.message
    assert "vLLM reads consolidated.safetensors; transformers" in other.message


def test_bw315_what_is_not_compared_says_why(tmp_path: Path) -> None:
    path = beside(tmp_path, with_change(5))
    assert one(path, "BW315", values=False).message.endswith("was not compared: no values were read")
    (path / "pytorch_model.bin").write_bytes(b"\x80\x02cos\nsystem\n(X\x01\x00\x00\x00atR.")
    assert "was not compared: pytorch_model.bin: a bare pickle" in one(path, "BW315").message
    (path / "pytorch_model.bin").unlink()
    for part in range(2):
        beside(path, table(), f"consolidated.{part:02}.pth", "tok_embeddings.weight")
    assert one(path, "BW315").message.endswith("it is one of 2 parts for tensor parallelism")


def test_bw315_shards_of_pickles_are_compared_by_their_index(tmp_path: Path) -> None:
    name = "pytorch_model-00001-of-00001.bin"
    beside(tmp_path, with_change(5), name)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {WTE: name}}))
    assert "1 of 64 rows differ (5)" in one(tmp_path, "BW315").message


def test_bw315_is_not_said_of_a_file_that_was_named_or_of_training_state(tmp_path: Path) -> None:
    path = beside(tmp_path, with_change(5))
    assert "BW315" not in codes(path / "model.safetensors")
    (path / "pytorch_model.bin").rename(path / "training_args.bin")
    assert codes(path) == []


# --- BW316 hub-count-differs ----------------------------------------------------------------------------------------


def counted(path: Path, parameters: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the audit says of a directory whose place states this count."""
    monkeypatch.setattr("bowline.checkpoint.places.file_set.FileSet.parameters", parameters)
    return [found.message for found in findings(path) if found.code == "BW316"]


def test_bw316_another_number_than_the_files_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (message,) = counted(tied_gpt2(tmp_path), {"F32": 1024, "I64": 3}, monkeypatch)
    assert message == "the Hub counts 1,024 (F32) parameters, and the files hold 512 (F32)"


def test_bw316_is_not_said_of_the_number_that_the_files_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert counted(tied_gpt2(tmp_path / "a"), {"F32": 512, "I64": 3}, monkeypatch) == []
    assert counted(tied_gpt2(tmp_path / "b"), {}, monkeypatch) == []
    assert counted(tied_gpt2(tmp_path / "c", quantization_config={}), {"F32": 9}, monkeypatch) == []
