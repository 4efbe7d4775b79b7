"""Fine-tunes a tied causal language model by TRL's SFTTrainer on prompts and answers, with a guarded tie.

    python examples/fine_tune_sft.py --model DIR --pairs FILE --out NEW

FILE has a JSON object a line, `{"prompt": ..., "completion": ...}`; the loss is of the completions alone. TRL 1.16
computes it from the head's weight, without a copy of all logits, so `bowline.use_tied_loss` is not needed here.
Bowline's part: `TieGuard` is a callback that stops the run if the tie breaks, and `audit` checks the saved files.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import bowline


def options() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the checkpoint to start from")
    parser.add_argument("--pairs", type=Path, required=True, help="prompts and completions, a JSON object a line")
    parser.add_argument("--out", required=True, help="where to save the trained checkpoint")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rows", type=int, default=4, help="pairs in a batch")
    parser.add_argument("--length", type=int, default=64, help="the most tokens of a pair")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    return parser.parse_args()


def train(given: argparse.Namespace) -> int:
    """Loads, trains, saves and audits the model; returns the exit code."""
    model: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(given.model)
    guard: Any = bowline.TieGuard(model)
    arguments = SFTConfig(
        output_dir=given.out,
        max_steps=given.steps,
        max_length=given.length,
        per_device_train_batch_size=given.rows,
        learning_rate=given.learning_rate,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_json(str(given.pairs)),
        processing_class=tokenizer,
        callbacks=[guard],
    )
    trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"step {entry['step']} loss {entry['loss']:.7f}")
    print(f"{guard.steps} guarded steps")

    trainer.save_model()  # into output_dir, with the tokenizer
    wrong = [finding for finding in bowline.audit(given.out).findings if finding.severity != "info"]
    for finding in wrong:
        print(f"{finding.severity} {finding.code}: {finding.message}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(train(options()))
