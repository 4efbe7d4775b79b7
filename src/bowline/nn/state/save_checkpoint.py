"""Saves a live model as a checkpoint whose config agrees with its tensors; the directory changes in one step."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from bowline.checkpoint.durable.publication import publishing
from bowline.checkpoint.durable.shards import Payload, parse_size, write_shards
from bowline.errors import CheckpointError, ConfigError, TieError, UsageError
from bowline.functional.row_shard import is_dtensor
from bowline.nn.config.head_scaling import follows_flag, head_scale
from bowline.nn.config.live_config import write
from bowline.nn.state.gathering import first_writes
from bowline.nn.state.saved_ties import Knots, flag_of_bytes, remade, shared_names, with_flag
from bowline.nn.state.stored_tables import repeated_names, table_names, with_tables
from bowline.nn.state.tensor_names import is_transformers_model, to_disk, unwrapped
from bowline.nn.state.torch_dtypes import NAMES
from bowline.nn.ties.declared_ties import declared_ties
from bowline.nn.ties.tensor_comparison import is_plain
from bowline.nn.tree.sharding import class_name, local_part
from bowline.nn.tree.slots import slots
from bowline.nn.tree.table_slots import SharedTable

__all__ = ["Keep", "save_checkpoint"]

Keep = Literal["source", "both", "target"]
CONFIG = "config.json"
ADAPTER = "adapter_config.json"
ADAPTED = re.compile(r"(^|\.)(base_layer|lora_[A-Za-z]+|modules_to_save|original_module)(\.|$)")
"""Names that adapters give to what they wrap and to what they add."""
WEIGHTS = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")


def save_checkpoint(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    keep: Keep = "source",
    max_shard_size: str | int = "5GB",
) -> tuple[str, ...]:
    """Save `model` so that every loader gets back the same model; returns the names of the weight files.

    `config.json` is the model's own; `tie_word_embeddings` is set as the live tensors are, at every level that decides.
    `keep` says what is stored of a tied matrix. `"source"`: the embedding alone, if every known loader makes the tie
    again; otherwise the matrix is written under each name. `"both"`: two equal tensors, for readers that make no ties.
    `"target"`: the head alone, which transformers 4 cannot read. The names on disk are those that transformers writes
    for its own models. Files are safetensors in shards of at most `max_shard_size`.

    A table that `quantize_tied` made is written as it is, once, and named in the config's `quantization_config`.
    `load_checkpoint` reads it into a model that was built anew; transformers' `from_pretrained` refuses it.

    The directory changes in one step: a crash, a full disk or an error leaves the old checkpoint whole. Old weight
    files are removed, other files stay. Tensors are not copied first; those on an accelerator are moved one at a time.

    A model that is sharded (DTensors) is gathered one tensor at a time, and the first process writes. Every process of
    the default group has to call this, or, if the model is on a mesh of one dimension with some of them, those of the
    mesh. All get the same names, or the same error; a process that is lost meanwhile is a `CheckpointError`.

    Raises:
        TieError: the flag alone decides the tie and the scale before the head (T5 and its relatives in transformers 4,
            Switch Transformers), and no value of it describes the live model (see `untie_weights`).
        CheckpointError: a tensor that safetensors cannot hold, is on meta or quantised, or belongs to an adapter; a
            directory that holds an adapter, or cannot be written.
        UsageError: an option has a value that is not allowed.

    Example:
        >>> import tempfile
        >>> model = nn.ModuleDict({"wte": nn.Embedding(9, 4), "lm_head": nn.Linear(4, 9, bias=False)})
        >>> model["lm_head"].weight = model["wte"].weight
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     save_checkpoint(model, directory + "/tiny")
        ('model.safetensors',)
    """
    if keep not in ("source", "both", "target"):
        raise UsageError(f"keep={keep!r}: expected 'source', 'both' or 'target'", argument="keep")
    parse_size(max_shard_size)
    model = unwrapped(model)
    place = _place(directory, model)
    state = _state(model)
    stored = to_disk(model, state)
    disk = _disk_names(model, state)
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    for name in repeated_names(model):
        if name in state:
            stored.pop(next(iter(to_disk(model, {name: state[name]}))), None)
    groups = [held for group in shared_names(model) if (held := [name for name in group if name in state])]
    tables = {
        next(iter(to_disk(model, {name: state[name]}))): table
        for name, table in table_names(model).items()
        if name in state
    }

    def publish(whole: Callable[[str], torch.Tensor]) -> tuple[str, ...]:
        with publishing(place, replaces=lambda name: WEIGHTS.fullmatch(name) is not None) as stage:
            config = _write_config(model, stage, shapes, place / CONFIG, tables)
            again = remade(model, groups, disk, config, shapes) if keep != "both" else []
            left_out = _left_out(again, keep, model)
            written = stored.keys() - {disk[name] for name in left_out}
            metadata = {"format": "pt", **({} if config else left_out)}
            payloads = [_payload(name, tensor, whole) for name, tensor in stored.items() if name in written]
            return write_shards(stage, payloads, max_shard_size=max_shard_size, metadata=metadata)

    return first_writes(stored, publish) if any(map(is_dtensor, stored.values())) else publish(stored.__getitem__)


def _place(directory: str | os.PathLike[str], model: nn.Module) -> Path:
    if not isinstance(directory, (str, os.PathLike)) or "\0" in os.fsdecode(directory) or not os.fspath(directory):
        raise UsageError(
            f"directory={directory!r:.60}: expected a path", help='for instance "out/my-model"', argument="directory"
        )
    place = Path(directory)
    if is_transformers_model(model) and (place / ADAPTER).exists():
        raise CheckpointError(
            f"{place / ADAPTER}: belongs to an adapter, which from_pretrained would apply to the model saved beside it",
            help="save into another directory, or remove the adapter's files",
        )
    return place


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    state = {name: value for name, value in model.state_dict().items() if name not in ignored}
    ends = tuple(end.rpartition(".")[0] for tie in declared_ties(model, flag=True) for end in (tie.target, tie.source))
    for name, value in state.items():
        if ADAPTED.search(name):
            raise CheckpointError(
                f"{name}: belongs to an adapter, and no loader finds the model's weights under such names",
                help="call merge_lora(model) and save the model that it returns; or save the adapter alone, with PEFT",
            )
        if any(name.startswith(f"{end}.parametrizations.") or name == f"{end}.weight_g" for end in ends):
            raise CheckpointError(
                f"{name}: is part of a parametrized end of a tie, and no loader finds the matrix under such names",
                help="call torch.nn.utils.parametrize.remove_parametrizations (or remove_weight_norm) first",
            )
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{name}: extra state of type {type(value).__name__}, expected a tensor",
                help="safetensors holds only tensors: save that state elsewhere",
            )
        if value.is_meta or not is_plain(local_part(value)):
            what = "on meta" if value.is_meta else f"a {type(value).__name__} of {value.dtype} ({value.layout})"
            raise CheckpointError(
                f"{name}: is {what}, expected a dense tensor with values",
                help="load, gather or dequantise the model first",
            )
        if value.dtype not in NAMES:
            dtype = str(value.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"{name}: has the dtype {dtype}, which safetensors cannot store",
                help="convert it to another dtype, or save it elsewhere",
            )
    return state


def _disk_names(model: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The name on disk of each name of a shared parameter."""
    names = [name for group in shared_names(model) for name in group if name in state]
    return {name: next(iter(to_disk(model, {name: state[name]}))) for name in names}


