"""Callbacks that run a `TieGuard` in transformers' Trainer and in Lightning's."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, Protocol, cast

from torch import nn

from bowline.errors import UsageError

__all__ = ["CallbackHooks", "lightning_callback", "trainer_callback"]

LIGHTNING = ("lightning.pytorch", "pytorch_lightning")
"""Two names of one library; their classes are not interchangeable."""


class Guard(Protocol):
    """The methods of a `TieGuard` that the callbacks use."""

    @property
    def model(self) -> nn.Module: ...

    def check(self) -> object: ...

    def step(self) -> object: ...


class _Hooks:
    """What both trainers call alike."""

    def __init__(self, guard: Guard) -> None:
        self._guarded_by = guard

    def on_train_end(self, *state: object, **more: object) -> None:
        self._guarded_by.check()


class TrainerHooks(_Hooks):
    """The methods that `transformers.Trainer` calls; a step is one update of the weights, of any number of batches."""

    def on_train_begin(
        self, args: object, state: object, control: object, model: nn.Module | None = None, **more: object
    ) -> None:
        if model is not None:
            _expect_guarded(self._guarded_by, model)
        self._guarded_by.check()

    def on_step_end(self, args: object, state: object, control: object, **more: object) -> None:
        self._guarded_by.step()

    def on_save(self, args: object, state: object, control: object, **more: object) -> None:
        self._guarded_by.check()


class LightningHooks(_Hooks):
    """The methods that Lightning's `Trainer` calls; a step is one batch, as it has no call after an update."""

    def on_train_start(self, trainer: object, pl_module: nn.Module) -> None:
        _expect_guarded(self._guarded_by, pl_module)
        self._guarded_by.check()

    def on_train_batch_end(self, trainer: object, pl_module: nn.Module, *batch: object) -> None:
        self._guarded_by.step()

    def on_save_checkpoint(self, trainer: object, pl_module: nn.Module, checkpoint: object) -> None:
        self._guarded_by.check()


class CallbackHooks(TrainerHooks, LightningHooks):
    """Makes a guard usable in `callbacks=[guard]` of both trainers, without importing either.

    Both call every method that their own base class has. Those that a guard does not need do nothing, and it has no
    state to save.
    """

    def __init__(self) -> None:
        """There is no other guard than the object itself."""

    @property
    def _guarded_by(self) -> Guard:  # type: ignore[override]
        return cast(Guard, self)

    def __getattr__(self, name: str) -> Any:
        """The other events, also those of later versions."""
        if name.startswith("on_") or name in ("setup", "teardown", "load_state_dict"):
            return _nothing
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def state_dict(self) -> dict[str, Any]:
        return {}

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}-{id(self):x}"  # Lightning expects another key for each callback

    @property
    def _legacy_state_key(self) -> type:
        return type(self)


def _nothing(*state: object, **more: object) -> None:
    """An event that needs no check."""


def trainer_callback(guard: Guard) -> Any:
    """`TrainerHooks` as a `transformers.TrainerCallback`.

    Raises:
        UsageError: transformers is not installed.
    """
    try:
        base = import_module("transformers").TrainerCallback
    except ImportError as error:
        raise UsageError("trainer_callback: transformers is not installed", help="pip install transformers") from error
    return type("TieGuardCallback", (TrainerHooks, base), {})(guard)


def lightning_callback(guard: Guard) -> Any:
    """`LightningHooks` as a `Callback` of the Lightning that is in use.

    Raises:
        UsageError: neither lightning nor pytorch_lightning is installed.
    """
    for name in sorted(LIGHTNING, key=lambda name: name not in sys.modules):  # imported ones first
        try:
            base = import_module(name).Callback
        except ImportError:
            continue
        return type("TieGuardCallback", (LightningHooks, base), {})(guard)
    raise UsageError(
        "lightning_callback: neither lightning nor pytorch_lightning is installed", help="pip install lightning"
    )


def _expect_guarded(guard: Guard, trained: nn.Module) -> None:
    """Raise if the guard watches another model (`model_init`, a copy), because it would silently see nothing."""
    if {id(module) for module in guard.model.modules()}.isdisjoint(id(module) for module in trained.modules()):
        raise UsageError(
            f"the trainer trains a {type(trained).__name__} that shares no module with the guard's "
            f"{type(guard.model).__name__}, expected the guarded model",
            help="guard the model that is trained: TieGuard(trainer.model)",
        )
