"""Multipliers of looked-up embeddings and of logits: a recipe's, a model's, and how to set the model's."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import nn

from bowline.errors import BowlineError, UsageError
from bowline.families.quirks import quirks_of
from bowline.nn.config.head_scaling import SCALE, set_scaling
from bowline.nn.config.live_config import live_configs, owner, write
from bowline.nn.init.roles import Found
from bowline.recipes import Architecture, Recipe

__all__ = ["Multipliers", "MultiplierChange", "own_multipliers", "settle"]

KEYS = ("embed_scale", "logit_scale")
SAME = 4e-3
"""Relative tolerance: the rounding of a multiplier that a model holds in bfloat16."""


@dataclass(frozen=True)
class Multipliers:
    """The multipliers of looked-up embeddings and of logits; `None` if the model has no table, or no head."""

    embed: float | None
    logit: float | None


@dataclass(frozen=True)
class MultiplierChange:
    """An entry to write in a model's configs once its weights are drawn."""

    keys: tuple[tuple[Any, str, float], ...] = ()
    scale_decoder_outputs: bool | None = None

    def apply(self, model: nn.Module) -> None:
        """Write the entry."""
        if self.scale_decoder_outputs is not None:
            set_scaling(model, self.scale_decoder_outputs)
        for level, key, value in self.keys:
            write(level, key, value)


def own_multipliers(model: nn.Module, found: Found) -> Multipliers:
    """The model's present multipliers, by its family, its config and its table; 1 if none of them states any."""
    root = owner(model)
    config = getattr(root, "config", None)
    try:
        shape = Architecture.of(config)
        embed, logit = shape.embed_scale, shape.logit_scale
    except BowlineError:
        embed = _table_multiplier(found) or _number(config, "embedding_multiplier") or 1.0
        if embed == 1.0 and quirks_of(getattr(config, "model_type", None)).root_width_scale:
            embed = math.sqrt(config.hidden_size)  # type: ignore[union-attr]
        logit = (_number(config, "logit_scale") or 1.0) / (_number(config, "logits_scaling") or 1.0)
    return Multipliers(embed if found.table else None, logit if found.tied is not None else None)


def _table_multiplier(found: Found) -> float | None:
    """The factor that a table applies itself, as BART's and Gemma's do."""
    module = found.holders[found.table][0].module if found.table else None
    return _number(module, "scalar_embed_scale") or _number(module, "embed_scale")


def _number(one: Any, name: str) -> float | None:
    value = getattr(one, name, None)
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
        value = float(value)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value else None


def settle(
    model: nn.Module, recipe: Recipe, found: Found, sizes: dict[str, float]
) -> tuple[MultiplierChange, Multipliers]:
    """The config entries that give the model the recipe's multipliers, and the resulting multipliers.

    Raises:
        UsageError: the model multiplies by other numbers, and has no config key to change them.
    """
    own = own_multipliers(model, found)
    wanted = Multipliers(
        recipe.embed_scale(sizes) if own.embed is not None else None,
        recipe.logits_by(bool(found.tied))(sizes) if own.logit is not None else None,
    )
    levels = [level for _, level in live_configs(model) if _settable(level)]
    keys: list[tuple[Any, str, float]] = []
    scaled: bool | None = None
    wrong: list[tuple[str, float, float]] = []
    if not _same(own.embed, wanted.embed):
        keys += _times(levels, "embed_scale", own.embed, wanted.embed)
        if not keys:
            wrong.append(("looked-up embeddings", wanted.embed or 0.0, own.embed or 0.0))
    if not _same(own.logit, wanted.logit):
        now, scaled = _by_flag(model, own.logit, wanted.logit)
        beside = _times(levels, "logit_scale", now, wanted.logit) if not _same(now, wanted.logit) else []
        keys += beside
        if not beside and not _same(now, wanted.logit):
            wrong.append(("logits", wanted.logit or 0.0, own.logit or 0.0))
    if wrong:
        its, mine = (" and ".join(f"{one[0]} by {one[at]:.4g}" for one in wrong) for at in (1, 2))
        raise UsageError(
            f"{type(owner(model)).__name__} multiplies {mine}, but the recipe {recipe.name!r} multiplies {its}",
            help='scales="model" keeps the present multipliers; expected_loss(..., scales="model") shows their effect',
        )
    return MultiplierChange(tuple(keys), scaled), wanted


def _same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=SAME)


def _settable(level: Any) -> bool:
    """Whether a config's class defines these keys and reads them at each forward; others read them once, or never."""
    mine = {one.name for one in fields(level)} if is_dataclass(level) else set()
    return mine.issuperset(KEYS) and not type(level).__module__.startswith("transformers.")


def _times(levels: list[Any], key: str, own: float | None, wanted: float | None) -> list[tuple[Any, str, float]]:
    """The key's new value: its present value is a factor of the model's multiplier."""
    if own is None or wanted is None or own == 0:
        return []
    return [(level, key, getattr(level, key) * wanted / own) for level in levels]


def _by_flag(model: nn.Module, own: float | None, wanted: float | None) -> tuple[float | None, bool | None]:
    """The logit multiplier with T5's flag, and the flag, flipped if that comes nearer to the wanted multiplier."""
    config = getattr(owner(model), "config", None)
    stated = getattr(config, SCALE, None)
    if stated is None or not own or not wanted:
        return own, None
    factor = config.d_model**-0.5  # type: ignore[union-attr]
    other = own / factor if stated else own * factor
    if _same(other, wanted) or abs(math.log(wanted / other)) < abs(math.log(wanted / own)):
        return other, not stated
    return own, None
