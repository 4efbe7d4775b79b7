"""`use_tied_loss` on SmolLM2-135M-Instruct, a trained tied model: adapters of every kind, in one step each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bowline.nn import use_tied_loss

peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.real, pytest.mark.usefixtures("quiet_transformers")]

LAYERS = ["q_proj", "v_proj"]
CONFIGS: dict[str, dict[str, Any]] = {
    "q and v": {"target_modules": LAYERS},
    "the head": {"target_modules": ["lm_head"]},
    "both ends": {"target_modules": ["lm_head", "embed_tokens"]},
    "trained rows": {"target_modules": LAYERS, "trainable_token_indices": [5, 300, 49_151]},
    "a saved head": {"target_modules": LAYERS, "modules_to_save": ["lm_head"]},
}


def built(place: Path, kind: str, order: str) -> tuple[Any, Any]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    loss = use_tied_loss(model) if order == "before" else None
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=8, init_lora_weights=False, **CONFIGS[kind]))
    return adapted.train(), use_tied_loss(adapted) if order == "after" else loss


def stepped(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    ids = torch.randint(17, 49_152, (1, 64), generator=torch.Generator().manual_seed(0))
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return float(loss), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("kind", CONFIGS)
def test_loss_and_gradients_are_pefts_in_both_orders(smollm2: Path, kind: str) -> None:
    plain, theirs = stepped(built(smollm2, kind, "never")[0])
    for order in ("before", "after"):
        model, loss = built(smollm2, kind, order)
        found, ours = stepped(model)
        assert abs(found - plain) < 1e-5 * plain
        assert ours.keys() == theirs.keys()
        for name, gradient in theirs.items():
            assert float((ours[name] - gradient).norm()) < 2e-3 * float(gradient.norm()) + 1e-9, name
        assert loss.status.fallbacks == 0
        assert sum(loss.status.losses.values()) == 1
