"""The rows of new tokens, made from a stored tensor's own rows in one or two passes over it.

The rules are those of `bowline.resize_vocab`, which makes them in torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from bowline.checkpoint.formats.dtypes import decode, encode
from bowline.edit.content import Bits, Content, NewRows
from bowline.errors import UsageError

__all__ = ["NAMED", "Mixed", "check_rule", "made_rows", "mean_row"]

NAMED = ("mean", "gaussian", "zeros")
COPY = re.compile(r"copy:(\d+)")
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
GAUSSIAN_SCALE = 1e-5
"""Factor on the covariance, by Hewitt (nlp.stanford.edu/~johnhew/vocab-expansion.html); transformers 5 has 1e-9."""
SEED = 0
"""New rows are drawn from this seed: the same edit gives the same bytes."""
Values = npt.NDArray[np.float64]


class Same(NewRows):
    """Every new row is this one."""

    def __init__(self, row: Bits) -> None:
        self.row = row

    def bits(self, at: npt.NDArray[np.int64]) -> Bits:
        return np.broadcast_to(self.row, (len(at), *self.row.shape))


class Given(NewRows):
    """The new rows, each of its own."""

    def __init__(self, rows: Bits) -> None:
        self.rows = rows

    def bits(self, at: npt.NDArray[np.int64]) -> Bits:
        return self.rows[at]


class Mixed(NewRows):
    """Some new rows of their own, the others by another rule."""

    def __init__(self, others: NewRows, own: Mapping[int, Bits]) -> None:
        self.others, self.own = others, own

    def bits(self, at: npt.NDArray[np.int64]) -> Bits:
        rows = np.array(self.others.bits(at))
        for place, number in enumerate(at.tolist()):
            if number in self.own:
                rows[place] = self.own[number]
        return rows


def check_rule(rule: str, old_size: int) -> None:
    """Raise for an invalid rule.

    Raises:
        UsageError: it is not one of the names, or copies a token that does not exist.
    """
    copied = COPY.fullmatch(rule)
    if rule not in NAMED and copied is None:
        raise UsageError(
            f"new_rows={rule!r}: expected {', '.join(map(repr, NAMED))}, 'copy:<id>' or 'like:<text>'",
            argument="new_rows",
        )
    if copied and int(copied[1]) >= old_size:
        raise UsageError(f"new_rows={rule!r}: the vocabulary has only the ids 0 to {old_size - 1}", argument="new_rows")


def made_rows(
    rule: str, content: Content, axis: int, size: int, count: int, padding: frozenset[int], name: str
) -> NewRows:
    """`count` new rows of one tensor.

    Means and covariances are of the first `size` rows without those of `padding` and without rows that are not finite,
    in float64, rounded once. A tensor of whole numbers, which have no mean, repeats its rows from the first one.

    Raises:
        UsageError: no row is left to average or to copy.
    """
    size = min(size, content.shape[axis])
    if copied := COPY.fullmatch(rule):
        if int(copied[1]) >= size:
            raise UsageError(
                f"new_rows={rule!r}: {name} has only {size} rows", help="copy a token that it has", argument="new_rows"
            )
        return Same(_rows(content, axis, [int(copied[1])])[0])
    if rule == "zeros":
        return Same(np.zeros_like(_rows(content, axis, [0])[0]))
    if content.dtype not in FLOATS:
        return Given(_rows(content, axis, [at % size for at in range(count)]))
    mean, used = _mean_of(content, axis, size, padding, name)
    if rule == "mean":
        return Same(encode(mean, content.dtype))
    made = np.zeros((count, *mean.shape))
    draw = np.random.default_rng(SEED)
    for rows in _usable(content, axis, size, padding):
        for part in np.array_split(rows, max(1, len(rows) * count // (1 << 20))):
            made += np.tensordot(draw.standard_normal((count, len(part))), part - mean, axes=1)
    return Given(encode(mean + made * math.sqrt(GAUSSIAN_SCALE / used), content.dtype))


def _mean_of(content: Content, axis: int, size: int, padding: frozenset[int], name: str) -> tuple[Values, int]:
    """The mean of the usable rows, and how many they are."""
    total: Values | None = None
    used = 0
    for rows in _usable(content, axis, size, padding):
        total = rows.sum(0) if total is None else total + rows.sum(0)
        used += len(rows)
    if total is None or not used:
        raise UsageError(
            f"{name} has no finite row except the padding row, so there is no mean",
            help="use --new-rows zeros or copy:<id>",
            argument="new_rows",
        )
    return np.asarray(total / used), used


def mean_row(content: Content, axis: int, tokens: Sequence[int]) -> Bits:
    """The mean of these tokens' rows."""
    bits = _rows(content, axis, tokens)
    values = decode(bits.view(np.uint8).reshape(-1), content.dtype, bits.shape)
    return encode(values.astype(np.float64).mean(0), content.dtype)


def _rows(content: Content, axis: int, tokens: Sequence[int]) -> Bits:
    """Rows along the vocabulary's axis, that axis first."""
    if axis == 0:
        return np.concatenate([content.bits(token, token + 1) for token in tokens])
    columns = [np.moveaxis(content.bits(start, stop), axis, 0)[list(tokens)] for start, stop in content.blocks()]
    return np.ascontiguousarray(np.concatenate(columns, axis=1))


def _usable(content: Content, axis: int, size: int, padding: frozenset[int]) -> Iterator[Values]:
    """The rows that count, in blocks, in double precision."""
    if axis != 0:  # the vocabulary runs along the rows: a bias of shape [1, V], or MobileBERT's [width, V]
        whole = np.concatenate([content.values(start, stop) for start, stop in content.blocks()])
        blocks: Iterator[tuple[int, npt.NDArray[np.generic]]] = iter([(0, np.moveaxis(whole, axis, 0)[:size])])
    else:
        blocks = ((start, content.values(start, min(stop, size))) for start, stop in content.blocks() if start < size)
    for start, block in blocks:
        usable = np.isfinite(block).reshape(len(block), -1).all(1)
        for token in padding:
            if start <= token < start + len(block):
                usable[token - start] = False
        yield block[usable].astype(np.float64)
