"""From text to a directory: the run, what it saves, and what it refuses."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bowline.auditing import audit
from bowline.errors import CheckpointError, ConfigError, UsageError
from bowline.models import BertForMaskedLM, GPT2Config, GPT2LMHeadModel, Tokenizer, load
from bowline.models.text_generation import filled_text, text_pieces
from bowline.train.model_building import batches_for, model_for
from bowline.train.presets import NO_DROPOUT
from bowline.train.text.tokenizer_training import TextTokenizer
from bowline.train.train_config import TrainConfig
from bowline.train.training_run import Plan, Text, TrainedRun, prepare, train
from tests.train.texts import library

TINY: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2},
    "bert": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
    "t5": {"d_model": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8, "d_ff": 32},
    "lstm": {"hidden_size": 16, "num_layers": 1},
}
FAMILIES = tuple(TINY)
CODE = "def push(self, x):\n    return [x for x in self]\n"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(library(tmp_path_factory.mktemp("text") / "library"))


def tiny(family: str, data: str, **options: Any) -> TrainConfig:
    usual: dict[str, Any] = {"steps": 6, "length": 32, "batch_size": 2, "vocab_size": 400, "learning_rate": 1e-2}
    usual |= {"save_every": 2, "evaluate_every": 3, "log_every": 1, "held_out_tokens": 256, "model": TINY[family]}
    usual |= {"held_out_share": 0.2}
    return TrainConfig(family=family, data=(data,), **{**usual, **options})


@pytest.fixture(scope="module")
def texts(data: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Text]:
    """The text of each family, ready."""
    place = tmp_path_factory.mktemp("prepared")
    return {family: prepare(tiny(family, data), place / family) for family in FAMILIES}


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def config_of(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return content


# --- what it saves ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_directory_loads_everywhere_and_its_audit_is_clean(
    family: str, tie: bool, data: str, tmp_path: Path, quiet_transformers: None
) -> None:
    plans: list[Plan] = []
    outcome = train(tiny(family, data, tie=tie), tmp_path / "out", on_plan=plans.append)
    place = outcome.directory
    assert outcome.result.step == 6
    assert math.isfinite(outcome.perplexity)
    assert config_of(place)["tie_word_embeddings"] is tie
    assert ("in the tied matrix" in str(plans[0].lines)) is tie
    assert audit(place).clean
    ids = torch.tensor([Tokenizer.from_pretrained(place).encode(CODE)])
    ours = load(place)
    others: dict[str, torch.Tensor] = {"decoder_input_ids": ids} if family == "t5" else {}
    assert torch.equal(ours(ids, **others).logits, plans[0].model(ids, **others).logits)
    if family != "lstm":
        import transformers

        auto = {"gpt2": "CausalLM", "bert": "MaskedLM", "t5": "Seq2SeqLM"}[family]
        theirs = getattr(transformers, f"AutoModelFor{auto}").from_pretrained(place).eval()
        torch.testing.assert_close(theirs(ids, **others).logits, ours(ids, **others).logits)
    assert transformers_ids(place) == ids[0].tolist()
    if family in ("gpt2", "lstm"):  # drawn as the directory says, in transformers too
        texts = {"".join(text_pieces(place, "def ", max_new_tokens=20, seed=seed)) for seed in (1, 1, 2)}
        assert len(texts) == 2
    if family == "gpt2":
        stated = theirs.generation_config
        assert (stated.do_sample, stated.temperature, stated.top_k) == (True, 0.7, 40)
        assert stated.eos_token_id == theirs.config.eos_token_id is not None  # or a text would not end there
    if family == "bert":
        assert len(filled_text(place, "def [MASK](self)")[0].candidates) == 5
    else:
        assert "".join(text_pieces(place, "def ", max_new_tokens=4)) is not None


def transformers_ids(place: Path) -> list[int]:
    from transformers import AutoTokenizer

    ids: list[int] = AutoTokenizer.from_pretrained(place)(CODE)["input_ids"]
    return ids


def test_a_head_that_is_untied_on_the_way_is_saved_as_its_own(data: str, tmp_path: Path) -> None:
    outcome = train(tiny("gpt2", data, untie_at_step=3), tmp_path / "out")
    assert [record["tie"] for record in outcome.result.history] == ["tied"] * 3 + ["untied"] * 3
    assert config_of(outcome.directory)["tie_word_embeddings"] is False
    saved = weights(outcome.directory)
    assert not torch.equal(saved["lm_head.weight"], saved["transformer.wte.weight"])


SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 2},
    "bert": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128},
    "t5": {"d_model": 32, "num_layers": 1, "num_heads": 2, "d_kv": 16, "d_ff": 64},
    "lstm": {"hidden_size": 32},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_held_out_loss_falls_below_that_of_how_often_tokens_come(family: str, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for number in range(40):
        turns = [(7 * number + turn) % 13 for turn in range(60)]
        text = "".join(f"def knot{at}(self, rope):\n    return rope.slip({at})\n" for at in turns)
        (tmp_path / "text" / f"{number}.txt").write_text(text)
    steps = {"bert": 350, "lstm": 150}.get(family, 60)
    model = {**NO_DROPOUT[family], **SIZES[family]}
    config = tiny(
        family, str(tmp_path / "text"), steps=steps, log_every=400, save_every=400, evaluate_every=400, batch_size=8,
        learning_rate=3e-3 if family == "bert" else 1e-2, vocab_size=None, model=model,
    )  # fmt: skip
    outcome = train(config, tmp_path / "out")
    counts = np.bincount(prepare(config, outcome.directory).packed.held_out)
    shares = counts[counts > 0] / counts.sum()
    assert outcome.result.held_out_loss is not None
    assert outcome.result.held_out_loss < float(-(shares * np.log(shares)).sum()) - 0.1


# --- a run that goes on -----------------------------------------------------------------------------------------------


def stopped(config: TrainConfig, out: Path, step: int) -> None:
    """The run up to a step, ended as a kill would."""

    def stop(at: int) -> None:
        if at == step:
            raise MemoryError("killed")

    with pytest.raises(MemoryError):
        train(config, out, on_step=stop)


@pytest.mark.parametrize("family", ["gpt2", "bert", "t5"])
def test_a_run_that_was_stopped_gives_the_weights_of_one_that_was_not(family: str, data: str, tmp_path: Path) -> None:
    model = {**TINY[family], "dropout_rate" if family == "t5" else "initializer_range": 0.1}
    config = tiny(family, data, model=model)
    whole = train(config, tmp_path / "whole")
    stopped(config, tmp_path / "parts", 5)
    assert not (tmp_path / "parts" / "model.safetensors").exists()
    parts = train(config, tmp_path / "parts", resume=True)
    one, other = weights(whole.directory), weights(parts.directory)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert whole.result.held_out_loss == parts.result.held_out_loss


def test_a_run_is_not_begun_over_another_and_goes_on_only_as_it_began(data: str, tmp_path: Path) -> None:
    out, config = tmp_path / "out", tiny("gpt2", data)
    stopped(config, out, 5)
    with pytest.raises(UsageError, match=r"already holds a run .*--resume continues it"):
        train(config, out)
    other = tiny("gpt2", data, learning_rate=1e-3, seed=3, save_every=1)
    with pytest.raises(
        UsageError, match=r"holds a run with other settings: learning_rate was 0\.01 and is 0\.001; seed was 0"
    ):
        train(other, out, resume=True)


def test_a_text_that_has_changed_since_is_told(data: str, tmp_path: Path) -> None:
    text = tmp_path / "text"
    library(text)
    config, out = tiny("gpt2", str(text)), tmp_path / "out"
    stopped(config, out, 5)
    (text / "abc.py").write_text("another text\n")
    with pytest.raises(UsageError, match="the text in it has changed"):
        train(config, out, resume=True)


def test_a_run_that_failed_before_its_first_checkpoint_can_be_begun_anew(data: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UsageError, match=r"length=\d+: expected a (held-out )?text of at least one window"):
        train(tiny("gpt2", data, length=30_000), out)
    assert train(tiny("gpt2", data), out).result.step == 6


def test_a_model_that_was_trained_is_not_overwritten_where_its_checkpoints_are_gone(data: str, tmp_path: Path) -> None:
    out, config = tmp_path / "out", tiny("gpt2", data)
    train(config, out)
    shutil.rmtree(out / "checkpoints")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for resume in (False, True):
        with pytest.raises(UsageError, match=r"already holds a trained model, and no checkpoint .*--init-from"):
            train(tiny("gpt2", data, seed=5), out, resume=resume)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_run_in_the_directory_of_one_that_has_no_checkpoint_yet_changes_nothing(
    resume: bool, data: str, tmp_path: Path
) -> None:
    out, seen = tmp_path / "out", []

    def another(step: int) -> None:
        before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        with pytest.raises(UsageError, match="another process is training in this directory"):
            train(tiny("gpt2", data, seed=9, vocab_size=300), out, resume=resume)
        seen.append({path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before)

    train(tiny("gpt2", data, steps=2, save_every=100), out, on_step=another)
    assert seen == [True, True]


def test_what_a_run_writes_is_none_of_its_text(data: str, tmp_path: Path) -> None:
    text = library(tmp_path / "text")
    config, out = tiny("gpt2", str(text)), text / "run"
    stopped(config, out, 5)
    inside, outside = train(config, out, resume=True), train(tiny("gpt2", data), tmp_path / "elsewhere")
    assert inside.result.loss == outside.result.loss


def test_a_disk_without_room_for_the_model_leaves_the_checkpoint_that_has_it(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: TextTokenizer, directory: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory / "tokenizer.json"))

    out, save = tmp_path / "out", TextTokenizer.save
    monkeypatch.setattr(TextTokenizer, "save", lambda self, at: full(self, at) if at == out else save(self, at))
    with pytest.raises(CheckpointError, match=r"No space left on device.*step-00000006 is complete .*--resume"):
        train(tiny("gpt2", data), out)
    monkeypatch.undo()
    assert train(tiny("gpt2", data), out, resume=True).result.step == 6
    assert (out / "model.safetensors").exists()


def test_resuming_where_nothing_is_begins(data: str, tmp_path: Path) -> None:
    assert train(tiny("gpt2", data), tmp_path / "new", resume=True).result.step == 6


@pytest.mark.parametrize("resume", [False, True])
def test_a_directory_of_something_else_is_refused_and_untouched(resume: bool, data: str, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match=r"expected a new or empty directory, got one that holds thesis\.tex"):
        train(tiny("gpt2", data), tmp_path, resume=resume)
    with pytest.raises(UsageError, match="is not a directory"):
        train(tiny("gpt2", data), tmp_path / "thesis.tex", resume=resume)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("there", [False, True], ids=["new", "empty"])
def test_an_error_before_anything_was_made_leaves_nothing(there: bool, data: str, tmp_path: Path) -> None:
    out = tmp_path / "runs" / "out"
    if there:
        out.mkdir(parents=True)
    GPT2LMHeadModel(GPT2Config(vocab_size=300, **TINY["gpt2"])).save_pretrained(tmp_path / "bare")
    before = sorted(tmp_path.rglob("*"))
    for wrong, said in (
        ({"vocab_size": 30_000}, "vocab"),
        ({"vocab_size": None, "init_from": str(tmp_path / "bare"), "model": {}}, "no tokenizer"),
    ):
        with pytest.raises(UsageError, match=said):
            train(tiny("gpt2", data, **wrong), out)
        assert sorted(tmp_path.rglob("*")) == before


def test_where_there_is_nothing_to_go_on_with_a_resumed_run_says_that_it_begins(data: str, tmp_path: Path) -> None:
    said: list[str] = []
    train(tiny("gpt2", data), tmp_path / "out", resume=True, say=said.append)
    assert said[0] == f"{tmp_path / 'out'}: no checkpoint to resume from, so a new run starts"
    said.clear()
    train(tiny("gpt2", data), tmp_path / "out", resume=True, say=said.append)
    assert not any("new run" in line for line in said)


# --- text -------------------------------------------------------------------------------------------------------------


def test_the_tokenizer_has_not_seen_what_is_held_out(tmp_path: Path) -> None:
    place = library(tmp_path / "text")
    for at in range(60):  # in the order of hashes some of them are held out
        (place / f"{at}.txt").write_text(f"zyxwv{at} qqqqq{at}\n" * 40)
    text = prepare(tiny("gpt2", str(place), held_out_share=0.3), tmp_path / "ready")
    row = text.packed.held_out
    held_out = {at for at in range(60) if f"zyxwv{at} " in text.tokenizer.backend.decode(row.tolist())}
    vocabulary = text.tokenizer.backend.get_vocab()
    assert held_out
    assert not any(f"zyxwv{at}" in token for at in held_out for token in vocabulary)


def test_a_vocabulary_that_was_asked_for_is_had_or_refused(data: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"vocab_size=60000: the text is enough for only \d+ tokens"):
        train(tiny("gpt2", data, vocab_size=60_000), tmp_path / "out")
    usual = prepare(tiny("gpt2", data, vocab_size=None), tmp_path / "ready")
    assert 1000 < len(usual.tokenizer) <= 4096


def test_text_is_prepared_once_and_shared(data: str, tmp_path: Path) -> None:
    said: list[str] = []
    first = prepare(tiny("gpt2", data), tmp_path, say=said.append)
    assert any("training a tokenizer" in line for line in said)
    said.clear()
    again = prepare(tiny("lstm", data, seed=4, learning_rate=1e-4), tmp_path, say=said.append)
    assert not any("training a tokenizer" in line for line in said)
    assert again.packed.fingerprint == first.packed.fingerprint


# --- the model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "lstm"])
def test_a_bias_begins_at_how_often_each_token_stands_in_the_text(
    family: str, data: str, texts: dict[str, Text]
) -> None:
    text = texts[family]
    model = model_for(tiny(family, data, head_bias="unigram"), text.tokenizer, text.packed)
    head = model.get_output_embeddings()
    assert head is not None
    counts = Counter(text.packed.train.tolist())
    expected = [math.log((counts[at] + 1) / (len(text.packed.train) + 400)) for at in range(400)]
    np.testing.assert_allclose(head.bias.detach().numpy(), expected, rtol=1e-5)  # type: ignore[operator]


def test_a_nano_bert_begins_at_how_often_tokens_come_unless_something_else_gives_its_weights(
    data: str, texts: dict[str, Text]
) -> None:
    def begins_at_zero(**options: Any) -> bool:
        model = model_for(tiny("bert", data, **options), texts["bert"].tokenizer, texts["bert"].packed)
        head = model.get_output_embeddings()
        return not head.bias.any()  # type: ignore[operator,union-attr]

    assert not begins_at_zero()
    assert begins_at_zero(head_bias="zero")
    assert begins_at_zero(recipe="transformers-bert")
    assert not begins_at_zero(recipe="transformers-bert", head_bias="unigram")


def test_a_nano_t5_has_a_faster_table_unless_something_else_gives_its_weights(data: str) -> None:
    assert tiny("t5", data).settings().embedding_rate == pytest.approx(192**0.5)
    assert tiny("t5", data, recipe="t5x").settings().embedding_rate == 1.0
    assert tiny("t5", data, tie=False).settings().embedding_rate == 1.0  # drawn by t5-mesh
    assert tiny("t5", data, recipe="t5x", embedding_rate=2.0).settings().embedding_rate == 2.0
    assert tiny("t5", data, init_from="a", model={}, vocab_size=None).settings().embedding_rate == 1.0


def test_a_head_that_was_built_without_a_bias_cannot_begin_at_one(data: str, texts: dict[str, Text]) -> None:
    config = tiny("lstm", data, head_bias="unigram", model={**TINY["lstm"], "head_bias": False})
    with pytest.raises(UsageError, match="the head of this LSTMLMHeadModel has no bias"):
        model_for(config, texts["lstm"].tokenizer, texts["lstm"].packed)


def test_a_recipe_draws_the_model_and_a_seed_draws_it_again(data: str, texts: dict[str, Text]) -> None:
    def table(**options: Any) -> torch.Tensor:
        model = model_for(tiny("gpt2", data, **options), texts["gpt2"].tokenizer, texts["gpt2"].packed)
        return model.get_input_embeddings().weight.detach()  # type: ignore[operator]

    assert torch.equal(table(seed=1), table(seed=1))
    assert not torch.equal(table(seed=1), table(seed=2))
    assert abs(float(table().std()) - 0.05) < 0.005  # the nano size's own
    assert abs(float(table(recipe="transformers-gpt2").std()) - 0.02) < 0.002
    assert abs(float(table(recipe="vaswani").std()) - 16**-0.5) < 0.02
    before = torch.random.get_rng_state()
    table()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_t5_with_a_head_of_its_own_does_not_begin_far_above_the_uniform_loss(
    data: str, texts: dict[str, Text]
) -> None:
    config = tiny("t5", data, tie=False)
    assert config.drawn_by == "t5-mesh"
    model = model_for(config, texts["t5"].tokenizer, texts["t5"].packed)
    batch = batches_for(config, texts["t5"].tokenizer, texts["t5"].packed).at(0)
    with torch.no_grad():
        assert float(model(**batch).loss) < math.log(400) + 1


def test_a_masked_padding_row_stays_as_it_was(data: str, tmp_path: Path) -> None:
    rows = {}
    for policy in ("keep", "mask"):
        outcome = train(tiny("bert", data, pad_logit=policy), tmp_path / policy)
        rows[policy] = weights(outcome.directory)["bert.embeddings.word_embeddings.weight"][0]
    assert rows["keep"].abs().max() > 0
    assert rows["mask"].abs().max() == 0


def test_a_checkpoint_is_fine_tuned_with_its_own_tokenizer(data: str, tmp_path: Path) -> None:
    first = train(tiny("gpt2", data), tmp_path / "first")
    options: dict[str, Any] = {"init_from": str(first.directory), "model": {}, "vocab_size": None}
    records: list[Mapping[str, Any]] = []
    second = train(tiny("gpt2", data, **options), tmp_path / "second", log=records.append)
    assert (second.directory / "tokenizer.json").read_bytes() == (first.directory / "tokenizer.json").read_bytes()
    assert records[0]["loss"] < first.result.history[0]["loss"] - 0.1
    untied = train(tiny("gpt2", data, tie=False, **options), tmp_path / "untied")
    assert config_of(untied.directory)["tie_word_embeddings"] is False
    with pytest.raises(ConfigError, match="expected a checkpoint of the family bert, got one of gpt2"):
        model_for(tiny("bert", data, **options), text_of(first).tokenizer, text_of(first).packed)
    with pytest.raises(UsageError, match="length=64: expected at most 32, the number of positions"):
        train(tiny("gpt2", data, length=64, **options), tmp_path / "long")


def text_of(outcome: TrainedRun) -> Text:
    config = json.loads((outcome.directory / "run.json").read_text())["config"]
    return prepare(TrainConfig.from_dict(config), outcome.directory)


def test_a_checkpoint_that_is_not_there_is_an_error(data: str, tmp_path: Path) -> None:
    config = tiny("gpt2", data, init_from=str(tmp_path / "nowhere"), model={}, vocab_size=None)
    with pytest.raises((CheckpointError, UsageError)):
        train(config, tmp_path / "out")


def test_a_head_that_is_untied_already_cannot_be_untied_at_a_step(data: str, tmp_path: Path) -> None:
    train(tiny("gpt2", data, tie=False), tmp_path / "untied")
    options: dict[str, Any] = {"init_from": str(tmp_path / "untied"), "vocab_size": None, "model": {}}
    with pytest.raises(UsageError, match=r"untie_at_step=3: the head of .* has its own matrix already"):
        train(tiny("gpt2", data, untie_at_step=3, **options), tmp_path / "again")


def test_where_nothing_can_be_computed_is_no_device(data: str, texts: dict[str, Text]) -> None:
    with pytest.raises(UsageError, match="device='meta': tensors on this device have no values"):
        model_for(tiny("gpt2", data, device="meta"), texts["gpt2"].tokenizer, texts["gpt2"].packed)


def test_a_key_that_the_model_does_not_have_is_an_error(data: str, texts: dict[str, Text]) -> None:
    for model, said in (({"n_embed": 16}, "perhaps n_embd"), ({"vocab_size": 9}, "vocab_size cannot be set here")):
        with pytest.raises(UsageError, match=said):
            model_for(tiny("gpt2", data, model=model), texts["gpt2"].tokenizer, texts["gpt2"].packed)


@pytest.mark.parametrize(
    ("model", "message"),
    [({"n_embd": 0}, "n_embd"), ({"n_ebd": 16}, "n_ebd"), ({"n_positions": 8}, "length=32: expected at most 8")],
)
def test_what_is_wrong_with_the_model_is_said_before_any_text_is_read(
    model: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises((UsageError, ConfigError), match=message):
        train(tiny("gpt2", str(tmp_path / "no text"), model=model), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_widest_batches_fit_the_positions_of_the_model(data: str, texts: dict[str, Text]) -> None:
    for family in FAMILIES:
        config = tiny(family, data, length=64)
        model = model_for(config, texts[family].tokenizer, texts[family].packed)
        batches = batches_for(config, texts[family].tokenizer, texts[family].packed)
        assert torch.isfinite(model(**batches.at(0)).loss)
        assert isinstance(model, BertForMaskedLM) is (family == "bert")
