"""Token vectors and positions from the arguments of a model's forward, with the checks of those arguments."""

from __future__ import annotations

import torch
from torch import nn

from bowline.errors import UsageError
from bowline.models.common.input_checks import check_beside, check_embeds, check_ids

__all__ = ["looked_up", "token_embeddings", "token_positions"]


def looked_up(table: nn.Module, ids: torch.Tensor, scale: float) -> torch.Tensor:
    """Look ids up in the table and multiply by `embed_scale`: (B, T) to (B, T, D)."""
    rows: torch.Tensor = table(ids)
    return rows if scale == 1.0 else rows * scale


def token_embeddings(
    table: nn.Module,
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    *,
    vocab_size: int,
    width: int,
    scale: float,
) -> torch.Tensor:
    """Return the vectors (B, T, D) of the tokens: rows of the table for `input_ids`, or `inputs_embeds` as given.

    Raises:
        UsageError: both or neither are given, ids outside of the vocabulary, or vectors that are not (B, T, `width`).
    """
    if (input_ids is None) is (inputs_embeds is None):
        raise UsageError("input_ids and inputs_embeds: expected exactly one of them")
    if inputs_embeds is None:
        check_ids(input_ids, vocab_size)  # type: ignore[arg-type]
        inputs_embeds = looked_up(table, input_ids, scale)  # type: ignore[arg-type]
    check_embeds(inputs_embeds, width)
    return inputs_embeds


def token_positions(
    position_ids: torch.Tensor | None, embeds: torch.Tensor, *, past: int = 0, size: int, key: str
) -> torch.Tensor:
    """Return the positions (1, T) or (B, T) of the tokens: `position_ids`, or the T that follow the `past` cached ones.

    `size` is the number of rows of the table of positions, and `key` the config's name for it.

    Raises:
        UsageError: more positions than the table has, or `position_ids` that do not fit the tokens.
    """
    batch, length = embeds.shape[:2]
    if position_ids is not None:
        check_beside(position_ids, batch, length, size, "position_ids")
        return position_ids
    if past + length > size:
        raise UsageError(
            f"the text has {past + length} positions, and the table of positions has {size} ({key})",
            help="shorten the text, or build a model with more positions",
        )
    return torch.arange(past, past + length, device=embeds.device)[None]
