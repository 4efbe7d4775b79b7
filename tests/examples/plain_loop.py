"""A plain loop of torch and transformers, without Bowline: what the examples' losses and weights are held against."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["plainly_trained", "rows_of"]

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Token ids, labels and attention mask, each (rows, length); a label of -100 does not count."""


def rows_of(model: Path, text: Path, *, length: int, rows: int, steps: int) -> list[Batch]:
    """The batches of a text in its order."""
    from transformers import AutoTokenizer

    ids = torch.tensor(AutoTokenizer.from_pretrained(model)(text.read_text(encoding="utf-8"))["input_ids"])
    whole = ids[: steps * rows * length].view(steps, rows, length)
    return [(batch, batch, torch.ones_like(batch)) for batch in whole]


def plainly_trained(model: Path, batches: Iterable[Batch], out: Path, *, learning_rate: float) -> list[float]:
    """Trains on the batches, saves to `out`, and gives the loss of each step: cross entropy of all logits."""
    from transformers import AutoModelForCausalLM

    trained: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=learning_rate, weight_decay=0.0)
    losses = []
    for ids, labels, mask in batches:
        logits = trained(input_ids=ids, attention_mask=mask).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    trained.save_pretrained(out)
    return losses
