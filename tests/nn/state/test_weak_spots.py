"""Where transformers loses trained numbers, seen to lose them; and Bowline's way with the same model: they stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from tools.tiny import VOCABULARY, build, load_class, tiny_config

from bowline.auditing import Severity, audit
from bowline.errors import TieError
from bowline.nn import load_checkpoint, save_checkpoint, tie_weights, untie_weights
from bowline.nn.config.live_config import set_flag
from tests.nn.state.snapshots import snapshot

pytestmark = pytest.mark.usefixtures("quiet_transformers")

IDS = torch.arange(14).reshape(2, 7) + 100


def made(name: str, *, flag: bool) -> Any:
    cls = load_class(name)
    config = tiny_config(cls)
    config.tie_word_embeddings = flag
    return build(cls, config)


def logits(model: Any) -> torch.Tensor:
    more = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        answer: torch.Tensor = model(input_ids=IDS, **more).logits
    return answer


def head(model: Any) -> torch.Tensor:
    weight: torch.Tensor = model.get_output_embeddings().weight
    return weight


def embedding(model: Any) -> torch.Tensor:
    weight: torch.Tensor = model.get_input_embeddings().weight
    return weight


def is_tied(model: Any) -> bool:
    return head(model) is embedding(model)


def flag_in(directory: Path) -> bool:
    return bool(json.loads((directory / "config.json").read_text())["tie_word_embeddings"])


def again(model: Any, directory: Path, **options: Any) -> Any:
    return type(model).from_pretrained(directory, **options).eval()


def problems(directory: Path) -> list[str]:
    return [finding.code for finding in audit(directory).findings if finding.severity is not Severity.INFO]


@pytest.fixture
def diverged(tmp_path: Path) -> Path:
    """A GPT-2 whose head was trained apart, and whose config still says that it is tied."""
    model = made("GPT2LMHeadModel", flag=False)
    model.config.tie_word_embeddings = True
    model.save_pretrained(tmp_path / "diverged")
    return tmp_path / "diverged"


def gpt2(directory: Path) -> Any:
    return load_class("GPT2LMHeadModel").from_pretrained(directory).eval()


# --- a trained head and a flag that says there is none ----------------------------------------------------------------


def test_one_element_is_enough_to_untie_and_the_flag_goes_on_saying_tied(tmp_path: Path) -> None:
    model = made("GPT2LMHeadModel", flag=True)
    untie_weights(model)
    set_flag(model, True)
    with torch.no_grad():
        embedding(model)[3, 4] = 0.0
        head(model)[3, 4] = 1e-10
    model.save_pretrained(tmp_path / "theirs")
    loaded = again(model, tmp_path / "theirs")
    assert not is_tied(loaded)
    assert loaded.config.tie_word_embeddings is True
    loaded.save_pretrained(tmp_path / "later")
    assert flag_in(tmp_path / "later"), "and so does every save after it"
    assert "BW101" in problems(tmp_path / "later")

    save_checkpoint(loaded, tmp_path / "ours")
    assert not flag_in(tmp_path / "ours")
    assert problems(tmp_path / "ours") == []
    last = again(model, tmp_path / "ours")
    assert last.config.tie_word_embeddings is False
    assert torch.equal(head(last), head(model))
    assert torch.equal(embedding(last), embedding(model))

    blank = made("GPT2LMHeadModel", flag=True)
    with pytest.raises(TieError, match="1 of 1031 rows differ, by at most 1e-10"):
        load_checkpoint(blank, tmp_path / "theirs")
    load_checkpoint(blank, tmp_path / "theirs", on_conflict="untie")
    assert torch.equal(head(blank), head(model))
    assert blank.config.tie_word_embeddings is False


def test_tie_weights_destroys_the_trained_head(diverged: Path) -> None:
    theirs, ours = gpt2(diverged), gpt2(diverged)
    trained = head(theirs).detach().clone()
    theirs.tie_weights()
    assert is_tied(theirs)
    assert not torch.equal(head(theirs), trained)

    before = logits(ours)
    with pytest.raises(TieError, match="the two ends hold different values"):
        tie_weights(ours)
    assert torch.equal(logits(ours), before)
    tie_weights(ours, on_conflict="target")
    assert is_tied(ours)
    assert torch.equal(head(ours), trained), "given up is the end that was named"


def test_a_model_that_bowline_loaded_has_nothing_for_tie_weights_to_destroy(diverged: Path) -> None:
    model = made("GPT2LMHeadModel", flag=True)
    load_checkpoint(model, diverged, on_conflict="untie")
    before = logits(model)
    assert torch.equal(before, logits(gpt2(diverged)))
    model.tie_weights()
    assert torch.equal(logits(model), before)


def test_a_resize_destroys_the_trained_head(diverged: Path) -> None:
    from bowline.nn.vocabulary.resize import resize_vocab

    theirs, ours = gpt2(diverged), gpt2(diverged)
    trained, before = head(theirs).detach().clone(), logits(theirs)
    theirs.resize_token_embeddings(VOCABULARY + 9)
    assert is_tied(theirs)
    assert not torch.equal(head(theirs)[:VOCABULARY], trained)

    resize_vocab(ours, VOCABULARY + 9)
    assert not is_tied(ours)
    assert torch.equal(head(ours)[:VOCABULARY], trained)
    torch.testing.assert_close(logits(ours)[..., :VOCABULARY], before)
    save_checkpoint(ours, diverged)
    assert torch.equal(logits(gpt2(diverged)), logits(ours))


# --- a tied head and a flag that says it is not -----------------------------------------------------------------------


def test_flag_false_and_tied_loses_the_head(tmp_path: Path) -> None:
    model = made("GPT2LMHeadModel", flag=True)
    model.config.tie_word_embeddings = False
    before = logits(model)
    model.save_pretrained(tmp_path / "theirs")
    loaded = again(model, tmp_path / "theirs")
    assert not torch.equal(head(loaded), head(model)), "drawn at random"
    assert not torch.allclose(logits(loaded), before)
    with pytest.raises(TieError, match=r"lm_head\.weight: not in the state"):
        load_checkpoint(made("GPT2LMHeadModel", flag=False), tmp_path / "theirs")

    save_checkpoint(model, tmp_path / "ours")
    assert flag_in(tmp_path / "ours"), "as the tensors are"
    assert model.config.tie_word_embeddings is False, "the live config is its owner's"
    assert torch.equal(logits(again(model, tmp_path / "ours")), before)


def test_overriding_the_flag_gives_a_random_head_and_a_bias_of_zeros(tmp_path: Path) -> None:
    model = made("BertForMaskedLM", flag=True)
    before = logits(model)
    save_checkpoint(model, tmp_path / "tied")
    theirs = again(model, tmp_path / "tied", tie_word_embeddings=False)
    assert not torch.allclose(head(theirs), head(model))
    assert model.cls.predictions.bias.abs().max() > 0.1
    assert (theirs.get_output_embeddings().bias == 0).all()
    assert not torch.allclose(logits(theirs), before)

    ours = again(model, tmp_path / "tied")
    untie_weights(ours)
    assert not is_tied(ours)
    assert torch.equal(logits(ours), before)
    save_checkpoint(ours, tmp_path / "untied")
    loaded = again(model, tmp_path / "untied")
    assert not is_tied(loaded)
    assert torch.equal(logits(loaded), before)
    assert problems(tmp_path / "untied") == []


# --- T5 ---------------------------------------------------------------------------------------------------------------


def test_a_t5_v1_1_is_saved_again_as_what_it_is_not(tmp_path: Path) -> None:
    model = made("T5ForConditionalGeneration", flag=True)
    model.config.scale_decoder_outputs = False
    untie_weights(model)
    with torch.no_grad():
        head(model).mul_(3.0)
    save_checkpoint(model, tmp_path / "v1.1")
    assert not flag_in(tmp_path / "v1.1")
    assert problems(tmp_path / "v1.1") == []

    loaded = again(model, tmp_path / "v1.1")
    assert torch.equal(logits(loaded), logits(model))
    loaded.save_pretrained(tmp_path / "theirs")
    said = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert (said["tie_word_embeddings"], said["scale_decoder_outputs"]) == (True, False)
    assert problems(tmp_path / "theirs") != [], "transformers 4 ties it, and scales"

    save_checkpoint(loaded, tmp_path / "ours")
    said = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert (said["tie_word_embeddings"], said["scale_decoder_outputs"]) == (False, False)
    assert problems(tmp_path / "ours") == []
    assert torch.equal(logits(again(model, tmp_path / "ours")), logits(model))


def test_a_t5_v1_0_that_is_untied_takes_its_scale_along(tmp_path: Path) -> None:
    model = made("T5ForConditionalGeneration", flag=True)
    before = logits(model)
    untie_weights(model)
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)
    save_checkpoint(model, tmp_path)
    assert not flag_in(tmp_path)
    assert torch.equal(logits(again(model, tmp_path)), logits(model))
    assert problems(tmp_path) == []


def test_a_head_that_was_trained_apart_where_the_flag_also_scales_is_not_scaled_away(tmp_path: Path) -> None:
    model = made("SwitchTransformersForConditionalGeneration", flag=True)
    trained = torch.nn.Parameter(head(model).detach() * 2)
    model.lm_head.weight = trained
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(again(model, tmp_path)), logits(model)), "untied and scaled, as it was"
    blank = made("SwitchTransformersForConditionalGeneration", flag=True)
    untouched = snapshot(blank)
    try:
        load_checkpoint(blank, tmp_path, on_conflict="untie")
    except TieError:  # no config says both
        assert snapshot(blank) == untouched
    else:
        torch.testing.assert_close(logits(blank), logits(model))
