"""What the audit predicts is what transformers does: one class of each of many families, saved in five states.

`make sweep` does the same for every class that can be built.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tools.sweep import LOADER, STATES, run_class, tied_classes

pytestmark = pytest.mark.usefixtures("quiet_transformers")

CLASSES = [
    "AlbertForMaskedLM",
    "BartForConditionalGeneration",
    "BertForPreTraining",
    "BigBirdForMaskedLM",
    "BlenderbotForConditionalGeneration",
    "BloomForCausalLM",
    "CamembertForMaskedLM",
    "CodeGenForCausalLM",
    "CohereForCausalLM",
    "ConvBertForMaskedLM",
    "CTRLLMHeadModel",
    "DebertaV2ForMaskedLM",
    "DistilBertForMaskedLM",
    "ElectraForMaskedLM",
    "FalconForCausalLM",
    "FNetForMaskedLM",
    "GPT2LMHeadModel",
    "GPTJForCausalLM",
    "GPTNeoForCausalLM",
    "GPTNeoXForCausalLM",
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "LlamaForCausalLM",
    "LlavaForConditionalGeneration",
    "LongT5ForConditionalGeneration",
    "MBartForConditionalGeneration",
    "MT5ForConditionalGeneration",
    "MambaForCausalLM",
    "MarianMTModel",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "MobileBertForMaskedLM",
    "MPNetForMaskedLM",
    "MptForCausalLM",
    "OPTForCausalLM",
    "PegasusForConditionalGeneration",
    "PhiForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2VLForConditionalGeneration",
    "RobertaForMaskedLM",
    "RwkvForCausalLM",
    "SqueezeBertForMaskedLM",
    "StableLmForCausalLM",
    "Starcoder2ForCausalLM",
    "T5ForConditionalGeneration",
    "UMT5ForConditionalGeneration",
    "ViltForMaskedLM",
    "WhisperForConditionalGeneration",
    "XLMWithLMHeadModel",
    "XLNetLMHeadModel",
]


@pytest.mark.parametrize("name", CLASSES)
def test_every_predicted_fate_is_the_actual_one(name: str, tmp_path: Path) -> None:
    result = run_class(name, tmp_path)
    assert result.reason is None
    assert [case.state for case in result.cases] == list(STATES)
    assert {case.state: case.predicted for case in result.cases} == {case.state: case.actual for case in result.cases}
    assert all(case.actual for case in result.cases)


def test_the_sample_is_of_forty_families_that_the_table_ties() -> None:
    assert LOADER == "transformers-5"
    assert len(CLASSES) >= 40
    assert set(CLASSES) <= set(tied_classes())