def _left_out(again: Knots, keep: Keep, model: nn.Module) -> dict[str, str]:
    """The names that are not written, each with the written name of the same matrix."""
    if keep == "source":
        return {name: source for source, *names in again for name in names}
    known = slots(model)
    left: dict[str, str] = {}
    for group in again:
        heads = [name for name in group[1:] if not isinstance(known[name].module, nn.Embedding)]
        head = (heads or group[1:])[0]
        left.update({name: head for name in group if name != head})
    return left


def _payload(name: str, tensor: torch.Tensor, whole: Callable[[str], torch.Tensor]) -> Payload:
    def data() -> Any:
        flat = whole(name).detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy() if flat.numel() else b""

    return Payload(name=name, dtype=NAMES[tensor.dtype], shape=tuple(tensor.shape), data=data)


def _write_config(
    model: nn.Module, stage: Path, shapes: Mapping[str, tuple[int, ...]], old: Path, tables: Mapping[str, SharedTable]
) -> str | None:
    """Write what describes the model beside its weights; returns the text of `config.json`, if there is one.

    If the model has no config that can be written, the old `config.json` stays, and only its flag is set.
    """
    config = copy.deepcopy(getattr(model, "config", None))
    if is_transformers_model(model):
        _write_transformers(model, config, stage)
    elif config is not None and callable(getattr(config, "save_pretrained", None)):
        if hasattr(config, "architectures"):
            write(config, "architectures", [class_name(model)])
        if hasattr(config, "dtype"):
            write(config, "dtype", str(next(model.parameters()).dtype).removeprefix("torch."))
        config.save_pretrained(stage)
    elif dataclasses.is_dataclass(config) and not isinstance(config, type):
        _write_json(stage / CONFIG, dataclasses.asdict(config))
    elif isinstance(config, Mapping):
        _write_json(stage / CONFIG, dict(config))
    elif old.is_file():
        shutil.copy(old, stage / CONFIG)
    path = stage / CONFIG
    if not path.is_file():
        return None
    text, flag = path.read_text(), flag_of_bytes(model)
    if flag is not None:
        _check_scale(model, flag)
        text = with_flag(text, flag, shapes)
    text = with_tables(text, tables)
    path.write_text(text)
    return text


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    for key, value in content.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"config.{key}: {error}, expected a value that JSON can hold", help="store it as text, or leave it out"
            ) from None
    path.write_text(json.dumps(content, indent=2) + "\n")


def _check_scale(model: nn.Module, flag: bool) -> None:
    """Raise a `TieError` if the flag also decides the scale, and its value would not scale as the live model does."""
    scaled = head_scale(model) != 1.0
    if follows_flag(model) and scaled is not flag:
        raise TieError(
            f"{type(model).__name__} {'scales' if scaled else 'does not scale'} its head's input, but its head is "
            f"{'tied' if flag else 'untied'}: one flag decides both, so no config describes this model",
            help="untie_weights(model) moves the scale into the head's own matrix, and clears the flag",
        )


def _write_transformers(model: nn.Module, config: Any, stage: Path) -> None:
    """As `save_pretrained` does: the class, the dtype, how to generate, and the code of a model from the Hub."""
    config.architectures = [class_name(model)]
    config.dtype = str(model.dtype).removeprefix("torch.")
    if getattr(model, "_auto_class", None) is not None:
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, stage, config=config)
    config.save_pretrained(stage)
    if model.can_generate():  # type: ignore[operator]
        model.generation_config.save_pretrained(stage)  # type: ignore[union-attr, operator]
