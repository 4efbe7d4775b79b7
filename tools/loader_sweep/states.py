"""The states that every class is tried in: which ends are stored, how they differ, and what the flags say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bowline.families.config_levels import config_levels
from bowline.families.resolver import FLAG
from bowline.tie import Tie

__all__ = ["BIN", "OTHER_ROWS", "STATES", "Ends"]

Json = dict[str, Any]
Tensors = dict[str, torch.Tensor]
OTHER_ROWS = 64
"""Rows by which a head is longer or shorter than its config says: a multiple that padded loaders keep."""


@dataclass(frozen=True)
class Ends:
    """A checkpoint as saved (tensors, config) and its head's tie. The saved embedding is in `tensors`."""

    tensors: Tensors
    config: Json
    tie: Tie

    @property
    def table(self) -> torch.Tensor:
        """The matrix of the embedding as saved."""
        return self.tensors[self.tie.source]


Change = Callable[[Ends], tuple[Tensors, Json]]


def _changed(
    ends: Ends, head: torch.Tensor | None, flag: bool | None, *, embedding: bool = True
) -> tuple[Tensors, Json]:
    """The checkpoint with this head (`None`: not stored) and this flag at every level (`None`: absent)."""
    tensors = {name: tensor for name, tensor in ends.tensors.items() if name != ends.tie.target}
    if head is not None:
        tensors[ends.tie.target] = head
    if not embedding:
        del tensors[ends.tie.source]
    return tensors, _flagged(ends.config, flag)


def _flagged(config: Json, flag: bool | None) -> Json:
    """The config with the flag at the top and at every level that has a vocabulary or states the flag."""
    copied = _copy(config)
    for keys, level in config_levels(copied):
        if not keys or FLAG in level or "vocab_size" in level:
            level.pop(FLAG, None)
            if flag is not None:
                level[FLAG] = flag
    return copied


def _nested(ends: Ends, *, top: bool, text: bool) -> Json | None:
    """The config with one flag at the top and another in its text config; `None` if it has no text config."""
    copied = _copy(ends.config)
    inner = copied.get("text_config")
    if not isinstance(inner, dict):
        return None
    copied[FLAG], inner[FLAG] = top, text
    return copied


def _copy(config: Json) -> Json:
    return {key: _copy(value) if isinstance(value, dict) else value for key, value in config.items()}


def _other(table: torch.Tensor) -> torch.Tensor:
    """Another head: the table's rows in reverse."""
    return table.flip(0).contiguous()


def _resized(table: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([table, table[:OTHER_ROWS]])[:rows].contiguous()


def _with_head(head: Callable[[torch.Tensor], torch.Tensor], flag: bool | None) -> Change:
    return lambda ends: _changed(ends, head(ends.table), flag)


def _without_head(flag: bool | None) -> Change:
    return lambda ends: _changed(ends, None, flag)


def _only_head(flag: bool) -> Change:
    return lambda ends: _changed(ends, ends.table.clone(), flag, embedding=False)


def _flipped(ends: Ends) -> tuple[Tensors, Json]:
    stated = ends.config.get(FLAG, ends.config.get("text_config", {}).get(FLAG, True))
    return dict(ends.tensors), _flagged(ends.config, not stated)


def _two_levels(*, top: bool, text: bool, diverged: bool) -> Change:
    def change(ends: Ends) -> tuple[Tensors, Json]:
        tensors, _ = _changed(ends, _other(ends.table) if diverged else None, None)
        config = _nested(ends, top=top, text=text)
        if config is None:
            raise LookupError("the config has no text config")
        return tensors, config

    return change


def _longer(table: torch.Tensor) -> torch.Tensor:
    return _resized(table, len(table) + OTHER_ROWS)


def _shorter(table: torch.Tensor) -> torch.Tensor:
    return _resized(table, len(table) - OTHER_ROWS)


STATES: dict[str, Change] = {
    "as saved": lambda ends: (dict(ends.tensors), ends.config),
    "equal copy, flag true": _with_head(torch.Tensor.clone, True),
    "equal copy, flag false": _with_head(torch.Tensor.clone, False),
    "equal copy, flag absent": _with_head(torch.Tensor.clone, None),
    "diverged, flag true": _with_head(_other, True),
    "diverged, flag false": _with_head(_other, False),
    "diverged, flag absent": _with_head(_other, None),
    "head missing, flag true": _without_head(True),
    "head missing, flag false": _without_head(False),
    "head missing, flag absent": _without_head(None),
    "flag flipped": _flipped,
    "only the head, flag true": _only_head(True),
    "only the head, flag false": _only_head(False),
    "float32 head, equal once cast": _with_head(torch.Tensor.float, True),
    "float32 head, different": _with_head(lambda table: _other(table).float(), True),
    "head longer, flag true": _with_head(_longer, True),
    "head longer, flag false": _with_head(_longer, False),
    "head shorter, flag true": _with_head(_shorter, True),
    "head shorter, flag false": _with_head(_shorter, False),
    "top true, text false, head missing": _two_levels(top=True, text=False, diverged=False),
    "top false, text true, head missing": _two_levels(top=False, text=True, diverged=False),
    "top true, text false, diverged": _two_levels(top=True, text=False, diverged=True),
    "top false, text true, diverged": _two_levels(top=False, text=True, diverged=True),
    "as saved, .bin": lambda ends: (dict(ends.tensors), ends.config),
    "diverged, flag true, .bin": _with_head(_other, True),
}
"""Each state by its name, as the change that makes it; a change raises `LookupError` where the class cannot have it."""

BIN = frozenset(name for name in STATES if name.endswith(".bin"))
"""The states that are written as `pytorch_model.bin`."""
