"""Edits of small checkpoints on disk: what each writes, what it refuses, and what stays as it was."""

from __future__ import annotations

import json
import os
import pickle
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bowline.auditing import audit
from bowline.auditing.config_fix import fix_config
from bowline.checkpoint.formats import safetensors_writer
from bowline.checkpoint.formats.numpy_writer import Bits
from bowline.edit import CheckpointEdit, EditReport, forget, history, open_checkpoint, undo, verification
from bowline.errors import BowlineError, CheckpointError, ConfigError, TieError, UsageError
from tests.checkpoints import (
    BERT,
    GPT2,
    HEAD,
    OWN,
    ROWS,
    T5,
    UNKNOWN,
    WIDTH,
    WTE,
    codes,
    shards,
    table,
    tied_gpt2,
    write,
)

Steps = Callable[[CheckpointEdit], CheckpointEdit]
FIRST, SECOND, THIRD = (f"model-{at:05d}-of-00003.safetensors" for at in (1, 2, 3))
OTHER = "transformer.h.0.mlp.c_fc.weight"


def run(place: Path, steps: Steps, destination: Path | None = None, **options: Any) -> EditReport:
    with open_checkpoint(place) as checkpoint:
        return steps(checkpoint.edit()).commit(destination, in_place=destination is None, **options)


def stored(place: Path) -> dict[str, np.ndarray[Any, Any]]:
    with open_checkpoint(place) as checkpoint:
        return {name: checkpoint.bits(name) for name in checkpoint.tensors}


