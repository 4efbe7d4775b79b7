"""Adapters of a real trained tied model: what the audit says of their merges, and what the merges compute."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft")

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

from bowline.auditing import audit_adapter
from bowline.errors import TieError
from bowline.nn import merge_lora

pytestmark = [
    pytest.mark.real,
    pytest.mark.usefixtures("quiet_transformers"),
    pytest.mark.filterwarnings("ignore"),  # PEFT warns of ties and of saved tables
]

CLOSE = 1e-3
"""Logits of up to 30 are compared in float32, in which a merge rounds every weight once."""


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"target_modules": ["q_proj", "v_proj"]}, None),
        ({"target_modules": ["q_proj", "lm_head"]}, "BW501"),
        ({"target_modules": ["q_proj", "embed_tokens", "lm_head"]}, "BW502"),
        ({"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}, "BW503"),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [5, 6, 7]}, None),
    ],
    ids=["attention", "head", "both", "ensured", "rows"],
)
def test_the_verdict_on_a_real_adapter_is_what_its_merge_computes(
    smollm2: Path, options: dict[str, Any], code: str | None, tmp_path: Path
) -> None:
    base = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    ids = transformers.AutoTokenizer.from_pretrained(smollm2)(
        "A knot that does not slip.", return_tensors="pt"
    ).input_ids
    model: Any = get_peft_model(copy.deepcopy(base), LoraConfig(r=8, **options))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "embedding_A" in name or "tokens_delta" in name:
            parameter.data.normal_(0, 0.02, generator=generator)
    model.peft_config["default"].base_model_name_or_path = str(smollm2)
    model.save_pretrained(tmp_path)
    report = audit_adapter(tmp_path)
    assert [found.code for found in report.findings if found.severity.value != "info"] == ([code] if code else [])
    with torch.no_grad():
        loaded: Any = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
        expected = loaded(ids).logits
        plain = loaded.merge_and_unload()(ids).logits
        loaded = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
        try:
            ours = merge_lora(loaded)
        except TieError:
            ours = merge_lora(loaded, on_tie="untie")
        merged = ours(ids).logits
    peft, bowline, _ = report.evidence.merges
    assert (float((plain - expected).abs().max()) < CLOSE) is peft.exact
    assert (float((merged - expected).abs().max()) < CLOSE) is bowline.exact
