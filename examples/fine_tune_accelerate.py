"""Fine-tunes a tied causal language model in a loop of your own with accelerate, with the tied loss and a guarded tie.

    python examples/fine_tune_accelerate.py --model DIR --text FILE --out NEW

Bowline's part: `use_tied_loss` computes the loss without a copy of all logits, `TieGuard` stops the run if the tie
breaks, `save_checkpoint` writes a checkpoint whose config says what its bytes hold, and `audit` checks the files.
`accelerate launch` runs the same script. For FSDP2 see accelerate_trainer.py and fsdp_loop.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
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


def train(given: argparse.Namespace) -> int:
    """Loads, trains, saves and audits the model; returns the exit code."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    ids = torch.tensor(tokenizer(given.text.read_text(encoding="utf-8"))["input_ids"])
    rows: Any = [row for row in ids.split(given.length) if len(row) == given.length]
    if len(rows) < given.rows:
        raise SystemExit(f"--text {given.text}: expected {given.rows * given.length} tokens, got {len(ids)}")

    loss = bowline.use_tied_loss(model.train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.learning_rate, weight_decay=0.0)
    loader = DataLoader(rows, batch_size=given.rows, drop_last=True)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    guard = bowline.TieGuard(model, optimizer=optimizer)
    step = 0
    with guard.attach(optimizer):
        while step < given.steps:
            for batch in loader:
                output = wrapped(input_ids=batch, labels=batch)
                accelerator.backward(output.loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                mean = accelerator.reduce(output.loss.detach(), reduction="mean")
                accelerator.print(f"step {step} loss {mean:.7f}")
                if step == given.steps:
                    break
    accelerator.print(f"{guard.steps} guarded steps; {loss.status}")
    if not accelerator.is_main_process:
        return 0

    bowline.save_checkpoint(model, given.out)
    tokenizer.save_pretrained(given.out)
    wrong = [finding for finding in bowline.audit(given.out).findings if finding.severity != "info"]
    for finding in wrong:
        print(f"{finding.severity} {finding.code}: {finding.message}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(train(options()))