def config_of(place: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((place / "config.json").read_text())
    return content


def files_of(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}


def same(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    return one.tobytes() == np.ascontiguousarray(other).tobytes()


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    return tied_gpt2(tmp_path / "model")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    files = {
        FIRST: {WTE: table()},
        SECOND: {OTHER: table(8, 32)},
        THIRD: {"transformer.ln_f.weight": table(1, WIDTH)[0]},
    }
    return shards(tmp_path / "sharded", files, total_size=ROWS * WIDTH * 4 + 8 * 32 * 4 + WIDTH * 4)


# --- tie and untie ----------------------------------------------------------------------------------------------------


def test_untie_stores_the_head_as_a_copy_and_clears_the_flag(tied: Path) -> None:
    run(tied, lambda edit: edit.untie())
    assert same(stored(tied)[HEAD], table())
    assert same(stored(tied)[WTE], table())
    assert config_of(tied) == {**GPT2, "tie_word_embeddings": False}


def test_tie_drops_an_equal_head_and_sets_the_flag(tmp_path: Path) -> None:
    place = write(tmp_path / "model", {WTE: table(), HEAD: table()}, {**GPT2, "tie_word_embeddings": False})
    run(place, lambda edit: edit.tie())
    assert set(stored(place)) == {WTE}
    assert config_of(place)["tie_word_embeddings"] is True
    assert codes(place) == []


def test_tie_refuses_ends_that_differ_and_says_how_many_rows(tmp_path: Path) -> None:
    head = table()
    head[-3:] += 1
    place = write(tmp_path / "model", {WTE: table(), HEAD: head}, GPT2)
    before = files_of(place)
    with pytest.raises(TieError, match=re.escape(f"3 of {ROWS} rows differ by at most 1; the difference looks like")):
        run(place, lambda edit: edit.tie())
    assert files_of(place) == before


@pytest.mark.parametrize(("keep", "kept"), [("embedding", table()), ("head", OWN)])
def test_keep_says_whose_values_serve_both(tmp_path: Path, keep: Any, kept: Any) -> None:
    place = write(tmp_path / "model", {WTE: table(), HEAD: OWN}, GPT2)
    run(place, lambda edit: edit.tie(keep=keep))
    assert set(stored(place)) == {WTE}
    assert same(stored(place)[WTE], kept)


def test_keep_both_stores_two_equal_ends_under_the_flag(tmp_path: Path) -> None:
    place = write(tmp_path / "model", {WTE: table(), HEAD: OWN}, {**GPT2, "tie_word_embeddings": False})
    run(place, lambda edit: edit.tie(keep="head", keep_both=True))
    assert same(stored(place)[WTE], OWN)
    assert same(stored(place)[HEAD], OWN)
    assert config_of(place)["tie_word_embeddings"] is True


def test_a_head_that_alone_is_stored_becomes_the_embedding(tmp_path: Path) -> None:
    place = write(tmp_path / "model", {HEAD: OWN}, GPT2)
    run(place, lambda edit: edit.tie())
    assert same(stored(place)[WTE], OWN)


def test_berts_decoder_bias_is_untied_and_tied_with_the_head(tmp_path: Path) -> None:
    embedding, bias = "bert.embeddings.word_embeddings.weight", "cls.predictions.bias"
    place = write(tmp_path / "model", {embedding: table(), bias: table()[:, 0].copy()}, BERT)
    before = files_of(place)
    run(place, lambda edit: edit.untie())
    assert same(stored(place)["cls.predictions.decoder.bias"], table()[:, 0])
    assert same(stored(place)["cls.predictions.decoder.weight"], table())
    run(place, lambda edit: edit.tie())
    assert set(stored(place)) == {embedding, bias}
    undo(place)
    undo(place)
    assert files_of(place) == before


def test_an_untied_t5_carries_the_scale_in_its_head_and_gives_it_back(tmp_path: Path) -> None:
    place = write(tmp_path / "model", {"shared.weight": table(columns=16)}, {**T5, "d_model": 16})
    report = run(place, lambda edit: edit.untie())
    assert same(stored(place)["lm_head.weight"], table(columns=16) / 4)
    assert config_of(place)["scale_decoder_outputs"] is False
    assert "0.25" in str(report)
    run(place, lambda edit: edit.tie())
    assert set(stored(place)) == {"shared.weight"}
    assert config_of(place)["scale_decoder_outputs"] is True


def test_a_class_without_a_tie_is_refused(tmp_path: Path) -> None:
    config = {"architectures": ["BertModel"], "model_type": "bert", "vocab_size": ROWS}
    place = write(tmp_path / "model", {"embeddings.word_embeddings.weight": table()}, config)
    for steps in (lambda edit: edit.untie(), lambda edit: edit.tie()):
        with pytest.raises(TieError, match="declares no tie"):
            run(place, steps)


# --- resize, cast, dedupe ---------------------------------------------------------------------------------------------


def test_resize_keeps_the_old_rows_and_adds_their_mean(tied: Path) -> None:
    run(tied, lambda edit: edit.resize(ROWS + 6))
    rows = stored(tied)[WTE].view(np.float32)
    assert same(rows[:ROWS], table())
    assert np.allclose(rows[ROWS:], table().astype(np.float64).mean(0), atol=1e-7)
    assert config_of(tied)["vocab_size"] == ROWS + 6


def test_new_gaussian_rows_have_the_mean_and_a_hundred_thousandth_of_the_covariance(tied: Path) -> None:
    run(tied, lambda edit: edit.resize(ROWS + 4000, new_rows="gaussian"))
    new = stored(tied)[WTE].view(np.float32)[ROWS:].astype(np.float64)
    mean, covariance = table().astype(np.float64).mean(0), np.cov(table().astype(np.float64).T, bias=True)
    assert np.abs(new.mean(0) - mean).max() < 5 * np.sqrt(1e-5 * covariance.max() / 4000)
    assert np.allclose(np.cov(new.T), 1e-5 * covariance, atol=2e-6)


@pytest.mark.parametrize("rule", ["mean", "zeros", "copy:5"])
def test_every_rule_gives_what_the_live_resize_gives(tied: Path, rule: str) -> None:
    from bowline.nn import resize_vocab

    embedding = torch.nn.Embedding.from_pretrained(torch.from_numpy(table()))
    resize_vocab(torch.nn.ModuleDict({"wte": embedding}), ROWS + 3, new_rows=rule)
    run(tied, lambda edit: edit.resize(ROWS + 3, new_rows=rule))
    assert same(stored(tied)[WTE], embedding.weight.detach().numpy())


def test_pad_to_multiple_of_rounds_up(tied: Path) -> None:
    run(tied, lambda edit: edit.resize(ROWS + 1, pad_to_multiple_of=32))
    assert stored(tied)[WTE].shape == (96, WIDTH)


def test_a_token_that_a_config_names_is_not_dropped(tied: Path) -> None:
    path = tied / "config.json"
    path.write_text(json.dumps({**GPT2, "eos_token_id": 60}))
    with pytest.raises(UsageError, match=r"config\.json: eos_token_id is token 60, which would be dropped"):
        run(tied, lambda edit: edit.resize(50))


def test_a_chain_is_one_edit(tied: Path) -> None:
    before = files_of(tied)
    report = run(tied, lambda edit: edit.untie().resize(72).cast("bf16"))
    assert [str(step) for step in report.plan.steps] == ["untie", "resize --to 72", "cast --dtype bf16"]
    assert {name: bits.shape for name, bits in stored(tied).items()} == {WTE: (72, WIDTH), HEAD: (72, WIDTH)}
    assert len(history(tied)) == 1
    undo(tied)
    assert files_of(tied) == before


def test_cast_rounds_as_torch_does_and_counts_what_is_lost(tmp_path: Path) -> None:
    values = table()
    values[0, :3] = 1e5, -1e6, 3e-8
    place = write(tmp_path / "model", {WTE: values}, {**GPT2, "torch_dtype": "float32"})
    report = str(run(place, lambda edit: edit.cast("f16")))
    assert same(stored(place)[WTE], torch.from_numpy(values).half().numpy())
    assert config_of(place)["torch_dtype"] == "float16"
    assert "2 numbers became infinite" in report
    assert "numbers are too small and lost digits" in report


def test_cast_of_the_vocabulary_leaves_the_rest(sharded: Path) -> None:
    before = files_of(sharded)
    run(sharded, lambda edit: edit.cast("bf16", only="vocabulary"))
    after = files_of(sharded)
    assert stored(sharded)[WTE].dtype == np.uint16
    assert after[SECOND] == before[SECOND]
    assert after[THIRD] == before[THIRD]


def test_dedupe_turns_a_pickle_with_an_alias_into_safetensors_with_one_matrix(tmp_path: Path) -> None:
    place = tmp_path / "model"
    place.mkdir()
    weight = torch.from_numpy(table())
    torch.save({WTE: weight, HEAD: weight, OTHER: torch.from_numpy(table(8, 4)).T}, place / "pytorch_model.bin")
    (place / "config.json").write_text(json.dumps(GPT2))
    before = files_of(place)
    run(place, lambda edit: edit.dedupe())
    assert sorted(path.name for path in place.glob("*")) == [".bowline", "config.json", "model.safetensors"]
    assert same(stored(place)[WTE], table())
    assert same(stored(place)[OTHER], table(8, 4).T)
    assert HEAD not in stored(place)
    undo(place)
    assert files_of(place) == before


def test_dedupe_leaves_ends_that_differ(tmp_path: Path) -> None:
    place = write(tmp_path / "model", {WTE: table(), HEAD: OWN}, GPT2)
    with open_checkpoint(place) as checkpoint:
        plan = checkpoint.edit().dedupe().plan()
    assert not plan.changes
    assert "the ends differ and stay" in str(plan)


# --- files ------------------------------------------------------------------------------------------------------------


def test_only_the_shards_that_change_are_written_and_the_others_are_linked(sharded: Path, tmp_path: Path) -> None:
    (sharded / SECOND).write_bytes((sharded / SECOND).read_bytes())
    place = tmp_path / "new"
    report = run(sharded, lambda edit: edit.untie(), place)
    written = {file.name for file in report.plan.files if file.action == "write"}
    assert written == {FIRST, "model.safetensors.index.json", "config.json"}
    assert files_of(place)[SECOND] == files_of(sharded)[SECOND]
    assert json.loads((place / "model.safetensors.index.json").read_text())["weight_map"][HEAD] == FIRST
    assert audit(place, values=False).clean


def test_large_files_are_hard_links_unless_copies_are_wanted(tmp_path: Path) -> None:
    files = {FIRST: {WTE: table()}, SECOND: {OTHER: table(1 << 9, 1 << 10)}}
    place = shards(tmp_path / "model", files)
    run(place, lambda edit: edit.untie(), tmp_path / "linked")
    run(place, lambda edit: edit.untie(), tmp_path / "copied", copy=True)
    assert (tmp_path / "linked" / SECOND).samefile(place / SECOND)
    assert not (tmp_path / "copied" / SECOND).samefile(place / SECOND)
    assert (tmp_path / "linked" / "config.json").stat().st_nlink == 1


def test_the_total_size_and_the_number_of_parameters_follow(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"]["total_parameters"] = 1
    path.write_text(json.dumps(index))
    run(sharded, lambda edit: edit.resize(128))
    metadata = json.loads(path.read_text())["metadata"]
    count = 128 * WIDTH + 8 * 32 + WIDTH
    assert metadata == {"total_size": 4 * count, "total_parameters": count}


def test_the_text_of_the_config_stays_but_for_the_values(tied: Path) -> None:
    text = '{\n   "architectures": ["GPT2LMHeadModel"],  "model_type": "gpt2",\n "vocab_size" : 64, "eps": 1e-05}\n'
    (tied / "config.json").write_text(text)
    run(tied, lambda edit: edit.resize(70))
    assert (tied / "config.json").read_text() == text.replace("64", "70")


def test_mode_and_metadata_of_a_file_are_kept(tmp_path: Path) -> None:
    place = write(tmp_path / "model", {WTE: table()}, GPT2, metadata={"format": "pt", "from": "a test"})
    (place / "model.safetensors").chmod(0o640)
    run(place, lambda edit: edit.untie(), tmp_path / "new")
    for result in (tmp_path / "new",):
        assert stat.S_IMODE((result / "model.safetensors").stat().st_mode) == 0o640
        with open_checkpoint(result) as checkpoint:
            assert checkpoint.metadata == {"format": "pt", "from": "a test"}


def test_a_plan_writes_nothing(tied: Path) -> None:
    before = files_of(tied)
    with open_checkpoint(tied) as checkpoint:
        plan = checkpoint.edit().untie().plan()
    assert files_of(tied) == before
    assert plan.written == sum(file.nbytes for file in plan.files if file.action == "write")
    assert "write model.safetensors" in str(plan)


def test_weights_in_another_format_are_left_out_with_a_word(tied: Path) -> None:
    (tied / "tf_model.h5").write_bytes(b"old")
    report = run(tied, lambda edit: edit.untie())
    assert not (tied / "tf_model.h5").exists()
    assert "tf_model.h5: the weights before the edit" in str(report)
    undo(tied)
    assert (tied / "tf_model.h5").read_bytes() == b"old"


# --- undo -------------------------------------------------------------------------------------------------------------


def test_undo_brings_back_each_edit_in_turn(sharded: Path) -> None:
    states = [files_of(sharded)]
    for steps in (lambda edit: edit.untie(), lambda edit: edit.resize(80), lambda edit: edit.cast("bf16")):
        run(sharded, steps)
        states.append({name: content for name, content in files_of(sharded).items() if ".bowline" not in name})
    assert [entry.why for entry in history(sharded)] == ["untie", "resize --to 80", "cast --dtype bf16"]
    for state in states[-2::-1]:
        undo(sharded)
        assert {name: one for name, one in files_of(sharded).items() if ".bowline" not in name} == state
    assert files_of(sharded) == states[0]
    with pytest.raises(UsageError, match="nothing to undo"):
        undo(sharded)


def test_undo_refuses_to_lose_a_later_change(tied: Path) -> None:
    run(tied, lambda edit: edit.untie())
    (tied / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has changed since 'untie'"):
        undo(tied)


def test_what_audit_fix_did_can_be_undone(tmp_path: Path) -> None:
    place = write(tmp_path / "model", {WTE: table(), HEAD: OWN}, GPT2)
    before = files_of(place)
    assert fix_config(audit(place))
    assert [entry.why for entry in history(place)] == ["audit --fix"]
    undo(place)
    assert files_of(place) == before


def test_forget_frees_the_old_files_and_keeps_the_history(tied: Path) -> None:
    run(tied, lambda edit: edit.untie())
    assert forget(tied) > ROWS * WIDTH * 4
    assert [entry.forgotten for entry in history(tied)] == [True]
    with pytest.raises(UsageError, match="were forgotten"):
        undo(tied)


def test_a_new_directory_says_what_it_was_made_from(tied: Path, tmp_path: Path) -> None:
    run(tied, lambda edit: edit.untie(), tmp_path / "new")
    assert [entry.made_from for entry in history(tmp_path / "new")] == [str(tied)]
    with pytest.raises(UsageError, match="was made from"):
        undo(tmp_path / "new")


# --- refusals: each leaves every byte as it was -----------------------------------------------------------------------


def quantised(place: Path) -> Steps:
    write(place, {"model.embed_tokens.weight": table(), "lm_head.qweight": table(), "lm_head.scales": table()}, None)
    (place / "config.json").write_text(
        json.dumps({**GPT2, "architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    )
    return lambda edit: edit.resize(80)


def unknown(place: Path) -> Steps:
    tensors = {"model.embed_tokens.weight": table(), "lm_head.weight": OWN, "model.router.weight": table(3, ROWS)}
    write(place, tensors, UNKNOWN)
    return lambda edit: edit.resize(80)


def missing_shard(place: Path) -> Steps:
    shards(place, {FIRST: {WTE: table()}, SECOND: {OTHER: table(8, 32)}})
    (place / SECOND).unlink()
    return lambda edit: edit.untie()


def two_models(place: Path) -> Steps:
    shards(place, {FIRST: {WTE: table()}, SECOND: {OTHER: table(8, 32)}})
    write(place, {WTE: OWN}, GPT2)
    return lambda edit: edit.untie()


def no_config(place: Path) -> Steps:
    write(place, {WTE: table()})
    return lambda edit: edit.untie()


def linked(place: Path) -> Steps:
    tied_gpt2(place)
    os.link(place / "model.safetensors", place.parent / "elsewhere")
    return lambda edit: edit.untie()


def cached(place: Path) -> Steps:
    tied_gpt2(place)
    blob = place.parent / "blob"
    (place / "model.safetensors").rename(blob)
    (place / "model.safetensors").symlink_to(blob)
    return lambda edit: edit.untie()


REFUSED: dict[str, tuple[Callable[[Path], Steps], type[BowlineError], str]] = {
    "a quantised head": (quantised, TieError, "lm_head.weight: is stored quantised"),
    "an unknown tensor": (unknown, TieError, r"model.router.weight \[3, 64\] may or may not"),
    "a missing shard": (missing_shard, CheckpointError, "a part of the checkpoint cannot be read"),
    "two models": (two_models, CheckpointError, "are both there"),
    "no config": (no_config, ConfigError, "config.json is missing"),
    "several hard links": (linked, CheckpointError, "several hard links"),
    "a cache's link": (cached, CheckpointError, "a part of the checkpoint|leads out|symbolic link"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_edited_is_refused_by_name_and_left_alone(tmp_path: Path, case: str) -> None:
    make, error, words = REFUSED[case]
    place = tmp_path / "root" / "model"
    place.parent.mkdir()
    steps = make(place)
    before = files_of(place.parent)
    with pytest.raises(error, match=words):
        run(place, steps)
    assert files_of(place.parent) == before


def test_a_full_disk_is_seen_before_anything_is_written(tied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, real = files_of(tied.parent), os.statvfs(tied)
    full = os.statvfs_result([*real[:3], 0, 0, *real[5:]])
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(CheckpointError, match="has 0 bytes free"):
        run(tied, lambda edit: edit.untie())
    assert files_of(tied.parent) == before


def test_a_destination_that_has_files_is_refused(tied: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_bytes(b"mine")
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        run(tied, lambda edit: edit.untie(), tmp_path / "there")
    assert files_of(tmp_path / "there") == {"file": b"mine"}


def test_a_source_that_changes_during_the_edit_is_refused(tied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files_of(tied)
    verify = verification.verify

    def changing(*arguments: Any) -> int:
        (tied / "config.json").write_text(json.dumps({**GPT2, "changed": True}))
        return verify(*arguments)

    monkeypatch.setattr("bowline.edit.commit.verify", changing)
    with pytest.raises(CheckpointError, match=r"config.json: changed while the edit was prepared"):
        run(tied, lambda edit: edit.untie())
    assert files_of(tied)["model.safetensors"] == before["model.safetensors"]


def test_a_result_that_is_not_what_was_planned_is_thrown_away(tied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files_of(tied.parent)
    write_file = safetensors_writer.write_payloads

    def damaging(file: Any, *arguments: Any) -> None:
        write_file(file, *arguments)
        file.seek(-5, os.SEEK_END)
        file.write(b"?")

    monkeypatch.setattr("bowline.edit.commit.write_payloads", damaging)
    with pytest.raises(CheckpointError, match="differs from its source"):
        run(tied, lambda edit: edit.untie())
    assert files_of(tied.parent) == before


def test_a_pickle_that_runs_code_is_refused_and_not_run(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "harm"),)

    place = tmp_path / "model"
    place.mkdir()
    (place / "pytorch_model.bin").write_bytes(pickle.dumps({WTE: Harm()}))
    (place / "config.json").write_text(json.dumps(GPT2))
    with pytest.raises(BowlineError):
        run(place, lambda edit: edit.dedupe())
    assert not (tmp_path / "harm").exists()


def test_bits_of_bfloat16_are_copied_as_they_are(tmp_path: Path) -> None:
    patterns = np.arange(ROWS * WIDTH, dtype=np.uint16).reshape(ROWS, WIDTH) * 127  # NaNs with payloads among them
    place = write(tmp_path / "model", {WTE: Bits("BF16", patterns)}, GPT2)
    run(place, lambda edit: edit.untie().resize(80, new_rows="copy:1"))
    assert same(stored(place)[HEAD][:ROWS], patterns)
    assert same(stored(place)[WTE][ROWS], patterns[1])


def test_an_edit_in_place_that_changes_nothing_is_not_recorded(tmp_path: Path) -> None:
    place = tied_gpt2(tmp_path / "model", tie_word_embeddings=True)
    report = run(place, lambda edit: edit.tie())
    assert report.unchanged and str(report).endswith(f"{place}: there is nothing to change")
    assert not history(place)
    assert sorted(path.name for path in place.iterdir()) == ["config.json", "model.safetensors"]
