"""Sizes of chunks and blocks: tokens by memory budget and roofline, rows of the vocabulary by cache size."""

from __future__ import annotations

import torch

__all__ = ["block_rows", "chunk_rows", "padded"]

STRIDE = 64
"""Columns to a multiple of which a row of logits is rounded up: bf16 products are faster with aligned rows."""
LOGITS_SHARE = 13 / 16
"""Share of the budget for a chunk of logits on a CPU; the rest is for blocks."""
ROOFLINE = {"cpu": (64, 1024), "cuda": (512, 4096)}
"""Fewest and most rows of a chunk, by device.

For each chunk the three products read the matrix twice, and read and write its gradient, so a chunk of n rows does
about 6 n V D operations for 4 V D numbers moved. Below the first number, memory bandwidth limits the speed and a
smaller chunk saves nothing; above the second, more rows gain nothing. The ratio V / D does not matter.
"""
TILE = {"cpu": 16, "cuda": 128}
"""Rows of a matmul tile, by device: if a chunk is not a multiple, most of its last tile is wasted."""
BLOCK = 2**19
"""Numbers in a block."""
BLOCK_ROWS = (256, 8192)


def padded(size: int) -> int:
    """The row stride of a chunk of logits: the row's size, rounded up to a multiple of `STRIDE`."""
    return -(-size // STRIDE) * STRIDE if size > STRIDE else size


def chunk_rows(rows: int, size: int, dtype: torch.dtype, device: torch.device, budget: int, sums: int = 0) -> int:
    """The number of tokens in a chunk, if `rows` tokens are split into chunks of equal length.

    `sums`: the bytes by which the gradient of the matrix is larger while several chunks are summed into it. They are
    subtracted from the budget unless all tokens fit into one chunk.

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
    """Rows of the vocabulary to widen or multiply at once, so that they stay in a cache."""
    least, most = BLOCK_ROWS
    return max(least, min(most, BLOCK // max(1, width)))
