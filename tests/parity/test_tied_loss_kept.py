"""`use_tied_loss` gives a class of transformers the loss, gradients and logits that it had: one of each kind of head.

`make sweep-loss` does the same for every class that can be built.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from tools.tied_loss_sweep import Step, difference, run_class

pytestmark = pytest.mark.usefixtures("quiet_transformers")

KINDS = {
    "BambaForCausalLM": "from hidden states",
    "BertForPreTraining": "from hidden states",
    "BloomForCausalLM": "from hidden states",
    "BlenderbotForConditionalGeneration": "from hidden states",
    "ChameleonForConditionalGeneration": "from logits",
    "Cohere2ForCausalLM": "from hidden states",
    "ElectraForMaskedLM": "from hidden states",
    "FSMTForConditionalGeneration": "refused",
    "GPTJForCausalLM": "from hidden states",
    "LlavaForConditionalGeneration": "from hidden states",
    "MixtralForCausalLM": "from hidden states",
    "MobileBertForMaskedLM": "from logits",
    "MT5ForConditionalGeneration": "from hidden states",
    "PLBartForConditionalGeneration": "from hidden states",
    "ProphetNetForCausalLM": "from logits",
    "Qwen2VLForConditionalGeneration": "from hidden states",
    "WhisperForConditionalGeneration": "from hidden states",
    "XLMWithLMHeadModel": "from hidden states",
}
"""How each computes its loss: a scale, a softcap, a bias, a shift, images, experts, one loss of several."""


@pytest.mark.parametrize("name", KINDS)
def test_the_loss_the_gradients_and_the_logits_are_those_it_had(name: str) -> None:
    result = run_class(name)
    assert result.kind == KINDS[name], result.reason


def test_a_difference_is_seen() -> None:
    one, other = torch.ones(3), torch.tensor([1.0, 1.0, 1.001])
    plain = Step(torch.tensor(2.0), {"weight": one, "bias": one}, {"logits": one})
    tied = Step(torch.tensor(2.001), {"weight": other}, {"logits": other})
    assert list(difference(plain, plain)) == []
    assert list(difference(plain, tied)) == [
        "loss 2.001000 for 2.000000",
        "gradients of ['bias']",
        "the gradient of weight",
        "logits",
    ]
