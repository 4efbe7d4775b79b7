"""Lists the changes that an adapter makes to the parameters of its base."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from bowline.checkpoint.formats.peft_adapter import Adapter, AdapterConfig, AdapterTensor, Part
from bowline.checkpoint.formats.strict_json import shown
from bowline.edit.adapter.adapted_weight import Added, FromAdapter, LowRank, Normalised, WrittenRows
from bowline.edit.adapter.adapter_file import AdapterFile
from bowline.edit.content import Cast, Content
from bowline.errors import FormatError, UsageError

__all__ = ["ParameterChange", "module_changes", "refuse_unmergeable"]

MERGED_TYPES = ("LORA", "TRAINABLE_TOKENS")
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
PAIRS = ((Part.LORA_A, Part.LORA_B), (Part.EMBEDDING_A, Part.EMBEDDING_B))
CONVOLVED = re.compile(r".*\.(c_attn|c_fc|c_proj|q_attn)")
"""Modules of GPT-2 and its like, some of which store their weights transposed (transformers' Conv1D)."""
UNMERGEABLE: Mapping[str, str] = {
    "alora_invocation_tokens": "an activated LoRA counts only from its invocation tokens on",
    "arrow_config": "Arrow chooses between adapters token by token",
    "kasa_config": "KaSA changes the base beside its factors",
    "layer_replication": "layer_replication adds layers, which the base does not have",
    "monteclora_config": "MonteCLoRA draws its factors",
    "target_parameters": "target_parameters adapts parameters of fused experts",
    "use_bdlora": "a block-diagonal LoRA has factors of another layout",
    "use_qalora": "QALoRA pools the inputs of a quantised layer",
    "velora_config": "VeLoRA keeps tensors of its own beside the factors",
}
"""Settings under which a merge is another sum than W + s · B A, or none."""
CHANGES_BASE = re.compile(r"(?i)(pissa.*|corda.*|olora|mica|loftq|lora_ga)")
"""Values of `init_lora_weights` with which PEFT changes the base's own weights when the adapter is put on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterChange:
    """One change of one parameter: a phrase for the report, and the function that makes it.

    `make` turns the base's tensor into the merged one; `base_copy` means that the tensor is the base's own, stored with
    the adapter.
    """

    module: str
    attribute: str
    text: str
    tensors: tuple[AdapterTensor, ...]
    make: Callable[[Content], Content]
    base_copy: bool = False
    replaces: bool = False


def refuse_unmergeable(adapter: Adapter) -> None:
    """Raise for an adapter that cannot be merged by adding deltas and copying tensors.

    Raises:
        UsageError: its PEFT type, or a setting of it, is not one that can be merged.
        FormatError: it has tensors of an unknown kind.
    """
    config = adapter.config
    if config.peft_type not in MERGED_TYPES:
        raise UsageError(
            f"{adapter.location}: a PEFT adapter of type {config.peft_type}, expected {' or '.join(MERGED_TYPES)}",
            help="merge it with PEFT (merge_and_unload), if that type can be merged",
        )
    for key, why in UNMERGEABLE.items():
        if config.raw.get(key):
            raise UsageError(f"{adapter.location}: {key} is set, and {why}", help="serve the adapter beside its base")
    initialised = config.raw.get("init_lora_weights")
    if isinstance(initialised, str) and CHANGES_BASE.fullmatch(initialised):
        raise UsageError(
            f"{adapter.location}: init_lora_weights is {shown(initialised)}, with which PEFT changes the base itself",
            help="save the adapter as a plain LoRA: save_pretrained(..., path_initial_model_for_weight_conversion=...)",
        )
    for tensor in adapter.tensors:
        if tensor.part in (Part.UNKNOWN, Part.METHOD):
            raise FormatError(
                f"{adapter.file}: {shown(tensor.name)} does not belong to a LoRA adapter",
                help="merge the adapter with the tool that wrote it",
            )
        if tensor.stored.dtype not in FLOATS:
            raise FormatError(
                f"{adapter.file}: {shown(tensor.name)} is stored as {tensor.stored.dtype}, expected a float dtype",
                help="save the adapter again with PEFT, not quantised",
            )


def module_changes(
    config: AdapterConfig,
    file: AdapterFile,
    module: str,
    tensors: Sequence[AdapterTensor],
    shape_of: Callable[[str], tuple[int, ...] | None],
    *,
    transposed_like: Callable[[], bool],
    rows: tuple[int, ...] | None = None,
) -> Iterator[ParameterChange]:
    """The changes of one module.

    Arguments:
        config: the adapter's.
        file: its weights.
        module: the module's path in the base model.
        tensors: the adapter's tensors of this module.
        shape_of: gives the base's shape of an attribute, `None` if the base does not store it.
        transposed_like: says whether modules of this name hold their weights transposed, where the shape cannot.
        rows: the ids of trained rows.

    Raises:
        FormatError: a factor is missing, does not fit, or two tensors claim one parameter.
    """
    parts: dict[Part, AdapterTensor] = {}
    whole: dict[str, AdapterTensor] = {}
    copies: dict[str, AdapterTensor] = {}
    for tensor in tensors:
        into: dict[Any, AdapterTensor] = parts
        key: Any = tensor.part
        if tensor.part in (Part.SAVED, Part.BIAS):
            into, key = whole, tensor.attribute
        elif tensor.part is Part.BASE:
            into, key = copies, tensor.attribute
        if key in into:
            raise _collide(file, into[key], tensor)
        into[key] = tensor
    factors = next((pair for pair in PAIRS if any(part in parts for part in pair)), None)
    delta = [one for part, one in parts.items() if part is not Part.LORA_BIAS]
    if "weight" in whole and delta:
        raise _collide(file, whole["weight"], delta[0])
    if Part.TOKENS in parts and factors is not None:
        raise _collide(file, parts[Part.TOKENS], parts[factors[0]])
    yield from (_copied(file, module, one, shape_of(name), is_base=True) for name, one in copies.items())
    yield from (_copied(file, module, one, shape_of(name), is_base=False) for name, one in whole.items())
    held = copies["weight"].stored.shape if "weight" in copies else shape_of("weight")
    if Part.TOKENS in parts:
        yield _written(file, module, parts[Part.TOKENS], rows, held)
    if factors is not None:
        yield from _low_rank(config, file, module, parts, factors, held, transposed_like)
    elif Part.MAGNITUDE in parts or Part.LORA_BIAS in parts:
        stray = parts.get(Part.MAGNITUDE) or parts[Part.LORA_BIAS]
        raise FormatError(f"{file.name}: {stray.name} has no factors beside it", help="save the adapter again")


def _copied(
    file: AdapterFile, module: str, tensor: AdapterTensor, shape: tuple[int, ...] | None, *, is_base: bool
) -> ParameterChange:
    if not is_base and shape is not None and tensor.stored.shape != shape:
        raise _misfit(file, tensor, f"is {list(tensor.stored.shape)}, and the base's is {list(shape)}")

    def make(base: Content) -> Content:
        found = FromAdapter(file, tensor)
        return found if found.dtype == base.dtype else Cast(found, base.dtype)

    text = "the base's own table" if is_base else "a trained bias" if tensor.part is Part.BIAS else "a saved module"
    return ParameterChange(
        module=module,
        attribute=tensor.attribute,
        text=text,
        tensors=(tensor,),
        make=make,
        base_copy=is_base,
        replaces=True,
    )


def _written(
    file: AdapterFile,
    module: str,
    tensor: AdapterTensor,
    rows: tuple[int, ...] | None,
    shape: tuple[int, ...] | None,
) -> ParameterChange:
    if rows is None:
        raise FormatError(
            f"{file.name}: {tensor.name} holds trained rows, and no entry of the config lists their ids",
            help="save the adapter again with PEFT's save_pretrained",
        )
    if shape is not None and (tensor.stored.shape != (len(rows), shape[-1]) or max(rows, default=-1) >= shape[0]):
        seen = f"is {list(tensor.stored.shape)} for {len(rows)} rows up to {max(rows, default=0)}"
        raise _misfit(file, tensor, f"{seen}, and the base's table is {list(shape)}")
    return ParameterChange(
        module=module,
        attribute="weight",
        text="trained rows",
        tensors=(tensor,),
        make=lambda base: WrittenRows(base, rows, lambda: file.values(tensor)),
    )


def _low_rank(
    config: AdapterConfig,
    file: AdapterFile,
    module: str,
    parts: Mapping[Part, AdapterTensor],
    pair: tuple[Part, Part],
    shape: tuple[int, ...] | None,
    transposed_like: Callable[[], bool],
) -> Iterator[ParameterChange]:
    first, second = (parts.get(part) for part in pair)
    if first is None or second is None:
        one = first or second
        assert one is not None
        raise FormatError(
            f"{file.name}: {one.name} is there, and the other factor of the LoRA is not",
            help="fetch the adapter again, or save it again with PEFT's save_pretrained",
        )
    is_embedding = pair[0] is Part.EMBEDDING_A
    a, b = first.stored.shape, second.stored.shape
    if len(a) < 2 or len(b) < 2 or a[0] != b[1] or (math.prod(b[2:]) != 1) or (is_embedding and len(a) != 2):
        raise _misfit(file, first, f"is {list(a)} and {second.name} is {list(b)}: they have no product")
    rank, rows, columns = a[0], b[0], math.prod(a[1:])
    settings = config.settings(module)
    scaling = settings.scaling(rank)
    if settings.rank is not None and settings.rank != rank:
        raise _misfit(file, first, f"has rank {rank}, and the config says {settings.rank}")
    if scaling is None:
        raise UsageError(
            f"{file.name}: alpha_pattern decides about {shown(module)} by a regular expression, which is not run",
            help="write the module's name into alpha_pattern, or merge with PEFT",
        )
    turned = is_embedding
    if shape is not None:
        matrix = (shape[0], math.prod(shape[1:]))
        fits, fits_turned = matrix == (rows, columns), matrix == (columns, rows) and len(shape) == 2
        if (not fits and not fits_turned) or (is_embedding and not fits_turned):
            made = [columns, rows] if is_embedding else [rows, columns]
            raise _misfit(file, first, f"makes a delta of {made}, and the base's weight is {list(shape)}")
        if not is_embedding:
            turned = transposed_like() if fits and fits_turned else fits_turned
    factors = partial(_factors, file, first, second, turned)

    def make(base: Content) -> Content:
        merged = LowRank(base, factors, scaling)
        magnitude = parts.get(Part.MAGNITUDE)
        if magnitude is None:
            return merged
        outputs = merged.shape[1] if turned else merged.shape[0]
        if math.prod(magnitude.stored.shape) != outputs:
            raise _misfit(file, magnitude, f"is {list(magnitude.stored.shape)}, expected {outputs} values")
        return Normalised(merged, lambda: file.values(magnitude), axis=1 if turned else 0)

    kind = "DoRA" if Part.MAGNITUDE in parts else "LoRA"
    deltas = tuple(one for one in (first, second, parts.get(Part.MAGNITUDE)) if one is not None)
    yield ParameterChange(module=module, attribute="weight", text=f"{kind} of rank {rank}", tensors=deltas, make=make)
    bias = parts.get(Part.LORA_BIAS)
    if bias is not None:
        yield ParameterChange(
            module=module,
            attribute="bias",
            text="a LoRA's bias",
            tensors=(bias,),
            make=lambda base: Added(base, lambda: file.values(bias), scaling),
        )


def _factors(
    file: AdapterFile, first: AdapterTensor, second: AdapterTensor, turned: bool
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The factors in the order of the base's axes: (rows, r) and (r, columns)."""
    a, b = file.values(first), file.values(second)
    right, left = a.reshape(a.shape[0], -1), b.reshape(b.shape[0], -1)
    wide = np.promote_types(left.dtype, right.dtype)
    left, right = left.astype(wide, copy=False), right.astype(wide, copy=False)
    return (right.T, left.T) if turned else (left, right)


def _collide(file: AdapterFile, one: AdapterTensor, other: AdapterTensor) -> FormatError:
    return FormatError(
        f"{file.name}: {one.name} and {other.name} both claim one parameter",
        help="train the module in one way: an adapter, saved rows, or modules_to_save",
    )


def _misfit(file: AdapterFile, tensor: AdapterTensor, seen: str) -> FormatError:
    return FormatError(f"{file.name}: {tensor.name} {seen}", help="give the base that the adapter was trained on")
