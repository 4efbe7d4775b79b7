"""Makes the rows of new tokens, and builds a resized tensor from old and new rows."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

from bowline.errors import UsageError

__all__ = ["NewRows", "check_rule", "make_rows", "spread"]

NewRows: TypeAlias = str | Callable[[torch.Tensor, int], torch.Tensor]
"""A rule of `NAMED`, `"copy:<id>"`, or a function of (old tensor, vocabulary first) and a count."""

NAMED = ("mean", "scaled-mean", "gaussian", "zeros")

GAUSSIAN_SCALE = 1e-5
"""Factor on the covariance in Hewitt's rule."""
BLOCK_ELEMENTS = 1 << 22
"""Values per block in which rows are read and moved, so that extra memory does not grow with the table."""
COPY = re.compile(r"copy:(\d+)")


def check_rule(rule: NewRows, old_size: int) -> None:
    """Raise for an invalid rule.

    Raises:
        UsageError: it is not one of the names, copies a token that does not exist, or is not a function.
    """
    if callable(rule) or rule in NAMED:
        return
    copied = COPY.fullmatch(rule) if isinstance(rule, str) else None
    if copied is None:
        raise UsageError(
            f"new_rows={rule!r}: expected {', '.join(repr(name) for name in NAMED)}, 'copy:<id>' or a function "
            "(old, count) -> rows",
            argument="new_rows",
        )
    if int(copied[1]) >= old_size:
        raise UsageError(f"new_rows={rule!r}: the vocabulary has only the ids 0 to {old_size - 1}", argument="new_rows")


def make_rows(
    rule: NewRows, tensor: torch.Tensor, axis: int, size: int, count: int, padding: frozenset[int], name: str
) -> torch.Tensor:
    """`count` new rows for one tensor, the vocabulary's axis first, in its dtype.

    The mean and the covariance are of the first `size` rows without those of `padding` and without rows that are not
    finite (a logit bias of minus infinity bars one token, and should not bar the new ones). Whole numbers have no
    mean: an integer table repeats its rows from the first one.

    Raises:
        UsageError: no row is left to average or to copy, a mean of zero is to be scaled, or a function did not return
            `count` rows.
    """
    rows = tensor.detach().movedim(axis, 0)
    rows = rows[: min(size, len(rows))]
    shape = (count, *rows.shape[1:])
    if tensor.is_meta or count == 0 or rule == "zeros":
        return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
    if callable(rule):
        return _from_function(rule, rows, shape, name)
    if copied := COPY.fullmatch(rule):
        return _copied(rows, int(copied[1]), count, name)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return rows[torch.arange(count, device=rows.device) % len(rows)].clone()
    mean, used = _mean(rows, padding)
    if not used:
        raise UsageError(
            f"new_rows={rule!r}: {name} has no finite row except the padding row, so there is no mean",
            help='use new_rows="zeros" or "copy:<id>"',
            argument="new_rows",
        )
    if rule == "scaled-mean" and mean.ndim:
        mean = _scaled(mean, _median_norm(rows, padding), name)
    made = mean.expand(count, *mean.shape)
    if rule == "gaussian":
        made = made + _deviations(rows, padding, mean, used, count)
    return made.to(tensor.dtype)


def _from_function(rule: Callable[..., Any], rows: torch.Tensor, shape: tuple[int, ...], name: str) -> torch.Tensor:
    with torch.no_grad():
        made = rule(rows, shape[0])
    if not isinstance(made, torch.Tensor) or tuple(made.shape) != shape:
        seen = f"shape {tuple(made.shape)}" if isinstance(made, torch.Tensor) else type(made).__name__
        raise UsageError(
            f"new_rows returned {seen} for {name}, expected a tensor of shape {shape}", argument="new_rows"
        )
    return made.detach().to(device=rows.device, dtype=rows.dtype)


def _copied(rows: torch.Tensor, at: int, count: int, name: str) -> torch.Tensor:
    if at >= len(rows):
        raise UsageError(
            f"new_rows='copy:{at}': {name} has no row for that token, only {len(rows)} rows", argument="new_rows"
        )
    return rows[at].clone().expand(count, *rows.shape[1:])


def _precise(tensor: torch.Tensor) -> torch.dtype:
    if tensor.is_complex():
        return torch.complex128
    return torch.float32 if tensor.device.type == "mps" else torch.float64  # MPS has no float64


def _usable(rows: torch.Tensor, padding: frozenset[int]) -> Iterator[torch.Tensor]:
    """The rows that count, in blocks, in double precision where available."""
    step = max(1, BLOCK_ELEMENTS // max(1, rows[0].numel()))
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        usable = torch.isfinite(block).reshape(len(block), -1).all(1)
        for at in padding:
            if start <= at < start + len(block):
                usable[at - start] = False
        yield block[usable].to(_precise(rows))


def _mean(rows: torch.Tensor, padding: frozenset[int]) -> tuple[torch.Tensor, int]:
    total, used = torch.zeros(rows.shape[1:], dtype=_precise(rows), device=rows.device), 0
    for block in _usable(rows, padding):
        total += block.sum(0)
        used += len(block)
    return total / max(used, 1), used


def _median_norm(rows: torch.Tensor, padding: frozenset[int]) -> float:
    norms = [torch.linalg.vector_norm(block.flatten(1), dim=1) for block in _usable(rows, padding)]
    return float(torch.cat(norms).median())


def _scaled(mean: torch.Tensor, norm: float, name: str) -> torch.Tensor:
    """The mean's direction at this norm."""
    length = float(torch.linalg.vector_norm(mean))
    if norm and not length:
        raise UsageError(
            f"new_rows='scaled-mean': the mean row of {name} is zero, so it has no direction",
            help='use new_rows="mean", "gaussian" or "copy:<id>"',
            argument="new_rows",
        )
    return mean / length * norm if norm else mean


def _deviations(rows: torch.Tensor, padding: frozenset[int], mean: torch.Tensor, used: int, count: int) -> torch.Tensor:
    """Samples of N(0, 1e-5 covariance): z @ (rows - mean) / sqrt(used) has that covariance, singular or not."""
    made = torch.zeros((count, *mean.shape), dtype=mean.dtype, device=mean.device)
    for block in _usable(rows, padding):
        for part in torch.split(block, max(1, BLOCK_ELEMENTS // count)):
            z = torch.randn(count, len(part), dtype=mean.dtype, device=mean.device)
            made += torch.tensordot(z, part - mean, dims=1)
    return made * math.sqrt(GAUSSIAN_SCALE / used)


def spread(old: torch.Tensor, axis: int, origins: torch.Tensor, made: torch.Tensor | None) -> torch.Tensor:
    """A new tensor whose rows along `axis` are the old rows at `origins`, or the next row of `made` where that is -1.

    Without `made`, new rows are zeros.
    """
    shape = list(old.shape)
    shape[axis] = len(origins)
    new = torch.empty(shape, dtype=old.dtype, device=old.device)
    if old.is_meta:
        return new
    source, target = old.detach().movedim(axis, 0), new.movedim(axis, 0)
    step = max(1, BLOCK_ELEMENTS // max(1, target[0].numel()))
    taken = 0
    for start in range(0, len(origins), step):
        wanted = origins[start : start + step]
        block, fresh = target[start : start + step], wanted < 0
        if bool(fresh.any()):
            count = int(fresh.sum())
            places = fresh.nonzero().flatten().to(old.device)
            block[places] = 0 if made is None else made[taken : taken + count]
            taken += count
        stays = (~fresh).nonzero().flatten().to(old.device)
        block[stays] = source[wanted[~fresh].to(old.device)]
    return new
