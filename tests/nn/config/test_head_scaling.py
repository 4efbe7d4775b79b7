"""T5's relatives, where the flag (or a key that follows it) also scales the head's input by d_model^-1/2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tools.tiny import build, load_class

from bowline.errors import TieError
from bowline.nn import save_checkpoint, tie_weights, untie_weights

IDS = torch.arange(14).reshape(2, 7) + 3
SCALED = ["T5ForConditionalGeneration", "SwitchTransformersForConditionalGeneration", "LongT5ForConditionalGeneration"]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS, decoder_input_ids=IDS).logits
    return found


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
    with pytest.raises(TieError, match="the one flag decides both"):
        save_checkpoint(model, tmp_path / "never")
    assert not (tmp_path / "never").exists()
