"""Checks of the tensors that a caller passes to a model."""

from __future__ import annotations

from typing import Any

import torch

from bowline.errors import UsageError

__all__ = ["check_beside", "check_embeds", "check_ids", "check_kept", "check_labels", "check_tensor"]


def check_tensor(value: Any, what: str) -> None:
    """Check that `value` is a tensor.

    Raises:
        UsageError: it is not.
    """
    if not isinstance(value, torch.Tensor):
        raise UsageError(
            f"{what} is a {type(value).__name__}: expected a tensor", help="convert it with torch.tensor(...)"
        )


def check_ids(ids: torch.Tensor, size: int, what: str = "input_ids") -> None:
    """Check that `ids` are integers (B, T), at least one, and that each is a row of a table of `size` rows.

    Values are checked on the CPU only. On an accelerator the check would stall the queue; there the lookup kernel's own
    assertion reports a wrong id.

    Raises:
        UsageError: they are not.
    """
    check_tensor(ids, what)
    if ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32):
        raise UsageError(f"{what} {tuple(ids.shape)} of {ids.dtype}: expected integers of shape (batch, length)")
    if 0 in ids.shape:
        raise UsageError(f"{what} {tuple(ids.shape)}: an empty batch, expected at least one token")
    if torch.compiler.is_compiling() or ids.device.type != "cpu":
        return
    low, high = torch.aminmax(ids)
    if low < 0 or high >= size:
        wrong = int(low) if low < 0 else int(high)
        raise UsageError(
            f"{what} has {wrong}, and the table has {size} rows: expected 0 to {size - 1}",
            help="use the model's own tokenizer, or add rows with resize_vocab(model, n) first",
        )


def check_beside(ids: torch.Tensor, batch: int, length: int, size: int, what: str) -> None:
    """Check integers that go with the tokens, (B, T) or (1, T): each must be a row of its own table.

    Raises:
        UsageError: another shape, or a value outside of the table.
    """
    check_ids(ids, size, what)
    if ids.shape[0] not in (1, batch) or ids.shape[1] != length:
        raise UsageError(f"{what} {tuple(ids.shape)}: expected {(batch, length)}, an integer for each token")


def check_kept(logits_to_keep: int) -> None:
    """Check that `logits_to_keep` is a number of positions from the end, or 0 for all positions.

    Raises:
        UsageError: it is not.
    """
    if not isinstance(logits_to_keep, int) or logits_to_keep < 0:
        raise UsageError(
            f"logits_to_keep={logits_to_keep!r:.60}: expected a number of positions, or 0 for all positions"
        )


def check_embeds(embeds: torch.Tensor, width: int, what: str = "inputs_embeds") -> None:
    """Check that `embeds` are floating-point numbers (B, T, D) with D = `width`, and not empty.

    Raises:
        UsageError: they are not.
    """
    check_tensor(embeds, what)
    if embeds.ndim != 3 or embeds.shape[-1] != width or not embeds.is_floating_point():
        raise UsageError(
            f"{what} {tuple(embeds.shape)} of {embeds.dtype}: expected floating point of shape (batch, length, {width})"
        )
    if 0 in embeds.shape:
        raise UsageError(f"{what} {tuple(embeds.shape)}: an empty batch, expected at least one token")


def check_labels(labels: torch.Tensor, shape: tuple[int, ...] | None, size: int, ignore_index: int = -100) -> None:
    """Check that `labels` are int64 of `shape` (`None`: any (B, T)), each a token below `size` or `ignore_index`.

    Labels that a later shift drops are checked too. Values are checked on the CPU only, as in `check_ids`.

    Raises:
        UsageError: they are not.
    """
    check_tensor(labels, "labels")
    if shape is None and 0 in labels.shape:
        raise UsageError(f"labels {tuple(labels.shape)}: an empty batch, expected at least one token")
    fits = labels.shape == shape if shape is not None else labels.ndim == 2
    if not fits or labels.dtype != torch.int64:
        expected = "(batch, length)" if shape is None else tuple(shape)
        raise UsageError(f"labels {tuple(labels.shape)} of {labels.dtype}: expected torch.int64 of shape {expected}")
    if torch.compiler.is_compiling() or labels.device.type != "cpu":
        return
    wrong = (labels != ignore_index) & ((labels < 0) | (labels >= size))
    if wrong.any():
        raise UsageError(
            f"label {int(labels[wrong][0])}: expected 0 to {size - 1}, or {ignore_index} for a position without a label"
        )
