"""`load_checkpoint`: loads a checkpoint into a live model, by mapping the file if dtype and device allow."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain

import torch
from torch import nn

from bowline.checkpoint import open_checkpoint
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.checkpoint.formats.wrapper_names import added_parts, strip_name
from bowline.checkpoint.weights import UNSEEN
from bowline.errors import CheckpointError, TieError, UsageError
from bowline.functional.row_shard import is_dtensor
from bowline.nn.config.live_config import flag_of
from bowline.nn.state.garbage_collection import without_collections
from bowline.nn.state.load_inventory import survey
from bowline.nn.state.load_state import LoadReport, load_into
from bowline.nn.state.mapped_tensors import stored_tensor
from bowline.nn.state.stored_tables import TABLE_PARTS, match_tables, repeated_names
from bowline.nn.state.tensor_names import is_transformers_model, restored_conversions, to_live, unwrapped
from bowline.nn.state.torchao_tables import table_parts
from bowline.nn.ties.conflict_policy import ConflictOrUntie
from bowline.nn.ties.tensor_comparison import is_plain
from bowline.nn.tree.slots import Slot, slots

__all__ = ["load_checkpoint"]


@torch.inference_mode(False)
@without_collections()
def load_checkpoint(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    on_conflict: ConflictOrUntie = "raise",
    strict: bool = True,
    mmap: bool = True,
    rename: Callable[[str], str | None] | None = None,
    strip: str | Sequence[str] = (),
) -> LoadReport:
    """Load a checkpoint (directory, file, index or `org/name[@revision]`) into `model`; tied before is tied after.

    The model keeps its dtypes and devices. Parameters on the CPU, or on meta, whose dtype is the file's take the mapped
    file for their memory, copy on write: loading costs the header, and pages come as they are touched. Others are
    copied, tensor by tensor. Names are translated as transformers does for its own models; `rename` gives for each name
    in the file the one in the model, or `None` for a tensor to be left alone. Pickles are read without being executed.

    Of a model that is sharded (DTensors: `fully_shard`, tensor parallelism) each process copies its own part of each
    tensor, and reads no more of a mapped file. Every process has to call this, with the same file.

    `strip` removes parts of the names in the file, before `rename`: a training wrapper's segment, as `"_orig_mod."`,
    `"_fsdp_wrapped_module."`, `"_checkpoint_wrapped_module."` or `"module."`, wherever it stands, and any other text,
    as `"net."`, at the front. Nothing is stripped unasked; the error about names that do not fit says what to strip.

    A checkpoint with a table that `quantize_tied` or `bowline quantize` made quantises the model alike: the ends of its
    tie read the table.

    With `mmap` the file must not be rewritten in place while the model lives, as `save_pretrained` into the same
    directory does; `save_checkpoint` replaces files and is safe. `mmap=False` reads everything into memory at once,
    which takes as long as the copy does: seconds for 1.5 GB.

    Raises:
        TieError: the file holds two different ends of one matrix (`on_conflict` as for `load_state`), or an untied head
            is missing.
        UsageError: no name in the file has a part in `strip`.
        CheckpointError: the checkpoint cannot be read, is incomplete, or does not fit: the model is as it was. Or all
            was loaded, and something that no checkpoint holds stays on meta.

    Example:
        >>> with torch.device("meta"):
        ...     model = build_my_model()  # doctest: +SKIP
        >>> print(load_checkpoint(model, "path/to/checkpoint"))  # doctest: +SKIP
        1 tie
    """
    model = unwrapped(model)
    if not isinstance(path, (str, os.PathLike)):
        raise UsageError(
            f"path={path!r:.60}: expected a path or org/name",
            help="load_state takes a state dict",
            argument="path",
        )
    with open_checkpoint(path) as checkpoint:
        if not checkpoint.complete:
            seen = "; ".join(lint.message for lint in checkpoint.lints if lint.kind in UNSEEN) or "one shard of several"
            raise CheckpointError(
                f"{checkpoint.location}: the checkpoint is incomplete: {seen}", help="fetch the missing files"
            )
        parts = table_parts(checkpoint.tensors, checkpoint.metadata)
        held = {parts.get(name, name): tensor for name, tensor in checkpoint.tensors.items()}
        named = _stripped(held, [strip] if isinstance(strip, str) else strip)
        tensors: Mapping[str | None, StoredTensor] = named  # type: ignore[assignment]
        if rename is not None:
            tensors = {rename(name): tensor for name, tensor in named.items()}
        stored = {
            name: stored_tensor(checkpoint, tensor, mapped=mmap) for name, tensor in tensors.items() if name is not None
        }
        unscaled = flag_of(checkpoint.config or {}) is False
        disjoint = all(file.endswith(".safetensors") for file in checkpoint.weight_files)  # checked in the header
    with ExitStack() as undo:
        tables = match_tables(model, stored, undo)
        report = _load(model, stored, on_conflict, strict, unscaled, disjoint)
        undo.pop_all()
    return replace(report, tied=(*report.tied, *tables))


def _load(
    model: nn.Module,
    stored: Mapping[str, torch.Tensor],
    on_conflict: ConflictOrUntie,
    strict: bool,
    unscaled: bool,
    disjoint: bool,
) -> LoadReport:
    before = survey(model)
    optional = _optional(model)
    with (
        restored_conversions(model),
        _naming_added_parts(stored, before.state, getattr(model, "base_model_prefix", "")),
    ):
        state = to_live(model, before.state, stored)
        if any(name.endswith(TABLE_PARTS) for name in state):
            state |= {name: state[first] for name, first in repeated_names(model).items() if first in state}
        dtypes = {name: held.dtype for name, held in before.tensors.items() if _may_take(held, before.plain)}
        taking = set(dtypes)
        if len(dtypes) == len(before.tensors):  # otherwise a hook may rename tensors without a slot of their name
            taking |= state.keys() - dtypes.keys()
        report = load_into(
            model,
            before,
            _fitting(state, dtypes),
            assign=taking.__contains__,
            on_conflict=on_conflict,
            strict=strict,
            optional=optional,
            unscaled=unscaled,
            disjoint=disjoint,
        )
    _off_meta(model, slots(model) if report.untied else before.slots, optional)
    return report


def _stripped(tensors: Mapping[str, StoredTensor], strip: Sequence[str]) -> Mapping[str, StoredTensor]:
    """The tensors by their names without the parts in `strip`; each part must be in a name."""
    for part in strip:
        left = {name: strip_name(name, [part]) for name in tensors}
        if all(name == short for name, short in left.items()):
            raise UsageError(
                f"strip={part!r}: no tensor name in the file has this part",
                help="give a wrapper's segment, or a prefix of the names",
                argument="strip",
            )
        taken: dict[str, str] = {}
        for name, short in left.items():
            if short in taken:
                raise CheckpointError(
                    f"{name} and {taken[short]} are both called {short} without {part!r}, expected different names",
                    help="choose one of the two with rename=",
                )
            taken[short] = name
        tensors = {short: tensors[name] for short, name in taken.items()}
    return tensors


@contextmanager
def _naming_added_parts(stored: Collection[str], own: Collection[str], prefix: str) -> Iterator[None]:
    """Adds to an error of the load which part of the stored names to strip, if wrappers or a prefix are to blame."""
    try:
        yield
    except (CheckpointError, TieError) as error:
        parts = added_parts(stored, own, f"{prefix}." if prefix else "")
        if not parts:
            raise
        seen = "; ".join(
            f"{len(part.names)} of {len(stored)} stored names have the part {part.text!r}" for part in parts
        )
        texts = [part.text for part in parts]
        strip = repr(texts[0]) if len(texts) == 1 else repr(texts)
        raise type(error)(
            f"{error.message}; {seen}",
            help="merge the adapter into the model, save it, and load that"
            if any(part.is_adapter for part in parts)
            else "make the computed weights ordinary ones (remove the pruning or the parametrization), and save again"
            if any(part.is_computed for part in parts)
            else f"load_checkpoint(model, path, strip={strip}) removes {'them' if len(texts) > 1 else 'it'}",
            argument=error.argument,
        ) from error


def _may_take(held: torch.Tensor, plain: bool) -> bool:
    """Whether the parameter may have the stored tensor's memory: a shard only where it has none of its own."""
    if is_dtensor(held):
        return held.is_meta
    return (plain or is_plain(held)) and (held.is_meta or held.is_cpu)


