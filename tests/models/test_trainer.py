"""transformers' Trainer trains the families as it trains its own: the same losses, and the tie is one at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bowline.models import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)
from bowline.nn import find_ties

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

BERT: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
BERT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {
    "n_embd": 8,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 16,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
T5 = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
MODELS: dict[str, tuple[type[Any], Any]] = {
    "BertForMaskedLM": (BertForMaskedLM, BertConfig(vocab_size=19, **BERT)),
    "GPT2LMHeadModel": (GPT2LMHeadModel, GPT2Config(vocab_size=19, bos_token_id=0, eos_token_id=1, **GPT2)),  # type: ignore[arg-type]
    "T5ForConditionalGeneration": (T5ForConditionalGeneration, T5Config(vocab_size=19, **T5)),  # type: ignore[arg-type]
}


def losses(model: Any, directory: Path) -> list[float]:
    ids = torch.randint(2, 19, (24, 6), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    options = transformers.TrainingArguments(
        output_dir=str(directory),
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=1,
        data_seed=1,
    )
    trainer = transformers.Trainer(model=model, args=options, train_dataset=rows)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_trainer_gives_the_losses_that_transformers_own_class_has(
    name: str, tmp_path: Path, quiet_transformers: None
) -> None:
    cls, config = MODELS[name]
    torch.manual_seed(0)
    ours = cls(config)
    ours.save_pretrained(tmp_path)
    theirs = getattr(transformers, name).from_pretrained(tmp_path)
    theirs.accepts_loss_kwargs = False  # or a causal loss is divided by the first labels too, which predict nothing
    found = losses(ours, tmp_path / "ours")
    assert len(found) == 6
    assert found[-1] < found[0]
    torch.testing.assert_close(found, losses(theirs, tmp_path / "theirs"), rtol=1e-4, atol=0.0)
    assert len(find_ties(ours).ties) >= 1
    ours.save_pretrained(tmp_path / "trained")
    again = cls.from_pretrained(tmp_path / "trained")
    assert torch.equal(again.get_input_embeddings().weight, ours.get_input_embeddings().weight)
