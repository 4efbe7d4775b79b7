"""The cache of keys and values, with which generation computes only one new position in each step."""

from __future__ import annotations

from typing import Any

import torch

from bowline.errors import UsageError

__all__ = ["KVCache", "check_cache"]

ROOM = 64
"""The least number of free positions in a new buffer."""


class KVCache:
    """Each layer's keys and values (B, H, T, d) of the T tokens seen; `fixed` holds those of an encoder's output.

    Without gradients, buffers grow by half and are written in place; with gradients, new tensors are concatenated. The
    first buffers of all `layers` are allocated together. Allocated one by one, they would lie between the temporary
    tensors of the layers, and that memory could not be returned.
    """

    def __init__(self, layers: int = 1) -> None:
        self._first: torch.Tensor | None = None
        self._layer_count = layers
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._lengths: dict[int, int] = {}
        self.fixed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __len__(self) -> int:
        """Return the number of tokens seen."""
        return self._lengths.get(0, 0)

    @property
    def rows(self) -> int | None:
        """The batch size B, or `None` before the first token."""
        return self._layers[0][0].shape[0] if 0 in self._layers else None

    def get_seq_length(self) -> int:
        """Return `len(cache)`, under transformers' name for it."""
        return len(self)

    def update(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the keys and values (B, H, t, d) of new tokens, and return those of all tokens, (B, H, T + t, d)."""
        seen = self._lengths.get(layer, 0)
        total = self._lengths[layer] = seen + key.shape[2]
        if torch.is_grad_enabled():
            if seen:
                key = torch.cat([self._layers[layer][0][:, :, :seen], key], 2)
                value = torch.cat([self._layers[layer][1][:, :, :seen], value], 2)
            self._layers[layer] = key, value
            return key, value
        if layer not in self._layers or self._layers[layer][0].shape[2] < total:
            self._layers[layer] = self._longer(layer, seen, total, key), self._longer(layer, seen, total, value, 1)
        keys, values = self._layers[layer]
        keys[:, :, seen:total], values[:, :, seen:total] = key, value
        return keys[:, :, :total], values[:, :, :total]

    def _longer(self, layer: int, seen: int, total: int, like: torch.Tensor, which: int = 0) -> torch.Tensor:
        shape = *like.shape[:2], max(total + ROOM, total * 3 // 2), like.shape[3]
        if not seen and layer < self._layer_count:
            if self._first is None:
                self._first = like.new_empty(self._layer_count, 2, *shape)
            if self._first.shape[2:] == shape:  # a layer may have fewer heads
                return self._first[layer, which]
        buffer = like.new_empty(shape)
        if seen:
            self._first = None
            buffer[:, :, :seen] = self._layers[layer][which][:, :, :seen]
        return buffer

    def reorder(self, rows: torch.Tensor) -> None:
        """Row i takes the contents of the former row `rows[i]`: beam search keeps some beams and drops others."""
        self._first = None  # otherwise the first buffers would stay in memory beside the copies
        self._layers = {at: (k.index_select(0, rows), v.index_select(0, rows)) for at, (k, v) in self._layers.items()}
        self.fixed = {at: (k.index_select(0, rows), v.index_select(0, rows)) for at, (k, v) in self.fixed.items()}


def check_cache(cache: Any, batch: int) -> None:
    """Check that `past_key_values` is a `KVCache`, either empty or with as many rows as the batch.

    Raises:
        UsageError: it is not.
    """
    if not isinstance(cache, KVCache):
        raise UsageError(
            f"past_key_values is a {type(cache).__name__}, expected a KVCache",
            help="pass the past_key_values of an output that was computed with use_cache=True",
        )
    if cache.rows not in (None, batch):
        raise UsageError(
            f"past_key_values has {cache.rows} rows and the input {batch}: expected equal numbers",
            help="select or repeat rows with cache.reorder(rows)",
        )
