"""A checkpoint to a model: names translated, what is missing drawn, the rest mapped, and all of it reported."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from bowline.checkpoint import Checkpoint, open_checkpoint
from bowline.checkpoint.locations import located
from bowline.errors import CheckpointError, ConfigError, TieError, UsageError
from bowline.models.common.stored_config import checked_path, stored_config
from bowline.nn import keep_tied, load_checkpoint
from bowline.nn.tree.slots import slots

__all__ = ["LoadingInfo", "checked_device", "from_pretrained", "live_name"]

log = logging.getLogger(__name__)
OLD_NAMES = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))
"""As the first port from TensorFlow called them."""


@dataclass(frozen=True, kw_only=True)
class LoadingInfo:
    """`missing_keys` were drawn, `unexpected_keys` have no place in the class, `mismatched_keys` have another shape.

    A mismatched key comes with the two shapes, the file's and the model's.
    """

    missing_keys: tuple[str, ...]
    unexpected_keys: tuple[str, ...]
    mismatched_keys: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]

    def __bool__(self) -> bool:
        return not (self.missing_keys or self.unexpected_keys or self.mismatched_keys)


@runtime_checkable
class DrawsItself(Protocol):
    """A model that can draw its own modules anew, one by one: every `PreTrainedModel`."""

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
    """A `cls` with the weights of the checkpoint at `path` (directory, file, or `org/name[@revision]`), in eval mode.

    The file is mapped, not read, where the dtype and the device let it be. A file of a model without a head loads into
    one with, and the other way; what the class has and the file has not is drawn as in a new model.

    Args:
        cls: one of the families' classes.
        path: where the checkpoint is.
        config: in place of the file's.
        dtype: of the floating-point weights: a torch dtype, its name, or "auto", the config's; otherwise float32.
        torch_dtype: the older name of `dtype`.
        device: where the model is to be.
        on_conflict: what to do where the file holds two different ends of a tie: see `bowline.nn.load_state`. The
            default raises, except where the config's flag is known to say nothing (a T5 re-saved by transformers 5).
        ignore_mismatched_sizes: tensors of another shape are drawn too, not refused.
        output_loading_info: returns (model, `LoadingInfo`).
        overrides: values of the config, in place of the file's.

    Raises:
        CheckpointError: it cannot be read, or its shapes do not fit.
        ConfigError: its config means nothing, or is another family's.
        UsageError: an override that is no key of the config, a dtype that is none, or a device that is not there.
        TieError: it holds two different ends of what the config says is one matrix.
    """
    place = checked_device(device)
    with open_checkpoint(checked_path(path)) as checkpoint:
        if config is None:
            config = _config(cls, checkpoint)
        stored = {name: tuple(tensor.shape) for name, tensor in checkpoint.tensors.items()}
    if not isinstance(config, cls.config_class):
        raise UsageError(
            f"config is a {type(config).__name__}, expected a {cls.config_class.__name__}",
            help=f"{cls.config_class.__name__}.from_dict reads a mapping",
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
    _tell(cls, info, checkpoint.location)
    if place.type != "cpu":
        with keep_tied(model):
            model = model.to(place)
    model.eval()
    return (model, info) if output_loading_info else model


def checked_device(device: Any) -> torch.device:
    """The device of that name.

    Raises:
        UsageError: no device has the name, or it is not there.
    """
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, TypeError) as error:  # torch has all three for what is not there
        reason = str(error).splitlines()[0]
        raise UsageError(f"device {device!r:.60}: {reason}", help="cpu is always there") from None
    return place


def live_name(name: str, known: Iterable[str], prefix: str) -> str:
    """The model's name for what a file calls `name`: old names made new, the base model's prefix added or left out."""
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
                f"{location}: {taken[live]} and {name} are both {live} of the model, expected one of them",
                help="remove the one that is old",
            )


def _config(cls: type[Any], checkpoint: Checkpoint) -> Any:
    content = stored_config(checkpoint)
    model_type = content.get("model_type")
    if model_type not in (None, cls.config_class.model_type):
        raise ConfigError(
            f"{checkpoint.location}: is a {model_type!r:.60}, expected {cls.config_class.model_type!r} for "
            f"{cls.__name__}",
            help="bowline.models.load(path) picks the class",
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
    """Off meta, and drawn, what no name in the file gives; returns the names of it."""
    known = slots(model)
    groups: dict[int, list[str]] = {}
    for name, slot in known.items():
        if slot.is_parameter:  # a buffer is computed, not drawn: what is on meta and not given, load_checkpoint reports
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
            for module in part._own_modules():  # the table after the head that shares it: its padding row stays zero
                if any(child in lacking for child in module.modules()):
                    part._init_weights(module)
    return [name for names in missing for name in names]


def _tell(cls: type[Any], info: LoadingInfo, location: str) -> None:
    if info.missing_keys:
        log.warning("%s from %s: not in the file, so drawn: %s", cls.__name__, location, _some(info.missing_keys))
    if info.mismatched_keys:
        names = [name for name, _, _ in info.mismatched_keys]
        log.warning("%s from %s: of another shape, so drawn: %s", cls.__name__, location, _some(names))
    if info.unexpected_keys:
        log.info("%s from %s: in the file and of no use: %s", cls.__name__, location, _some(info.unexpected_keys))


def _some(names: Iterable[str], limit: int = 6) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
