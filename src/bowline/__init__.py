"""Bowline: weight tying in language models, from the line that declares it to the file that ships it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bowline.audit import audit
    from bowline.checkpoint import open_checkpoint
    from bowline.nn import (
        LMHead,
        MLMHead,
        TieGuard,
        apply_once,
        check_ties,
        declared_ties,
        find_ties,
        init_weights,
        keep_tied,
        linear_cross_entropy,
        load_checkpoint,
        load_state,
        merge_lora,
        quantize_tied,
        resize_vocab,
        save_checkpoint,
        split_gradient,
        tie_weights,
        unique_parameters,
        untie_weights,
        use_tied_loss,
    )
    from bowline.recipes import RECIPES, Recipe, expected_loss
    from bowline.tie import Tie, TieState

__version__ = "0.1.0"

__all__ = [
    "LMHead",
    "MLMHead",
    "RECIPES",
    "Recipe",
    "Tie",
    "TieGuard",
    "TieState",
    "apply_once",
    "audit",
    "check_ties",
    "declared_ties",
    "expected_loss",
    "find_ties",
    "init_weights",
    "keep_tied",
    "linear_cross_entropy",
    "load_checkpoint",
    "load_state",
    "merge_lora",
    "open_checkpoint",
    "quantize_tied",
    "resize_vocab",
    "save_checkpoint",
    "split_gradient",
    "tie_weights",
    "unique_parameters",
    "untie_weights",
    "use_tied_loss",
]

_HOMES = {
    "Tie": "bowline.tie",
    "TieState": "bowline.tie",
    "open_checkpoint": "bowline.checkpoint",
    "RECIPES": "bowline.recipes",
    "Recipe": "bowline.recipes",
    "expected_loss": "bowline.recipes",
    "LMHead": "bowline.nn",
    "MLMHead": "bowline.nn",
    "TieGuard": "bowline.nn",
    "apply_once": "bowline.nn",
    "check_ties": "bowline.nn",
    "declared_ties": "bowline.nn",
    "find_ties": "bowline.nn",
    "init_weights": "bowline.nn",
    "keep_tied": "bowline.nn",
    "linear_cross_entropy": "bowline.nn",
    "load_checkpoint": "bowline.nn",
    "load_state": "bowline.nn",
    "merge_lora": "bowline.nn",
    "quantize_tied": "bowline.nn",
    "resize_vocab": "bowline.nn",
    "save_checkpoint": "bowline.nn",
    "split_gradient": "bowline.nn",
    "tie_weights": "bowline.nn",
    "unique_parameters": "bowline.nn",
    "untie_weights": "bowline.nn",
    "use_tied_loss": "bowline.nn",
}

_ROOMS = frozenset(
    {
        "audit",  # a module that is called as the function is
        "checkpoint",
        "errors",
        "families",
        "geometry",
        "models",
        "nn",
        "plots",
        "recipes",
        "study",
        "tie",
        "train",
    }
)


def __getattr__(name: str) -> Any:
    """Public names and rooms are imported when they are first used: nothing is loaded that is not asked for."""
    if name in _HOMES or name in _ROOMS:
        try:
            return import_module(f"bowline.{name}") if name in _ROOMS else getattr(import_module(_HOMES[name]), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ModuleNotFoundError(
                f"bowline.{name} needs torch, which is not installed: pip install 'bowline[torch]'", name="torch"
            ) from None
    raise AttributeError(f"module 'bowline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
