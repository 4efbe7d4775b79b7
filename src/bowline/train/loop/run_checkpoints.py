"""Checkpoints of a run, each complete or absent, whenever the machine stops.

`out/checkpoints/step-00000200` holds `model.safetensors` (each tensor once, a tied one under one name),
`optimizer.safetensors` (the optimizer's state of each parameter, as `parameter name.key`) and `state.json`. It is
written to a hidden directory beside it, synchronised, and renamed; only then are older ones renamed and removed. Every
directory called `step-...` is therefore complete, and once one was written there is always one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from bowline.checkpoint import open_checkpoint
from bowline.checkpoint.durable.file_creation import cannot_write, create, fill
from bowline.checkpoint.durable.publication import publishing
from bowline.checkpoint.formats.safetensors_writer import Payload, write_payloads
from bowline.checkpoint.formats.strict_json import loads
from bowline.checkpoint.places.closeable import Closing
from bowline.errors import BowlineError, CheckpointError, UsageError
from bowline.functional.row_shard import is_dtensor
from bowline.nn.state.gathering import Whole
from bowline.nn.state.mapped_tensors import stored_tensor
from bowline.nn.state.torch_dtypes import NAMES
from bowline.nn.tree.sharding import spread_like
from bowline.train.loop.directory_lock import locked
from bowline.wording import listed

__all__ = ["Checkpoints", "Saved", "newest", "steps_in"]

STEP = re.compile(r"step-(\d{8,})")
LEFT = re.compile(r"\.step-\d{8,}\..*")
"""Leftovers of a killed process: part of a new checkpoint, or of an old one that was being removed."""
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps of a parameter."""
KEPT: dict[str, Any] = {"step": int, "settings": dict, "pending": list, "before": list}
"""The keys that `Trainer` needs in a state, and their types."""


class Saved:
    """One saved checkpoint: its directory and the content of `state.json`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        path = directory / STATE
        try:
            state = loads(path.read_bytes(), str(path))
        except OSError as error:
            raise self._damaged(f"{STATE} cannot be read: {error.strerror or error}") from error
        except BowlineError as error:
            raise self._damaged(error.message) from error
        if not isinstance(state, dict) or any(not isinstance(state.get(name), kind) for name, kind in KEPT.items()):
            raise self._damaged(f"{STATE}: expected an object with {', '.join(KEPT)}")
        self.state: dict[str, Any] = state
        self.step: int = state["step"]

    def expect(self, settings: Mapping[str, Any], may_differ: Collection[str]) -> None:
        """Check that this was saved by a run with the same settings, except those in `may_differ`.

        Raises:
            UsageError: other settings differ; the message names them.
        """
        before = self.state["settings"]
        odd = [name for name in settings if name not in may_differ and before.get(name) != settings[name]]
        if odd:
            seen = "; ".join(f"{name} was {before.get(name)!r} and is {settings[name]!r}" for name in odd)
            raise UsageError(
                f"{self.directory}: was saved with other settings: {seen}",
                help="resume with the settings of its run, or start a new run in another directory",
            )

    @torch.no_grad()
    def restore(self, model: nn.Module, optimizer: Optimizer | None, copies: Mapping[str, str] | None = None) -> None:
        """Copy the saved values into a model and an optimizer that are built like those that were saved.

        Args:
            model: the whole model, or a stage of it; its tensors may be spread over processes.
            optimizer: that of the model; None if only the model is wanted.
            copies: for a stage, the names of its copies that are saved under other names, with those names.

        Raises:
            CheckpointError: the checkpoint is of another model, or its files cannot be read.
        """
        held = model_tensors(model)
        stored = self.tensors(MODEL)
        moments = self.tensors(OPTIMIZER) if optimizer is not None else {}
        if copies is not None:
            stored = {name: stored[source] for name in held if (source := copies.get(name, name)) in stored}
            moments = {
                f"{name}.{key}": moments[f"{source}.{key}"]
                for name in held
                for key in MOMENTS
                if f"{(source := copies.get(name, name))}.{key}" in moments
            }
        if stored.keys() != held.keys() or any(stored[name].shape != held[name].shape for name in held):
            odd = sorted(
                name
                for name in stored.keys() | held.keys()
                if name not in stored or name not in held or stored[name].shape != held[name].shape
            )
            raise CheckpointError(
                f"{self.directory}: was saved from another model: {listed(odd, 3)} "
                f"{'differ' if len(odd) > 1 else 'differs'} in name or shape",
                help="resume with the model that was trained, or start a new run in another directory",
            )
        for name, tensor in held.items():
            tensor.copy_(spread_like(stored[name], tensor) if is_dtensor(tensor) else stored[name])
        if optimizer is None:
            return
        named = {name: parameter for name, parameter in held.items() if isinstance(parameter, nn.Parameter)}
        optimizer.state.clear()
        for name, tensor in moments.items():
            parameter, _, key = name.rpartition(".")
            if parameter not in named:
                raise CheckpointError(f"{self.directory / OPTIMIZER}: {name}: the model has no such parameter")
            own = named[parameter]
            alike = tensor.shape == own.shape
            optimizer.state[own][key] = _as_held(tensor, own) if alike else tensor.clone().to(own.device)

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Return the tensors of the file `name`."""
        try:
            with open_checkpoint(self.directory / name) as checkpoint:
                return {name: stored_tensor(checkpoint, tensor) for name, tensor in checkpoint.tensors.items()}
        except BowlineError as error:
            raise self._damaged(error.message) from error

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self.directory}: is damaged: {why}",
            help="remove it to resume from the checkpoint before it, if there is one",
        )


