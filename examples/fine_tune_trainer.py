"""Fine-tunes a tied causal language model by transformers' Trainer, with the tied loss and a guarded tie.

    python examples/fine_tune_trainer.py --model DIR --text FILE --out NEW

Three lines are Bowline's: `use_tied_loss` computes the loss without a copy of all logits, `TieGuard` stops the run if
the tie breaks, and `audit` checks the files that were saved.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, default_data_collator

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


def train(given: argparse.Namespace) -> int:
    """Loads, trains, saves and audits the model; returns the exit code."""
    model: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    ids = torch.tensor(tokenizer(given.text.read_text(encoding="utf-8"))["input_ids"])
    rows: Any = [{"input_ids": row, "labels": row} for row in ids.split(given.length) if len(row) == given.length]
    if len(rows) < given.rows:
        raise SystemExit(f"--text {given.text}: expected {given.rows * given.length} tokens, got {len(ids)}")

    loss = bowline.use_tied_loss(model)
    guard: Any = bowline.TieGuard(model)
    arguments = TrainingArguments(
        output_dir=given.out,
        max_steps=given.steps,
        per_device_train_batch_size=given.rows,
        learning_rate=given.learning_rate,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        callbacks=[guard],
    )
    trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"step {entry['step']} loss {entry['loss']:.7f}")
    print(f"{guard.steps} guarded steps; {loss.status}")

    trainer.save_model()  # into output_dir, with the tokenizer
    wrong = [finding for finding in bowline.audit(given.out).findings if finding.severity != "info"]
    for finding in wrong:
        print(f"{finding.severity} {finding.code}: {finding.message}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(train(options()))
