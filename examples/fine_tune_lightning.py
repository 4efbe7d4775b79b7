"""Fine-tunes a tied causal language model by Lightning's Trainer, with the tied loss and a guarded tie.

    python examples/fine_tune_lightning.py --model DIR --text FILE --out NEW

Bowline's part: `use_tied_loss` computes the loss without a copy of all logits, `TieGuard` is a callback that stops the
run if the tie breaks, `save_checkpoint` writes a checkpoint that transformers loads, and `audit` checks the files.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as lightning
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import bowline


def options() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the checkpoint to start from")
    parser.add_argument("--text", type=Path, required=True, help="the text to train on")
    parser.add_argument("--out", required=True, help="where to save the trained checkpoint")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rows", type=int, default=4, help="sequences in a batch")
    parser.add_argument("--length", type=int, default=64, help="tokens in a sequence")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    return parser.parse_args()


class FineTuned(lightning.LightningModule):
    """A causal language model of transformers, and its optimizer."""

    def __init__(self, model: Any, learning_rate: float) -> None:
        super().__init__()
        self.model = model
        self.learning_rate = learning_rate

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        print(f"step {number + 1} loss {loss:.7f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=0.0)


def train(given: argparse.Namespace) -> int:
    """Loads, trains, saves and audits the model; returns the exit code."""
    model: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    ids = torch.tensor(tokenizer(given.text.read_text(encoding="utf-8"))["input_ids"])
    rows: Any = [row for row in ids.split(given.length) if len(row) == given.length]
    if len(rows) < given.rows:
        raise SystemExit(f"--text {given.text}: expected {given.rows * given.length} tokens, got {len(ids)}")

    loss = bowline.use_tied_loss(model.train())
    module = FineTuned(model, given.learning_rate)
    guard: Any = bowline.TieGuard(module)  # names begin with `model.`
    trainer = lightning.Trainer(
        max_steps=given.steps,
        gradient_clip_val=1.0,
        devices=1,
        callbacks=[guard],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(rows, batch_size=given.rows, drop_last=True))
    print(f"{guard.steps} guarded steps; {loss.status}")

    bowline.save_checkpoint(model, given.out)
    tokenizer.save_pretrained(given.out)
    wrong = [finding for finding in bowline.audit(given.out).findings if finding.severity != "info"]
    for finding in wrong:
        print(f"{finding.severity} {finding.code}: {finding.message}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(train(options()))
