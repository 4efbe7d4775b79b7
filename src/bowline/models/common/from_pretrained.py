"""Loading a model from a checkpoint: names are translated, missing tensors are drawn, and both are reported."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from bowline.checkpoint import Checkpoint, open_checkpoint
from bowline.errors import CheckpointError, ConfigError, TieError, UsageError
from bowline.models.common.stored_config import checked_path, stored_config
from bowline.nn import keep_tied, load_checkpoint
from bowline.nn.tree.slots import slots
from bowline.wording import listed, located

__all__ = ["LoadingInfo", "checked_device", "from_pretrained", "live_name"]

log = logging.getLogger(__name__)
NAMED = 6
"""The most tensors that a log line names."""
OLD_NAMES = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))
"""Names of the first port from TensorFlow, and their present names."""


@dataclass(frozen=True, kw_only=True)
class LoadingInfo:
    """The tensors that did not come from the file, or did not fit.

    `missing_keys` were drawn, `unexpected_keys` have no place in the class, and `mismatched_keys` have another shape,
    given as (name, shape in the file, shape in the model).
    """

    missing_keys: tuple[str, ...]
    unexpected_keys: tuple[str, ...]
    mismatched_keys: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]

    def __bool__(self) -> bool:
        return not (self.missing_keys or self.unexpected_keys or self.mismatched_keys)


@runtime_checkable
class DrawsItself(Protocol):
    """The methods by which a model draws its own modules one by one. Every `PreTrainedModel` has them."""

    def _own_modules(self) -> list[nn.Module]: ...

    def _init_weights(self, module: nn.Module) -> None: ...


def from_pretrained(
    cls: type[Any],
    path: str | os.PathLike[str],
    *,
    config: Any = None,
    dtype: torch.dtype | str | None = None,
    torch_dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    on_conflict: str | None = None,
    ignore_mismatched_sizes: bool = False,
    output_loading_info: bool = False,
    **overrides: Any,
) -> Any:
    """Load a model of class `cls` with the weights of a checkpoint, in eval mode.

    The file is memory-mapped instead of read if dtype and device allow it. The checkpoint of a model without a head
    loads into a class with one, and the other way round; tensors that the file lacks are drawn as in a new model.

    Args:
        cls: one of the families' classes.
        path: a directory, a file, or `org/name[@revision]` on the Hub.
        config: a config to use instead of the file's.
        dtype: for floating-point weights: a torch dtype, its name, or "auto" for the config's; float32 by default.
        torch_dtype: the older name of `dtype`.
        device: the device to put the model on.
        on_conflict: what to do if the file holds two different matrices for a tie: see `bowline.nn.load_state`. The
            default raises, unless the config's flag is known to be meaningless (a T5 re-saved by transformers 5).
        ignore_mismatched_sizes: draw tensors of another shape instead of raising an error.
        output_loading_info: return (model, `LoadingInfo`).
        overrides: values that replace those of the config.

    Raises:
        CheckpointError: the checkpoint cannot be read, or its shapes do not fit.
        ConfigError: the config has an invalid value, or is another family's.
        UsageError: an override that the config does not have, an invalid dtype, or a device that does not exist.
        TieError: the file holds two different matrices where the config says tied.
    """
    place = checked_device(device)
    with open_checkpoint(checked_path(path)) as checkpoint:
        if config is None:
            config = _config(cls, checkpoint)
        stored = {name: tuple(tensor.shape) for name, tensor in checkpoint.tensors.items()}
    if not isinstance(config, cls.config_class):
        raise UsageError(
            f"config is a {type(config).__name__}, expected a {cls.config_class.__name__}",
            help=f"make one from a mapping with {cls.config_class.__name__}.from_dict",
        )
    config = config.updated(**overrides)  # a copy: the model may change its own
    with torch.device("meta"):
        model = cls(config).to(_dtype(dtype if dtype is not None else torch_dtype, config))
    known = slots(model)
    names = {name: live_name(name, known, cls.base_model_prefix) for name in stored}
    _check_names(names, known, checkpoint.location)
    mismatched = tuple(
        (live, stored[name], tuple(known[live].tensor.shape))
        for name, live in names.items()
        if live in known and stored[name] != tuple(known[live].tensor.shape)
    )
    if mismatched and not ignore_mismatched_sizes:
        name, theirs, ours = mismatched[0]
        do = "tensor does" if len(mismatched) == 1 else "tensors do"
        raise CheckpointError(
            f"{checkpoint.location}: {len(mismatched)} {do} not fit, first {name}: {theirs} in the file and "
            f"{ours} in {cls.__name__}",
            help="build from the checkpoint's own config; ignore_mismatched_sizes=True draws them anew",
        )
    unfit = {name for name, _, _ in mismatched}
    given = {live for live in names.values() if live not in unfit}
    fresh = _draw_missing(model, given)
    meant = {name: other for name, other in cls.stand_ins.items() if name in fresh and other in given}
    try:
        report = load_checkpoint(
            model,
            path,
            on_conflict=on_conflict or getattr(config, "on_conflict", "raise"),  # type: ignore[arg-type]
            strict=False,
            rename=lambda name: None if names[name] in unfit else names[name],
        )
    except TieError as error:
        raise TieError(located(error.message, checkpoint.location), help=error.help) from error
    with torch.no_grad():
        for name, other in meant.items():
            model.get_parameter(name).copy_(model.get_parameter(other))
    info = LoadingInfo(
        missing_keys=tuple(name for name in fresh if name not in unfit and name not in meant),
        unexpected_keys=report.unexpected,
        mismatched_keys=mismatched,
    )
    _log_differences(cls, info, checkpoint.location)
    if place.type != "cpu":
        with keep_tied(model):
            model = model.to(place)
    model.eval()
    return (model, info) if output_loading_info else model


def checked_device(device: Any) -> torch.device:
    """Return the device of that name, after allocating on it once.

    Raises:
        UsageError: torch does not know the name, or this machine does not have the device.
    """
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, TypeError) as error:  # torch raises any of these three for a missing device
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"device={device!r:.60}: {reason}", help="use cpu, which always works", argument="device"
        ) from None
    return place


def live_name(name: str, known: Iterable[str], prefix: str) -> str:
    """Return the model's name of the tensor `name` in a file.

    Old names are replaced, and the base model's prefix is added or removed if that makes the name known.
    """
    for old, new in OLD_NAMES:
        name = name.replace(old, new)
    for candidate in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
        if candidate in known:
            return candidate
    return name


def _check_names(names: dict[str, str], known: Iterable[str], location: str) -> None:
    taken: dict[str, str] = {}
    for name, live in names.items():
        if live in known and taken.setdefault(live, name) != name:
            raise CheckpointError(
                f"{location}: {taken[live]} and {name} are both {live} of the model, expected only one of them",
                help="remove the outdated one",
            )


def _config(cls: type[Any], checkpoint: Checkpoint) -> Any:
    content = stored_config(checkpoint)
    model_type = content.get("model_type")
    if model_type not in (None, cls.config_class.model_type):
        raise ConfigError(
            f"{checkpoint.location}: is a {model_type!r:.60}, expected {cls.config_class.model_type!r} for "
            f"{cls.__name__}",
            help="bowline.models.load(path) chooses the class",
        )
    return cls.config_class.from_dict(content)


def _dtype(dtype: torch.dtype | str | None, config: Any) -> torch.dtype:
    if dtype == "auto":
        dtype = config.dtype
    if dtype is None:
        return torch.float32
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UsageError(f"dtype={dtype!r}: expected a floating-point dtype, its name, or 'auto'")
    return found


def _draw_missing(model: nn.Module, given: set[str]) -> list[str]:
    """Draw the parameters that the file does not give, off the meta device, and return their names."""
    known = slots(model)
    groups: dict[int, list[str]] = {}
    for name, slot in known.items():
        if slot.is_parameter:  # load_checkpoint reports missing buffers, which are never drawn
            groups.setdefault(id(slot.tensor), []).append(name)
    missing = [names for names in groups.values() if not given.intersection(names)]
    if not missing:
        return []
    lacking = {known[name].module for names in missing for name in names}
    for names in missing:
        held = known[names[0]].tensor
        new = nn.Parameter(torch.empty_like(held, device="cpu"), requires_grad=held.requires_grad)
        for name in names:
            known[name].put(new)
    with torch.no_grad():
        for part in (part for part in model.modules() if isinstance(part, DrawsItself)):
            for module in part._own_modules():  # a table after its tied head: the padding row stays 0
                if any(child in lacking for child in module.modules()):
                    part._init_weights(module)
    return [name for names in missing for name in names]


def _log_differences(cls: type[Any], info: LoadingInfo, location: str) -> None:
    """Log which tensors did not come from the file, and which tensors of the file are ignored."""
    missing, unexpected = listed(info.missing_keys, NAMED), listed(info.unexpected_keys, NAMED)
    mismatched = listed([name for name, _, _ in info.mismatched_keys], NAMED)
    if missing:
        log.warning("%s from %s: newly initialised, because not in the file: %s", cls.__name__, location, missing)
    if mismatched:
        log.warning("%s from %s: newly initialised, because of another shape: %s", cls.__name__, location, mismatched)
    if unexpected:
        log.info("%s from %s: ignored, because not in the model: %s", cls.__name__, location, unexpected)
