"""How much at once: rows of tokens from a memory budget and a roofline, rows of the vocabulary from a cache."""

from __future__ import annotations

import torch

__all__ = ["block_rows", "chunk_rows", "padded"]

STRIDE = 64
"""Columns that a row of logits is rounded up to: products of bf16 like aligned rows."""
LOGITS_SHARE = 13 / 16
"""Of the budget, what a chunk of logits takes on a CPU; the rest is for blocks."""
ROOFLINE = {"cpu": (64, 1024), "cuda": (512, 4096)}
"""Rows, at least and at most, by device.

For each chunk the three products read the matrix twice, and read and write its gradient, so a product of n rows does
about 6 n V D operations for 4 V D numbers moved. Below the first, memory sets the pace and a smaller chunk saves
nothing; above the second, more rows gain nothing. V / D has no say in it.
"""
TILE = {"cpu": 16, "cuda": 128}
"""Rows that are multiplied at once, by device: of a chunk that is no multiple, the last are mostly waste."""
BLOCK = 2**19
"""Numbers in a block."""
BLOCK_ROWS = (256, 8192)


def padded(size: int) -> int:
    """The row stride of a chunk of logits."""
    return -(-size // STRIDE) * STRIDE if size > STRIDE else size


def chunk_rows(rows: int, size: int, dtype: torch.dtype, device: torch.device, budget: int, sums: int = 0) -> int:
    """Of `rows` tokens, how many at once, in chunks of equal length.

    `sums`: bytes by which the gradient of the matrix is larger while it is the sum of several chunks. They come off the
    budget, and are not needed where all tokens fit into it at once.

    Example:
        >>> cpu = torch.device("cpu")
        >>> chunk_rows(2048, 50257, torch.bfloat16, cpu, 64 * 2**20), chunk_rows(2048, 50257, torch.float32, cpu, 2**26)
        (512, 256)
    """
    least, most = ROOFLINE.get(device.type, ROOFLINE["cuda"])
    tile = TILE.get(device.type, TILE["cuda"])
    share = LOGITS_SHARE if device.type == "cpu" else 1
    room = int(share * budget) // (padded(size) * dtype.itemsize)
    if sums and rows <= room:
        return max(1, rows)
    fits = int(share * (budget - sums)) // (padded(size) * dtype.itemsize)
    limit = max(least, min(most, fits))
    if rows <= limit or (device.type == "cpu" and limit < tile):
        tile = 1
    limit = max(tile, limit // tile * tile)
    chunks = max(1, -(-rows // limit))
    return max(1, -(-rows // (chunks * tile)) * tile)


def block_rows(width: int) -> int:
    """Rows of the vocabulary that are widened or multiplied at once: what stays in a cache."""
    least, most = BLOCK_ROWS
    return max(least, min(most, BLOCK // max(1, width)))
