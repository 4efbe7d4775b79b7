"""Filling masks: the likeliest tokens of a masked language model, with their probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bowline.errors import UsageError
from bowline.models.common.tokenizer import Tokenizer

__all__ = ["Candidate", "FilledMask", "fill_mask"]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A token for a mask: its text, its id and its probability."""

    token: str
    token_id: int
    probability: float


@dataclass(frozen=True, kw_only=True)
class FilledMask:
    """One mask: its position among the tokens, and its `candidates`, likeliest first."""

    position: int
    candidates: tuple[Candidate, ...]


@torch.no_grad()
def fill_mask(
    model: Any, text: str | Sequence[int] | torch.Tensor, tokenizer: Tokenizer, top_k: int = 5
) -> list[FilledMask]:
    """Return the `top_k` likeliest tokens for each mask of one text, or of its ids (T,) or (1, T).

    Probabilities are a softmax in float32.

    Raises:
        UsageError: a model without a head for masks, no mask in the text, a tokenizer without a mask token, or more
            than one row.
    """
    if getattr(model, "get_output_embeddings", lambda: None)() is None or hasattr(model, "generate"):
        raise UsageError(
            f"{type(model).__name__} does not fill masks: expected a masked language model, such as BertForMaskedLM"
        )
    if not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1:
        raise UsageError(f"top_k={top_k!r:.60}: expected a whole number from 1", argument="top_k")
    if tokenizer.mask is None:
        raise UsageError("the tokenizer has no mask token", help="use a checkpoint of a masked language model")
    given = tokenizer.encode(text) if isinstance(text, str) else text
    ids = torch.as_tensor(given, device=model.device)
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or len(ids) != 1:
        raise UsageError(
            f"ids {tuple(ids.shape)}: expected the ids of one text", help="call fill_mask once for each text"
        )
    places = (ids[0] == tokenizer.mask).nonzero()[:, 0]
    if not len(places):
        raise UsageError(
            f"no {tokenizer.mask_token} in the text", help=f"write {tokenizer.mask_token} for each token to predict"
        )
    output = model(ids)
    logits = output.logits if hasattr(output, "logits") else output.prediction_logits
    probabilities = logits[0, places].float().softmax(-1)  # (masks, V)
    best, tokens = probabilities.topk(min(top_k, probabilities.shape[1]))
    return [
        FilledMask(
            position=position,
            candidates=tuple(
                Candidate(token=tokenizer.token(token), token_id=token, probability=probability)
                for probability, token in zip(row, row_tokens, strict=True)
            ),
        )
        for position, row, row_tokens in zip(places.tolist(), best.tolist(), tokens.tolist(), strict=True)
    ]
