"""Checkpoints into models: every option, every disagreement of file and class, every damaged file."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bowline.errors import BowlineError, CheckpointError, ConfigError, NoCheckpointError, TieError, UsageError
from bowline.models.common.from_pretrained import LoadingInfo, live_name
from bowline.models.gpt2 import GPT2Config, GPT2LMHeadModel, GPT2Model
from bowline.nn import untie_weights

TINY: dict[str, Any] = {"vocab_size": 50, "n_positions": 20, "n_embd": 16, "n_layer": 2, "n_head": 4}
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
HEAD, TABLE = "lm_head.weight", "transformer.wte.weight"


@pytest.fixture
def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**TINY)).eval()


@pytest.fixture
def saved(model: GPT2LMHeadModel, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def same(one: Any, other: Any) -> bool:
    mine, his = one.state_dict(), other.state_dict()
    return mine.keys() == his.keys() and all(torch.equal(mine[name], his[name]) for name in mine)


def edit(place: Path, add: dict[str, torch.Tensor], remove: tuple[str, ...] = ()) -> None:
    """Write the file of weights anew without some tensors and with others."""
    state = {name: value for name, value in load_file(place / "model.safetensors").items() if name not in remove}
    save_file(state | add, place / "model.safetensors", {"format": "pt"})


def set_key(place: Path, **keys: Any) -> None:
    content = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(content | keys))


def test_a_whole_file_loads_in_eval_mode_and_nothing_is_drawn(saved: Path, model: GPT2LMHeadModel) -> None:
    before = torch.get_rng_state()
    loaded, info = GPT2LMHeadModel.from_pretrained(saved, output_loading_info=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert info == LoadingInfo(missing_keys=(), unexpected_keys=(), mismatched_keys=())
    assert info
    assert same(loaded, model)
    assert not loaded.training
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, torch.float32),
        ({"dtype": torch.bfloat16}, torch.bfloat16),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "torch.float16"}, torch.float16),
        ({"torch_dtype": "float64"}, torch.float64),
        ({"dtype": "auto"}, torch.bfloat16),
        ({"dtype": torch.float32, "torch_dtype": torch.float16}, torch.float32),
    ],
)
def test_the_dtype_is_what_is_asked_for(
    model: GPT2LMHeadModel, tmp_path: Path, options: dict[str, Any], expected: torch.dtype
) -> None:
    model.bfloat16().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path, **options)
    assert {parameter.dtype for parameter in loaded.parameters()} == {expected}
    assert torch.equal(loaded.lm_head.weight.float(), model.lm_head.weight.float())


@pytest.mark.parametrize("dtype", ["float99", "int64", torch.int8, 3])
def test_a_dtype_that_is_none_is_refused(saved: Path, dtype: Any) -> None:
    with pytest.raises(UsageError, match="expected a floating-point dtype"):
        GPT2LMHeadModel.from_pretrained(saved, dtype=dtype)


def test_overrides_change_the_config_by_any_name_and_typing_errors_are_refused(saved: Path) -> None:
    loaded = GPT2LMHeadModel.from_pretrained(saved, resid_pdrop=0.3, pad_token_id=7)
    assert (loaded.config.resid_pdrop, loaded.config.pad_token_id) == (0.3, 7)
    assert GPT2LMHeadModel.from_pretrained(saved, num_attention_heads=2).transformer.h[0].attn.heads == 2
    with pytest.raises(UsageError, match=r"output_loading_infos=True: GPT2Config has no such key"):
        GPT2LMHeadModel.from_pretrained(saved, output_loading_infos=True)


def test_a_config_that_is_given_stands_for_the_file_s_and_stays_as_it_is(saved: Path) -> None:
    config = GPT2Config(**TINY, attn_pdrop=0.5)
    (saved / "config.json").unlink()
    loaded = GPT2LMHeadModel.from_pretrained(saved, config=config)
    untie_weights(loaded)
    assert loaded.config.attn_pdrop == 0.5
    assert config.tie_word_embeddings is True


def test_a_device_is_where_the_model_is(saved: Path) -> None:
    loaded = GPT2LMHeadModel.from_pretrained(saved, device="meta")
    assert loaded.device.type == "meta"
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


# --- ties -------------------------------------------------------------------------------------------------------------


def test_a_file_with_two_different_ends_under_a_true_flag_is_refused_with_the_way_out(saved: Path) -> None:
    edit(saved, {HEAD: torch.ones(50, 16)})
    with pytest.raises(TieError, match=r"lm_head\.weight") as caught:
        GPT2LMHeadModel.from_pretrained(saved)
    assert "on_conflict" in str(caught.value.help)
    table = load_file(saved / "model.safetensors")[TABLE]
    kept = GPT2LMHeadModel.from_pretrained(saved, on_conflict="source")
    assert torch.equal(kept.lm_head.weight, table)
    kept = GPT2LMHeadModel.from_pretrained(saved, on_conflict="target")
    assert torch.equal(kept.transformer.wte.weight, torch.ones(50, 16))
    both = GPT2LMHeadModel.from_pretrained(saved, on_conflict="untie")
    assert torch.equal(both.lm_head.weight, torch.ones(50, 16))
    assert torch.equal(both.transformer.wte.weight, table)
    assert both.config.tie_word_embeddings is False


def test_a_file_with_two_equal_ends_is_tied(saved: Path, model: GPT2LMHeadModel) -> None:
    edit(saved, {HEAD: model.lm_head.weight.detach().clone()})
    loaded, info = GPT2LMHeadModel.from_pretrained(saved, output_loading_info=True)
    assert info
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


def test_a_file_that_holds_the_head_alone_gives_the_table(saved: Path, model: GPT2LMHeadModel) -> None:
    edit(saved, {HEAD: model.lm_head.weight.detach().clone()}, (TABLE,))
    loaded, info = GPT2LMHeadModel.from_pretrained(saved, output_loading_info=True)
    assert info
    assert same(loaded, model)


def test_an_untied_head_that_is_missing_is_drawn_reported_and_logged(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    set_key(saved, tie_word_embeddings=False)
    with caplog.at_level(logging.INFO, "bowline"):
        loaded, info = GPT2LMHeadModel.from_pretrained(saved, output_loading_info=True)
    assert info.missing_keys == (HEAD,)
    assert not info
    assert loaded.lm_head.weight is not loaded.transformer.wte.weight
    assert abs(loaded.lm_head.weight.std().item() / 0.02 - 1) < 5 / (2 * 50 * 16) ** 0.5
    assert loaded.lm_head.weight.requires_grad
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "newly initialised, because not in the file: lm_head.weight" in record.getMessage()


# --- names ------------------------------------------------------------------------------------------------------------


def test_what_is_missing_is_drawn_as_in_a_new_model_and_the_rest_is_the_file_s(
    saved: Path, model: GPT2LMHeadModel
) -> None:
    missing = ("transformer.h.1.mlp.c_proj.weight", "transformer.h.0.ln_1.weight", "transformer.h.0.attn.c_attn.bias")
    edit(saved, {}, missing)
    torch.manual_seed(3)
    loaded, info = GPT2LMHeadModel.from_pretrained(saved, output_loading_info=True)
    assert sorted(info.missing_keys) == sorted(missing)
    state, expected = loaded.state_dict(), model.state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected.keys() - set(missing))
    assert (state[missing[1]] == 1).all()
    assert not state[missing[2]].any()
    std = 0.02 / 2  # two layers: 1 / sqrt(2 * 2)
    assert abs(state[missing[0]].std().item() / std - 1) < 5 / (2 * state[missing[0]].numel()) ** 0.5
    torch.manual_seed(3)
    assert same(GPT2LMHeadModel.from_pretrained(saved), loaded)


def test_a_missing_table_of_a_tied_model_is_drawn_once_for_both_ends(saved: Path) -> None:
    edit(saved, {}, (TABLE,))
    loaded, info = GPT2LMHeadModel.from_pretrained(saved, output_loading_info=True)
    assert sorted(info.missing_keys) == [HEAD, TABLE]
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert abs(loaded.lm_head.weight.std().item() / 0.02 - 1) < 5 / (2 * 50 * 16) ** 0.5


def test_what_the_class_has_no_place_for_is_reported(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit(saved, {"score.weight": torch.zeros(2, 16)})
    with caplog.at_level(logging.INFO, "bowline"):
        _, info = GPT2LMHeadModel.from_pretrained(saved, output_loading_info=True)
    assert info.unexpected_keys == ("score.weight",)
    assert [record.levelno for record in caplog.records] == [logging.INFO]


def test_tensors_of_another_shape_are_refused_or_drawn(saved: Path, model: GPT2LMHeadModel) -> None:
    with pytest.raises(CheckpointError, match=r"1 tensor does not fit.*\(50, 16\) in the file and \(60, 16\)"):
        GPT2LMHeadModel.from_pretrained(saved, vocab_size=60)
    loaded, info = GPT2LMHeadModel.from_pretrained(
        saved, vocab_size=60, ignore_mismatched_sizes=True, output_loading_info=True
    )
    assert info.mismatched_keys == ((TABLE, (50, 16), (60, 16)),)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert loaded.lm_head.weight.shape == (60, 16)
    assert not loaded.lm_head.weight.is_meta
    assert torch.equal(loaded.transformer.wpe.weight, model.transformer.wpe.weight)


def test_two_tensors_of_one_name_are_refused(saved: Path) -> None:
    edit(saved, {"wte.weight": torch.zeros(50, 16)})
    with pytest.raises(CheckpointError, match=r"wte\.weight.*are both transformer\.wte\.weight"):
        GPT2LMHeadModel.from_pretrained(saved)


def test_names_are_found_with_the_prefix_without_it_and_by_their_old_spelling() -> None:
    headed = {"bert.encoder.LayerNorm.weight", "bert.encoder.bert.weight", "cls.bias"}
    assert live_name("encoder.LayerNorm.gamma", headed, "bert") == "bert.encoder.LayerNorm.weight"
    assert live_name("encoder.bert.weight", headed, "bert") == "bert.encoder.bert.weight"
    assert live_name("cls.bias", headed, "bert") == "cls.bias"
    base = {"encoder.LayerNorm.bias", "bertha.weight"}
    assert live_name("bert.encoder.LayerNorm.beta", base, "bert") == "encoder.LayerNorm.bias"
    assert live_name("bertha.weight", base, "bert") == "bertha.weight"
    assert live_name("of.no.use", base, "bert") == "of.no.use"


def test_a_head_loads_into_a_class_without_one_and_the_head_is_left(tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(**TINY, tie_word_embeddings=False))
    model.save_pretrained(tmp_path)
    base, info = GPT2Model.from_pretrained(tmp_path, output_loading_info=True)
    assert info.unexpected_keys == (HEAD,)
    assert same(base, model.transformer)


# --- files ------------------------------------------------------------------------------------------------------------


def test_shards_and_pickles_load_alike(saved: Path, model: GPT2LMHeadModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert same(GPT2LMHeadModel.from_pretrained(tmp_path / "shards"), model)
    (tmp_path / "pickle").mkdir()
    shutil.copy(saved / "config.json", tmp_path / "pickle")
    torch.save(model.state_dict(), tmp_path / "pickle" / "pytorch_model.bin")
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "pickle")
    assert same(loaded, model)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert same(GPT2LMHeadModel.from_pretrained(saved / "model.safetensors"), model)


def test_a_lost_shard_is_named(model: GPT2LMHeadModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    lost = min(tmp_path.glob("*.safetensors"))
    lost.unlink()
    with pytest.raises(CheckpointError, match=lost.name):
        GPT2LMHeadModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("left", [0, 4, 100, 5000, -1])
def test_a_truncated_file_is_refused(saved: Path, left: int) -> None:
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        GPT2LMHeadModel.from_pretrained(saved)


def test_another_family_s_checkpoint_is_refused_by_name(saved: Path) -> None:
    set_key(saved, model_type="bert")
    with pytest.raises(ConfigError, match=r"is a 'bert', expected 'gpt2' for GPT2LMHeadModel"):
        GPT2LMHeadModel.from_pretrained(saved)


def test_a_place_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError):
        GPT2LMHeadModel.from_pretrained(tmp_path)
    with pytest.raises(BowlineError):
        GPT2LMHeadModel.from_pretrained(tmp_path / "not" / "there" / "at" / "all")


def test_a_model_may_be_saved_over_the_file_that_it_was_loaded_from(saved: Path) -> None:
    loaded = GPT2LMHeadModel.from_pretrained(saved)
    with torch.no_grad():
        loaded.transformer.wte.weight.add_(1.0)
    expected = {name: value.clone() for name, value in loaded.state_dict().items()}
    loaded.save_pretrained(saved)
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    again = GPT2LMHeadModel.from_pretrained(saved)
    assert same(again, loaded)


def test_what_was_loaded_can_be_trained(saved: Path, model: GPT2LMHeadModel) -> None:
    file = (saved / "model.safetensors").read_bytes()
    loaded = GPT2LMHeadModel.from_pretrained(saved)
    loss = loaded(IDS, labels=IDS).loss
    loss.backward()
    torch.optim.SGD(loaded.parameters(), lr=0.05).step()
    assert loaded(IDS, labels=IDS).loss < loss
    assert not same(loaded, model)
    assert (saved / "model.safetensors").read_bytes() == file
