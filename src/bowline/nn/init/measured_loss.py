"""Measures a model's loss on random tokens with independent random labels, which recipes predict."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bowline.errors import TieError, UsageError
from bowline.nn.config.live_config import owner, text_config
from bowline.nn.tree.slots import expect_module, slots
from bowline.nn.vocabulary.structural_axes import input_embedding

__all__ = ["MeasuredLoss", "measure_loss"]

ROWS = 64
"""Positions whose logits are converted to float32 at a time, so that no second batch of logits is made."""


@dataclass(frozen=True, kw_only=True)
class MeasuredLoss:
    """A mean cross entropy in nats, its standard error and the standard deviation over `tokens` labels."""

    loss: float
    error: float
    spread: float
    tokens: int

    def __str__(self) -> str:
        return f"{self.loss:.3f} ± {self.error:.3f} over {self.tokens} tokens"


@torch.no_grad()
def measure_loss(
    model: nn.Module, *, batch: int = 8, length: int = 32, seed: int = 0, batches: int = 1
) -> MeasuredLoss:
    """The mean of ln sum_j exp(z_j) - z_y, in eval mode, over random tokens and random labels y.

    Both are uniform over the vocabulary without padding; labels are drawn independently, and are not the next tokens.
    What a causal model, a masked one, or an encoder and decoder (with a random target) gives as logits (B, T, V).
    The error is of the tokens alone: other weights, drawn from the same recipe, have another loss by as much as theirs
    do. The model's mode, and torch's global generator, are what they were.

    Args:
        model: takes ids (B, T) and returns logits, or something that has `logits` or `prediction_logits`.
        batch: B.
        length: T.
        seed: of tokens and labels.
        batches: how many batches; one batch of logits is held at a time.

    Raises:
        UsageError: a size below 1, more positions than the model has, or a model that has no table of tokens or
            returns no logits (B, T, V).

    Example:
        >>> class Tiny(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.wte, self.head = nn.Embedding(99, 8), nn.Linear(8, 99)
        ...         nn.init.zeros_(self.head.weight), nn.init.zeros_(self.head.bias)
        ...     def forward(self, ids):
        ...         return self.head(self.wte(ids))
        >>> print(measure_loss(Tiny()), "and ln V is", round(math.log(99), 3))
        4.595 ± 0.000 over 256 tokens and ln V is 4.595
    """
    expect_module(model)
    for name, value in (("batch", batch), ("length", length), ("batches", batches)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
            raise UsageError(f"{name}={value!r:.60}: expected a whole number from 1", argument=name)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise UsageError(f"seed={seed!r:.60}: expected a whole number from 0 to 2**63 - 1", argument="seed")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UsageError(
            f"{type(model).__name__}: has no values (it is on meta)", help="call init_weights, or load the model, first"
        )
    config = text_config(getattr(owner(model), "config", None))
    places = getattr(config, "max_position_embeddings", None)
    if isinstance(places, int) and length > places:
        raise UsageError(
            f"length={length}: {type(model).__name__} has only {places} positions",
            help=f"give a length of at most {places}",
            argument="length",
        )
    try:
        table = input_embedding(model, slots(model)).tensor
    except TieError as error:
        raise UsageError(error.message, help="measure a model that takes token ids") from None
    padding = getattr(config, "pad_token_id", None)
    generator = torch.Generator().manual_seed(seed)

    def draw(size: int) -> torch.Tensor:
        left_out = padding if isinstance(padding, int) and 0 <= padding < size and size > 1 else size
        ids = torch.randint(size - (left_out < size), (batch, length), generator=generator)
        return (ids + (ids >= left_out)).to(table.device)

    two = _has_two_inputs(model, config)
    count, total, squares = 0, 0.0, 0.0
    with _evaluated(model):
        for _ in range(batches):
            ids = draw(len(table))
            logits = _logits(model(ids, decoder_input_ids=draw(len(table))) if two else model(ids), model, ids)
            labels = draw(logits.shape[-1]).reshape(-1)
            for some, those in zip(logits.flatten(0, 1).split(ROWS), labels.split(ROWS), strict=True):
                some = some.float()
                losses = (some.logsumexp(-1) - some.gather(-1, those[:, None])[:, 0]).double()
                total, squares = total + float(losses.sum()), squares + float((losses**2).sum())
            count += labels.numel()
            del logits
    mean = total / count
    spread = math.sqrt(max(0.0, squares / count - mean**2))
    return MeasuredLoss(loss=mean, error=spread / math.sqrt(count), spread=spread, tokens=count)


def _has_two_inputs(model: nn.Module, config: Any) -> bool:
    takes = inspect.signature(model.forward).parameters
    return bool(getattr(config, "is_encoder_decoder", False)) or "decoder_input_ids" in takes


def _logits(output: Any, model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    found = output
    for name in ("logits", "prediction_logits"):
        found = getattr(output, name, found)
    if isinstance(found, tuple) and found:
        found = found[0]
    if not isinstance(found, torch.Tensor) or found.ndim != 3 or found.shape[:2] != ids.shape:
        seen = f"{tuple(found.shape)}" if isinstance(found, torch.Tensor) else f"a {type(found).__name__}"
        raise UsageError(
            f"{type(model).__name__} returned {seen}: expected logits {(*ids.shape, 'V')}",
            help="choose a class with a head over the vocabulary",
        )
    return found


@contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    """Puts the model into eval mode, and each module back into its own mode afterwards."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
