"""`--fix` sets the flag in `config.json` to what the tensors show, at every level that states it, and nothing else."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from bowline.auditing import audit
from bowline.auditing.config_fix import fix_config, flag_edits
from bowline.errors import ConfigError
from tests.checkpoints import (
    BART,
    GPT2,
    HEAD,
    LLAMA,
    OWN,
    ROWS,
    T5,
    UNKNOWN,
    WTE,
    codes,
    shards,
    snapshot,
    table,
    tied_gpt2,
    write,
)

LLAVA_EMBED, LLAVA_HEAD = "language_model.model.embed_tokens.weight", "language_model.lm_head.weight"
EMBED = "model.embed_tokens.weight"
DIVERGED = {WTE: table(), HEAD: OWN}


def fix(path: Path) -> list[str]:
    return fix_config(audit(path))


def config(path: Path) -> Any:
    return json.loads((path / "config.json").read_text())


def llava(top: bool | None, text: bool | None, **more: object) -> dict[str, Any]:
    result: dict[str, Any] = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": {"vocab_size": ROWS},
        **more,
    }
    if top is not None:
        result["tie_word_embeddings"] = top
    if text is not None:
        result["text_config"]["tie_word_embeddings"] = text
    return result


# --- what is written ------------------------------------------------------------------------------------------------


def test_a_true_flag_over_two_matrices_becomes_false(tmp_path: Path) -> None:
    changes = fix(write(tmp_path, DIVERGED, GPT2))
    assert config(tmp_path) == {**GPT2, "tie_word_embeddings": False}
    assert changes[0] == "tie_word_embeddings: true -> false"
    assert codes(tmp_path) == []


def test_a_false_flag_over_one_matrix_becomes_true(tmp_path: Path) -> None:
    fix(write(tmp_path, {WTE: table()}, {**GPT2, "tie_word_embeddings": False}))
    assert config(tmp_path) == GPT2
    assert codes(tmp_path) == []


@pytest.mark.parametrize(
    ("value", "tensors", "change"),
    [
        (None, {WTE: table()}, "null -> true"),
        (None, DIVERGED, "null -> false"),
        ("false", DIVERGED, "'false' -> false"),
        (1, {WTE: table()}, "1 -> true"),
    ],
)
def test_a_flag_that_is_no_boolean_becomes_the_one_that_the_bytes_make_true(
    tmp_path: Path, value: object, tensors: Any, change: str
) -> None:
    changes = fix(write(tmp_path, tensors, {**GPT2, "tie_word_embeddings": value}))
    assert changes[0] == f"tie_word_embeddings: {change}"
    assert codes(tmp_path) == []


def test_an_absent_flag_is_written_first(tmp_path: Path) -> None:
    changes = fix(write(tmp_path, {"model.embed_tokens.weight": table()}, UNKNOWN))
    assert changes[0] == "tie_word_embeddings: absent -> true"
    assert list(config(tmp_path)) == ["tie_word_embeddings", *UNKNOWN]
    assert codes(tmp_path) == ["BW403"]


def test_nothing_else_in_the_text_changes(tmp_path: Path) -> None:
    text = (
        '{"architectures": ["GPT2LMHeadModel"],\r\n\t"model_type":"gpt2", "eps": 1e-05, "n": 1.0, "name": "\\u00e9é",\n'
        ' "tie_word_embeddings" : true, "vocab_size": 64 }\n\n'
    )
    write(tmp_path, DIVERGED)
    (tmp_path / "config.json").write_bytes(text.encode())
    fix(tmp_path)
    assert (tmp_path / "config.json").read_bytes() == text.replace('" : true', '" : false').encode()


def test_every_level_that_states_the_flag_is_brought_into_line(tmp_path: Path) -> None:
    fix(write(tmp_path, {LLAVA_EMBED: table(), LLAVA_HEAD: OWN}, llava(True, False)))
    assert config(tmp_path) == llava(False, False)
    assert codes(tmp_path) == []


def test_a_level_that_a_loader_asks_and_that_is_silent_is_given_the_flag(tmp_path: Path) -> None:
    fix(write(tmp_path, {LLAVA_EMBED: table(), LLAVA_HEAD: OWN}, llava(None, True)))
    assert config(tmp_path) == llava(False, False)


def test_a_level_that_has_no_vocabulary_keeps_its_flag(tmp_path: Path) -> None:
    vision = {"tie_word_embeddings": True}
    fix(write(tmp_path, {LLAVA_EMBED: table(), LLAVA_HEAD: OWN}, llava(True, True, vision_config=vision)))
    assert config(tmp_path) == llava(False, False, vision_config=vision)


def test_t5_saved_again_by_transformers_5_is_untied_and_keeps_its_scaling(tmp_path: Path) -> None:
    tensors = {"shared.weight": table(), HEAD: OWN}
    fix(write(tmp_path, tensors, {**T5, "scale_decoder_outputs": False}))
    assert config(tmp_path) == {**T5, "scale_decoder_outputs": False, "tie_word_embeddings": False}
    assert "BW109" not in codes(tmp_path)


def test_a_checkpoint_with_nothing_to_fix_is_not_touched(tmp_path: Path) -> None:
    before = snapshot(tied_gpt2(tmp_path))
    assert fix(tmp_path) == []
    assert snapshot(tmp_path) == before


def test_what_the_config_cannot_mend_is_not_touched(tmp_path: Path) -> None:
    before = snapshot(write(tmp_path, {WTE: table(), HEAD: table(72)}, GPT2))
    assert fix(tmp_path) == []
    assert snapshot(tmp_path) == before


def test_fixing_twice_changes_nothing_the_second_time(tmp_path: Path) -> None:
    fix(write(tmp_path, DIVERGED, GPT2))
    before = snapshot(tmp_path)
    assert fix(tmp_path) == []
    assert snapshot(tmp_path) == before


def test_headers_alone_are_enough_where_they_tell(tmp_path: Path) -> None:
    report = audit(write(tmp_path, {WTE: table()}, {**GPT2, "tie_word_embeddings": False}), values=False)
    fix_config(report)
    assert config(tmp_path) == GPT2


def test_the_weights_are_never_touched(tmp_path: Path) -> None:
    write(tmp_path, DIVERGED, GPT2)
    before = (tmp_path / "model.safetensors").read_bytes()
    fix(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("place", ["model.safetensors", "config.json"])
def test_a_file_of_the_directory_stands_for_it(tmp_path: Path, place: str) -> None:
    write(tmp_path, DIVERGED, GPT2)
    fix_config(audit(tmp_path / place))
    assert config(tmp_path)["tie_word_embeddings"] is False


def test_an_index_stands_for_its_directory(tmp_path: Path) -> None:
    shards(tmp_path, {"model-00001-of-00001.safetensors": DIVERGED})
    fix_config(audit(tmp_path / "model.safetensors.index.json"))
    assert config(tmp_path)["tie_word_embeddings"] is False


# --- what is kept ---------------------------------------------------------------------------------------------------


def test_the_old_file_is_kept_and_the_report_says_where(tmp_path: Path) -> None:
    write(tmp_path, DIVERGED, GPT2)
    old = (tmp_path / "config.json").read_bytes()
    (tmp_path / "config.json").chmod(0o640)
    *_, last = fix(tmp_path)
    backup = Path(last.removeprefix("the old config.json is kept in "))
    assert (backup / "config.json").read_bytes() == old
    assert json.loads((backup / "manifest.json").read_text())["why"] == "audit --fix"
    assert (tmp_path / "config.json").stat().st_mode & 0o7777 == 0o640


def test_a_backup_is_not_taken_for_a_part_of_the_checkpoint(tmp_path: Path) -> None:
    fix(write(tmp_path, DIVERGED, GPT2))
    assert codes(tmp_path) == []


# --- what is refused ------------------------------------------------------------------------------------------------


def test_a_config_in_the_hubs_cache_is_not_written_through(tmp_path: Path) -> None:
    snapshot_path = tmp_path / "models--a--b" / "snapshots" / "0a"
    write(snapshot_path, DIVERGED, GPT2)
    blob = tmp_path / "models--a--b" / "blobs" / "c"
    blob.parent.mkdir()
    (snapshot_path / "config.json").rename(blob)
    (snapshot_path / "config.json").symlink_to("../../blobs/c")
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match="is a symbolic link") as caught:
        fix(snapshot_path)
    assert caught.value.help == "copy the checkpoint out of the cache, and fix the copy"
    assert snapshot(tmp_path) == before


def test_a_config_with_two_names_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "model", DIVERGED, GPT2)
    os.link(tmp_path / "model" / "config.json", tmp_path / "second")
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match="several hard links"):
        fix(tmp_path / "model")
    assert snapshot(tmp_path) == before


def test_a_stop_in_the_middle_leaves_the_old_config_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, DIVERGED, GPT2)
    before = snapshot(tmp_path)

    def stop(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "replace", stop)
    with pytest.raises(ConfigError, match="cannot be replaced: Input/output error"):
        fix(tmp_path)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("now", ["{", "[]", '{"architectures": ["GPT2LMHeadModel"]}', "\udcff", None])
def test_a_config_that_changed_since_the_audit_is_left_alone(tmp_path: Path, now: str | None) -> None:
    report = audit(write(tmp_path, DIVERGED, GPT2))
    if now is None:
        (tmp_path / "config.json").unlink()
    else:
        (tmp_path / "config.json").write_bytes(now.encode(errors="surrogateescape"))
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError) as caught:
        fix_config(report)
    assert caught.value.help == "audit it again"
    assert snapshot(tmp_path) == before


def test_a_config_with_nan_in_it_is_fixed_all_the_same(tmp_path: Path) -> None:
    fix(write(tmp_path, DIVERGED, {**GPT2, "limit": float("nan")}))
    assert '"limit": NaN' in (tmp_path / "config.json").read_text()
    assert config(tmp_path)["tie_word_embeddings"] is False


def test_findings_that_want_different_flags_are_refused(tmp_path: Path) -> None:
    from dataclasses import replace

    report = audit(write(tmp_path, DIVERGED, GPT2))
    (found,) = report.findings
    both = replace(report, findings=(found, replace(found, code="BW102", flag_from_bytes=True)))
    with pytest.raises(ConfigError, match="BW101, BW102 need different values of the flag"):
        flag_edits(both)


def test_a_checkpoint_on_the_hub_is_not_fixed(tmp_path: Path) -> None:
    from dataclasses import replace

    report = audit(write(tmp_path, DIVERGED, GPT2))
    remote = replace(report, evidence=replace(report.evidence, location="org/name@main"))
    with pytest.raises(ConfigError, match="--fix changes only local files"):
        fix_config(remote)


# --- what is refused since it would do harm --------------------------------------------------------------------------


def untied_in_two_shards(directory: Path) -> Path:
    first, second = (f"model-0000{at}-of-00002.safetensors" for at in (1, 2))
    return shards(directory, {first: {EMBED: table()}, second: {HEAD: OWN}}, config=LLAMA)


def test_one_shard_does_not_speak_for_the_others(tmp_path: Path) -> None:
    shard = untied_in_two_shards(tmp_path) / "model-00001-of-00002.safetensors"
    report = audit(shard)
    assert report.evidence.ties[0].state is None
    assert [finding.code for finding in report.findings if finding.fixable] == []
    assert fix_config(report) == []
    assert config(tmp_path) == LLAMA


def test_a_missing_shard_may_hold_the_head(tmp_path: Path) -> None:
    (untied_in_two_shards(tmp_path) / "model-00002-of-00002.safetensors").unlink()
    assert codes(tmp_path) == ["BW307"]
    assert fix(tmp_path) == []


def test_untying_one_tie_must_not_make_another_random(tmp_path: Path) -> None:
    encoder = "model.encoder.embed_tokens.weight"
    write(tmp_path, {"model.shared.weight": table(), encoder: OWN}, BART)
    with pytest.raises(ConfigError, match=r"from \w+ to random .* no flag suits these tensors"):
        fix(tmp_path)
    assert config(tmp_path) == BART


def test_only_the_flag_is_written_whatever_else_decides_a_tie(tmp_path: Path) -> None:
    marian = {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "vocab_size": ROWS,
        "share_encoder_decoder_embeddings": True,
        "tie_word_embeddings": True,
    }
    write(tmp_path, {"model.shared.weight": table(), "lm_head.weight": OWN}, marian)
    with suppress(ConfigError):
        fix(tmp_path)
    assert config(tmp_path)["share_encoder_decoder_embeddings"] is True


@pytest.mark.parametrize("form", ["qweight", "weight_packed", "weight_scale"])
def test_a_quantised_head_is_not_judged(tmp_path: Path, form: str) -> None:
    write(tmp_path, {EMBED: table(), f"lm_head.{form}": table()}, LLAMA)
    report = audit(tmp_path)
    assert report.evidence.ties[0].state is None
    assert report.evidence.outcomes["transformers-5"][HEAD] is None
    assert codes(tmp_path) == []
