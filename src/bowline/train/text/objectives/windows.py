"""Windows of packed tokens in a random order that is computed, not stored: the i-th window is a function of i."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from bowline.errors import UsageError

__all__ = ["Windows", "permuted", "random_for"]

ROUNDS = 6
"""Rounds of the Feistel network; from four on it looks random without the key (Luby and Rackoff, 1988)."""


def random_for(*key: int | str) -> np.random.Generator:
    """Return a random generator for this key of integers and strings."""
    return np.random.Generator(np.random.Philox(key=_hash(key, 16)))


def permuted(at: int, count: int, *key: int | str) -> int:
    """Return the place of `at` under the key's permutation of 0 to count - 1, without storing the permutation.

    A Feistel network permutes the next larger power of four. A result outside of the range is permuted again until it
    lies inside.

    Example:
        >>> sorted(permuted(at, 10, "seed", 0) for at in range(10)) == list(range(10))
        True
    """
    half = max((count - 1).bit_length() + 1, 2) // 2
    mask = (1 << half) - 1
    while True:
        left, right = at >> half, at & mask
        for round_ in range(ROUNDS):
            left, right = right, left ^ (_hash((*key, round_, right), 8) & mask)
        at = (left << half) | right
        if at < count:
            return at


def _hash(key: tuple[int | str, ...], size: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=size).digest(), "big")


class Windows:
    """The windows of `length` tokens in a row of ids, each once per epoch, in an order that depends on `seed`.

    Each epoch has its own order and its own start of the first window, so that a token changes its place in the window.
    An epoch leaves out less than one window of the row.

    Args:
        tokens: the ids (N,), a mapped file or an array.
        length: the length of a window.
        seed: the seed of the order.

    Raises:
        UsageError: a row shorter than one window.

    Example:
        >>> windows = Windows(np.arange(40), 8, seed=1)
        >>> len(windows), windows[3].shape, windows[3].tolist() == windows[3].tolist()
        (4, (8,), True)
    """

    def __init__(self, tokens: npt.NDArray[Any], length: int, *, seed: int) -> None:
        if len(tokens) < length:
            raise UsageError(
                f"length={length}: expected a text of at least one window, got {len(tokens)} tokens",
                help="add more text, or give a smaller --length",
                argument="length",
            )
        self.tokens, self.length, self.seed = tokens, length, seed
        self.slack = min(length, len(tokens) - length + 1)
        self.count = (len(tokens) - self.slack + 1) // length

    def __len__(self) -> int:
        """Return the number of windows in an epoch."""
        return self.count

    def __getitem__(self, at: int) -> npt.NDArray[np.int64]:
        """Return window number `at`, (length,), counted on through all epochs without end."""
        epoch, within = divmod(at, self.count)
        offset = _hash(("offset", self.seed, epoch), 8) % self.slack
        start = offset + self.length * permuted(within, self.count, "order", self.seed, epoch)
        return np.asarray(self.tokens[start : start + self.length], np.int64)

    def rows(self, step: int, micro: int, batch_size: int, accumulation: int) -> npt.NDArray[np.int64]:
        """Return the windows of one batch, (batch_size, length). Batches of one epoch share no window."""
        first = (step * accumulation + micro) * batch_size
        return np.stack([self[first + row] for row in range(batch_size)])

    @staticmethod
    def in_order(tokens: npt.NDArray[Any], length: int, batch_size: int, most: int) -> Iterator[npt.NDArray[np.int64]]:
        """Yield batches of held-out windows, (batch_size, length): at most `most` tokens, spread evenly over the row.

        Raises:
            UsageError: a row shorter than one window.
        """
        count = len(tokens) // length
        if count == 0:
            raise UsageError(
                f"length={length}: expected a held-out text of at least one window, got {len(tokens)} tokens",
                help="add more text, or give a smaller --length or a larger --held-out-share",
                argument="length",
            )
        wanted = min(count, max(most // length, 1))
        chosen = [at * count // wanted for at in range(wanted)]
        for first in range(0, wanted, batch_size):
            starts = [at * length for at in chosen[first : first + batch_size]]
            yield np.stack([np.asarray(tokens[start : start + length], np.int64) for start in starts])