def _fitting(state: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
    """The tensors in the model's dtypes, cast if they differ and not copied otherwise."""
    return {
        name: tensor if tensor.dtype == (dtype := dtypes.get(name, tensor.dtype)) else tensor.to(dtype)
        for name, tensor in state.items()
    }


def _optional(model: nn.Module) -> Callable[[str], bool]:
    """The names that the class allows to be missing or unexpected."""
    patterns = [
        pattern
        for attribute in ("_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected")
        for pattern in getattr(model, attribute, None) or ()
    ]
    if not patterns:
        return lambda name: False
    either = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
    return lambda name: either.search(name) is not None


def _off_meta(model: nn.Module, known: Mapping[str, Slot], optional: Callable[[str], bool]) -> None:
    """Computes tensors that no checkpoint holds (rotary frequencies, position ids), if the model knows how."""
    left = [slot for slot in known.values() if slot.tensor.is_meta]
    if not left:
        return
    fill = getattr(model, "_move_missing_keys_from_meta_to_device", None)
    lost = {slot.name for slot in left if slot.is_parameter}  # Marian's positions are parameters, but in no file
    if is_transformers_model(model) and fill is not None and all(map(optional, lost)):
        for tensor in chain(model.parameters(), model.buffers()):
            if not tensor.is_meta:
                tensor._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers then leaves the tensor alone
        fill(lost, None, None, None)
        model._initialize_missing_keys(False)  # type: ignore[operator]
        for tensor in chain(model.parameters(), model.buffers()):
            tensor.__dict__.pop("_is_hf_initialized", None)
    still = [slot.name for slot in slots(model).values() if slot.tensor.is_meta]
    if still:
        raise CheckpointError(
            f"{', '.join(still[:4])}: still on meta after loading, because the checkpoint does not hold "
            f"{'them' if len(still) > 1 else 'it'}",
            help="build the model on the CPU, or under accelerate.init_empty_weights(include_buffers=False)",
        )
