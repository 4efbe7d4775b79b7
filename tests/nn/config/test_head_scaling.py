"""T5's relatives, where the flag (or a key that follows it) also scales the head's input by d_model^-1/2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tools.tiny import build, load_class, tiny_config

from bowline.auditing import Severity, audit
from bowline.errors import TieError
from bowline.families.quirks import ScaledBy
from bowline.models.t5 import T5Config
from bowline.nn import save_checkpoint, tie_weights, untie_weights
from bowline.nn.config.live_config import scaled_by

IDS = torch.arange(14).reshape(2, 7) + 3
SCALED = ["T5ForConditionalGeneration", "SwitchTransformersForConditionalGeneration", "LongT5ForConditionalGeneration"]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS, decoder_input_ids=IDS).logits
    return found


def unscaled_config(cls: Any) -> Any:
    """What transformers 5 makes of a T5 v1.1's `tie_word_embeddings: false`: a true flag, and no scale."""
    stated = {key: value for key, value in tiny_config(cls).to_dict().items() if key != "scale_decoder_outputs"}
    return cls.config_class.from_dict({**stated, "tie_word_embeddings": False})


@pytest.mark.parametrize("name", SCALED)
def test_an_untied_head_carries_the_scale_and_gives_it_back_when_tied_again(name: str) -> None:
    model = build(load_class(name))
    before = logits(model)
    untie_weights(model)
    assert torch.allclose(model.lm_head.weight, model.shared.weight * model.config.d_model**-0.5)
    assert torch.allclose(logits(model), before, atol=1e-7)
    tie_weights(model)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("name", SCALED)
def test_transformers_loads_the_untied_model_as_it_is(name: str, tmp_path: Path) -> None:
    model = build(load_class(name))
    untie_weights(model)
    with torch.no_grad():
        model.lm_head.weight[5] += 1
    save_checkpoint(model, tmp_path / "untied")
    loaded = type(model).from_pretrained(tmp_path / "untied").eval()
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert torch.equal(logits(loaded), logits(model))


def test_equal_ends_are_a_conflict_where_the_tie_would_bring_a_scale() -> None:
    model = build(load_class("SwitchTransformersForConditionalGeneration"))
    untie_weights(model)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.shared.weight)
    before = logits(model)
    with pytest.raises(TieError, match=r"would multiply the head's input by 0\.177"):
        tie_weights(model)
    assert torch.equal(logits(model), before)


def test_a_model_that_scales_as_no_flag_would_is_not_saved(tmp_path: Path) -> None:
    model = build(load_class("SwitchTransformersForConditionalGeneration"))
    model.config.tie_word_embeddings = False  # tied, and no longer scaled
    with pytest.raises(TieError, match="one flag decides both, so no config describes this model"):
        save_checkpoint(model, tmp_path / "never")
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "LongT5ForConditionalGeneration"])
def test_a_tied_head_without_the_scale_is_saved_where_the_config_has_a_key_for_the_scale(
    name: str, tmp_path: Path
) -> None:
    model = build(load_class(name), unscaled_config(load_class(name)))
    assert model.lm_head.weight is model.shared.weight
    save_checkpoint(model, tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    assert (said["tie_word_embeddings"], said["scale_decoder_outputs"]) == (True, False)
    assert torch.equal(logits(type(model).from_pretrained(tmp_path).eval()), logits(model))
    problems = [finding.code for finding in audit(tmp_path).findings if finding.severity is not Severity.INFO]
    assert problems == ["BW109"], "transformers 4 would scale"


@pytest.mark.parametrize("version", ["4.57.1", "5.23.0"])
def test_bowlines_own_t5_reads_its_own_key_whichever_transformers_is_loaded(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.__version__", version)
    assert scaled_by(T5Config()) is ScaledBy.OWN_KEY


def test_a_key_that_the_class_does_not_read_does_not_scale(tmp_path: Path) -> None:
    model = build(load_class("SwitchTransformersForConditionalGeneration"))
    before = logits(model)
    model.config.scale_decoder_outputs = False  # another family's key, carried along
    assert torch.equal(logits(model), before)
    save_checkpoint(model, tmp_path)
    assert torch.equal(logits(type(model).from_pretrained(tmp_path).eval()), before)
