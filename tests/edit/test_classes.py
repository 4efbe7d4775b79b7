"""Twelve architectures, built tiny: each edit loads in transformers, keeps the logits, and is undone to the byte.

`make edits` does the same with every class that transformers has.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.edit_sweep import EDITS, run_class

CLASSES = {
    "GPT2LMHeadModel": "equal",
    "LlamaForCausalLM": "equal",
    "Gemma3ForConditionalGeneration": "equal",
    "Gemma3nForCausalLM": "equal",
    "OPTForCausalLM": "equal",
    "BertForMaskedLM": "equal",
    "MobileBertForMaskedLM": "equal",
    "XLMRobertaForMaskedLM": "equal",
    "T5ForConditionalGeneration": "within",
    "BartForConditionalGeneration": "equal",
    "MarianMTModel": "equal",
    "NeoMMEForMaskedLM": "equal",
}
"""The class, and how the logits of its untied form compare: T5's head then carries the scale, rounded once."""


@pytest.mark.parametrize("name", CLASSES)
def test_every_edit_of_a_class_keeps_its_logits_and_can_be_undone(tmp_path: Path, name: str) -> None:
    result = run_class(name, tmp_path)
    untied = result.outcomes.pop("untie", None)
    assert result.reason == ""
    assert result.outcomes == dict.fromkeys([edit for edit in EDITS if edit != "untie"], "equal")
    assert untied is not None
    assert untied.partition(" ")[0] == CLASSES[name]