class Checkpoints(Closing):
    """The checkpoints in `directory`, of which the newest `keep` stay. Only one process can open them at a time."""

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory, self.keep = directory, keep
        self._lock = ExitStack()

    def __enter__(self) -> Self:
        """Lock the directory, and remove leftovers of a killed process.

        Raises:
            UsageError: another process holds the lock.
            CheckpointError: the directory cannot be created.
        """
        self._lock.enter_context(locked(self.directory))
        for left in self.directory.iterdir():
            if LEFT.fullmatch(left.name):
                shutil.rmtree(left, ignore_errors=True)
        return self

    def close(self) -> None:
        self._lock.close()

    def save(
        self,
        tensors: Mapping[str, torch.Tensor],
        moments: Mapping[str, torch.Tensor],
        state: Mapping[str, Any],
        whole: Whole | None = None,
    ) -> Path:
        """Write the checkpoint of `state["step"]`, then remove all but the newest `keep`.

        Args:
            tensors: those of the model.
            moments: those of the optimizer.
            state: see `Saved`.
            whole: gathers the tensor of a name from all processes (`bowline.nn.state.gathering`); by default each
                tensor is whole.

        Raises:
            CheckpointError: it cannot be written; earlier checkpoints are unchanged.
        """
        path = self._path(state["step"])
        with publishing(path, replaces=lambda name: True) as stage:
            try:
                _write(stage / MODEL, tensors, whole)
                _write(stage / OPTIMIZER, moments, whole)
                fill(create(stage / STATE), json.dumps(state, indent=1).encode() + b"\n", 0o644)
            except OSError as error:
                raise cannot_write(path, error) from error
        for step in steps_in(self.directory)[: -self.keep]:
            old = self._path(step)
            with suppress(OSError):
                gone = old.rename(old.with_name(f".{old.name}.removed"))
                shutil.rmtree(gone, ignore_errors=True)
        return path

    def _path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"


def steps_in(directory: Path) -> list[int]:
    """Return the steps of the checkpoints in `directory`, newest last."""
    with suppress(FileNotFoundError):
        found = (STEP.fullmatch(path.name) for path in directory.iterdir())
        return sorted(int(match[1]) for match in found if match)
    return []


def newest(directory: Path) -> Saved | None:
    """Return the newest checkpoint in `directory`, or None."""
    steps = steps_in(directory)
    return Saved(directory / f"step-{steps[-1]:08d}") if steps else None


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return each parameter and each saved buffer once, under the first of its names."""
    kept = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return {**dict(model.named_parameters()), **buffers}


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Return the optimizer's state of each parameter, as `name.key`."""
    return {
        f"{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _as_held(stored: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """A stored tensor as a copy on the device of `held`, and spread over the processes as that is."""
    return spread_like(stored, held) if is_dtensor(held) else stored.clone().to(held.device)


def _write(path: Path, tensors: Mapping[str, torch.Tensor], whole: Whole | None) -> None:
    payloads = [_payload(name, tensor, whole or tensors.__getitem__) for name, tensor in tensors.items()]
    with os.fdopen(create(path), "wb") as file:
        write_payloads(file, payloads, {"format": "pt"})
        file.flush()
        os.fsync(file.fileno())


def _payload(name: str, tensor: torch.Tensor, whole: Whole) -> Payload:
    def data() -> Any:
        flat = whole(name).detach().cpu().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy() if flat.numel() else b""

    return Payload(name=name, dtype=NAMES[tensor.dtype], shape=tuple(tensor.shape), data=data)
