"""Collects the evidence of a PEFT adapter: its tensors at the ends of the vocabulary, its base, and the merges."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from bowline.auditing.adapter_evidence import AdapterDelta, AdapterEvidence, BaseModel, DeltaKind, End, TiedModule
from bowline.auditing.adapter_merge import PEFTS_NAMES, predict_merges
from bowline.auditing.evidence import Evidence
from bowline.auditing.evidence_gathering import gather
from bowline.auditing.loaders import Fate
from bowline.checkpoint import Checkpoint, open_checkpoint
from bowline.checkpoint.formats.peft_adapter import (
    LORA,
    TRAINABLE_TOKENS,
    Adapter,
    AdapterConfig,
    AdapterTensor,
    Part,
    names_module,
    read_adapter,
)
from bowline.checkpoint.formats.strict_json import shown
from bowline.checkpoint.places.byte_source import ByteSource
from bowline.checkpoint.places.file_set import FileSet
from bowline.errors import CheckpointError
from bowline.families.declaration import Declaration
from bowline.families.resolver import resolve
from bowline.families.transformers_table import load_table
from bowline.tie import TieState

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["gather_adapter", "known_base"]

LOADER = "transformers-5"
LORA_PARTS = frozenset({Part.LORA_A, Part.LORA_B, Part.EMBEDDING_A, Part.EMBEDDING_B, Part.LORA_BIAS, Part.MAGNITUDE})
USUAL_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "shared", "tok_embeddings", "embed_in", "word_embedding")
USUAL_HEADS = ("lm_head", "embed_out", "output_projection", "proj_out", "predictions.decoder", "lm_head.decoder")
"""The last parts of the paths of embeddings and heads, for a base whose class is not known."""
HEADLESS_TASKS = frozenset({"SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION"})
"""PEFT's task types whose models have no output head over the vocabulary."""
MOST_VALUES = 256 << 20
"""Factors of two ends that together have more bytes than this are not compared."""
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


def gather_adapter(files: FileSet, *, values: bool = True, base: Checkpoint | None = None) -> AdapterEvidence:
    """Collect the evidence of the adapter in `files`.

    `base` is its base model; without it, the one that the adapter names is opened, if that is a directory of this
    machine. With `values=False` what the two ends carry is not compared.
    """
    adapter = read_adapter(files)
    model = _as_adapted(_base_model(adapter, base, values=values), adapter.config)
    deltas = tuple(_deltas(adapter, model))
    loaded = [delta for delta in deltas if delta.loaded is not False]
    retied = _retied(adapter.config, model)
    copies = [delta for delta in loaded if delta.kind is DeltaKind.COPY]
    shared_copy = retied is Part.SAVED and len(copies) > 1
    alike = _alike(files, loaded, adapter.config) if values and len(loaded) > 1 else None
    not_finite, zero = _odd_values(files, adapter, loaded) if values else ((), ())
    known = {tensor for delta in deltas for tensor in delta.tensors}
    others = {
        tensor.module: tensor.module.rpartition(".")[2]
        for tensor in adapter.tensors
        if tensor not in known and tensor.part not in (Part.BASE, Part.UNKNOWN) and model.find(tensor.module) is None
    }
    return AdapterEvidence(
        location=adapter.location,
        adapter=adapter,
        base=model,
        deltas=deltas,
        elsewhere=dict(sorted(Counter(others.values()).items())),
        alike=alike,
        merges=predict_merges(model, loaded, alike=alike, shared_copy=shared_copy),
        values_read=values,
        not_finite=not_finite,
        zero=zero,
    )


# --- the base -------------------------------------------------------------------------------------------------------


def _base_model(adapter: Adapter, given: Checkpoint | None, *, values: bool) -> BaseModel:
    if given is not None:
        return known_base(given, values=values, given=True)
    name = adapter.config.base
    if name is None:
        return _unknown_base(adapter, "adapter_config.json names no base model")
    if not os.path.isdir(name):  # noqa: PTH112 - Path.is_dir raises where a folder on the way may not be searched
        return _unknown_base(adapter, f"its base model {shown(name)} is not a directory of this machine")
    try:
        with open_checkpoint(os.path.join(name, "")) as checkpoint:  # noqa: PTH118 - with a slash it is never a Hub name
            return known_base(checkpoint, values=values, given=False)
    except CheckpointError as error:
        return _unknown_base(adapter, f"its base model cannot be read: {error.message}")


def _as_adapted(base: BaseModel, config: AdapterConfig) -> BaseModel:
    """The base without its head, if the adapter is for a task or a class that has none."""
    facts = load_table().architecture(config.base_class) if config.base_class else None
    if config.task in HEADLESS_TASKS:
        headless = config.task
    elif facts is not None and facts.newest.head is None:
        headless = facts.name
    else:
        return base
    places = tuple(place for place in base.places if place.end is not End.HEAD)
    return replace(
        base,
        places=places,
        tied=base.tied if len(places) > 1 else False,
        head_bias=False,
        bias_tied=False,
        headless=headless,
    )


def known_base(checkpoint: Checkpoint, *, values: bool, given: bool) -> BaseModel:
    """Describe an open checkpoint as the base of an adapter: its ends, and whether they are tied."""
    evidence = gather(checkpoint, values=False)
    if values and any(one.state is None and not one.unseen for one in evidence.ties):  # both ends are stored: compare
        evidence = gather(checkpoint, values=True)
    declaration = evidence.declaration
    facts = load_table().architecture(declaration.architecture or "")
    newest = facts.newest if facts is not None and LOADER in facts.declared else None
    live = dict(newest.module_names) if newest is not None else {}
    places = _places(declaration, live)
    tied, reason = _is_tied(evidence)
    head = declaration.head.removesuffix(".weight") if declaration.head else None
    bias = f"{head}.bias"
    bias_tie = next((one for one in evidence.ties if one.tie.target == bias), None)
    shapes = {name: tensor.shape for name, tensor in evidence.tensors.items() if tensor.dtype in FLOATS}
    return BaseModel(
        location=checkpoint.location,
        given=given,
        reason=reason,
        evidence=evidence,
        architecture=declaration.architecture,
        places=places,
        tied=tied,
        head_bias=head is not None and (bias in evidence.tensors or bias_tie is not None),
        bias_tied=bias_tie is not None,
        unused=_unused(places),
        shapes=shapes,
        modules=frozenset(_paths(evidence.tensors)),
        prefix=f"{facts.prefix}." if facts is not None and facts.prefix else "",
        renamed=bool(live),
    )


def _unknown_base(adapter: Adapter, reason: str) -> BaseModel:
    """What the adapter alone tells of its base: the class that it names, or the usual names of embeddings and heads."""
    name = adapter.config.base_class
    facts = load_table().architecture(name) if name else None
    if facts is not None:
        newest = facts.newest
        places = _places(resolve({"architectures": [name]}, {}), dict(newest.module_names))
    else:
        places = tuple(_usual_places(adapter))
    return BaseModel(
        location=adapter.config.base,
        given=False,
        reason=reason,
        evidence=None,
        architecture=name,
        places=places,
        tied=None,
        head_bias=False,
        bias_tied=False,
        unused=_unused(places),
    )


def _places(declaration: Declaration, live: dict[str, str]) -> tuple[TiedModule, ...]:
    """The modules that one matrix serves, its owner first; without a tie, the embedding and the head."""
    head, embedding = declaration.head, declaration.embedding
    main = declaration.find(head or "") or next(iter(declaration.ties), None)
    if main is None or main.tie.target.endswith("bias"):
        names = [name for name in (embedding, head) if name]
    else:
        source = main.tie.source
        names = [source, *(one.tie.target for one in declaration.ties if one.tie.source == source)]
    return tuple(
        TiedModule(
            module=live.get(name, name).removesuffix(".weight"),
            end=End.HEAD if name == head else End.EMBEDDING,
            stored=name.removesuffix(".weight"),
        )
        for name in dict.fromkeys(names)
    )


def _usual_places(adapter: Adapter) -> Iterator[TiedModule]:
    modules = dict.fromkeys(tensor.module for tensor in adapter.tensors)
    for end, usual in ((End.EMBEDDING, USUAL_EMBEDDINGS), (End.HEAD, USUAL_HEADS)):
        for module in modules:
            if any(names_module(name, module) for name in usual):
                yield TiedModule(module=module, end=end, stored=module)


def _unused(places: Sequence[TiedModule]) -> frozenset[str]:
    """An owner that no layer calls: in T5, BART and their like, encoder and decoder look tokens up in their own."""
    ends = [place.module for place in places]
    own = all(any(names_module(f"{side}.embed_tokens", module) for module in ends) for side in ("encoder", "decoder"))
    return frozenset(ends[:1]) if own and ends[0].rpartition(".")[2] == "shared" else frozenset()


def _is_tied(evidence: Evidence) -> tuple[bool | None, str | None]:
    """Whether transformers 5 ties the ends when it loads the base; or the reason why that is not known."""
    main = evidence.main_tie
    if main is None or main.tie.target.endswith("bias"):
        return False, None
    outcome = evidence.outcomes.get(LOADER, {}).get(main.tie.target)
    if outcome is not None:
        if outcome.fate is Fate.TIED:
            return True, None
        if outcome.fate is Fate.KEPT:
            return False, None
        return None, f"transformers 5 loads the base with {main.tie.target} {outcome.fate.value}: {outcome.reason}"
    if LOADER not in evidence.outcomes and main.state in (TieState.SHARED, TieState.ALIAS):
        return True, None
    if LOADER not in evidence.outcomes and main.state is TieState.DIVERGED:
        return False, None
    return None, "the base's ends were not compared"


def _paths(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        parts = name.split(".")
        for end in range(1, len(parts)):
            yield ".".join(parts[:end])


# --- the adapter's part at the ends ---------------------------------------------------------------------------------


def _retied(config: AdapterConfig, base: BaseModel) -> Part | None:
    """What PEFT makes one of, for all ends, when it loads an adapter with `ensure_weight_tying`: copies, or LoRA."""
    if not config.ensure_weight_tying or base.tied is False:
        return None
    if any(name.rpartition(".")[2] in PEFTS_NAMES for name in config.modules_to_save):
        return Part.SAVED
    targets = config.target_modules
    if isinstance(targets, str):
        return Part.LORA_A if any(name in targets for name in PEFTS_NAMES) else None
    return Part.LORA_A if any(name.rpartition(".")[2] in PEFTS_NAMES for name in targets or ()) else None


def _deltas(adapter: Adapter, base: BaseModel) -> Iterator[AdapterDelta]:
    config, retied = adapter.config, _retied(adapter.config, base)
    by_place: dict[TiedModule, list[AdapterTensor]] = {}
    for tensor in adapter.tensors:
        place = base.find(tensor.module)
        if place is not None:
            by_place.setdefault(place, []).append(tensor)
    for place in base.places:
        tensors = by_place.get(place, [])
        parts = {tensor.part: tensor for tensor in tensors}
        if Part.TOKENS in parts:
            rows, loaded = _rows(config, base, place, parts[Part.TOKENS].module)
            yield AdapterDelta(
                place=place, kind=DeltaKind.ROWS, rows=rows, loaded=loaded, tensors=(parts[Part.TOKENS],)
            )
        if found := tuple(tensor for tensor in tensors if tensor.part in LORA_PARTS):
            module = found[0].module
            rank = next((tensor.rank for tensor in found if tensor.rank is not None), None)
            named = config.targets(module)
            if config.peft_type != LORA:
                yield AdapterDelta(place=place, kind=DeltaKind.OTHER, loaded=None, tensors=found)
                continue
            yield AdapterDelta(
                place=place,
                kind=DeltaKind.DORA if Part.MAGNITUDE in parts else DeltaKind.LORA,
                rank=rank,
                scaling=config.settings(module).scaling(rank) if rank else None,
                loaded=True if named is False and retied is Part.LORA_A else named,
                tensors=found,
            )
        if found := tuple(tensor for tensor in tensors if _is_copy(tensor, retied)):
            yield AdapterDelta(place=place, kind=DeltaKind.COPY, tensors=found)
        if found := tuple(tensor for tensor in tensors if tensor.part is Part.METHOD):
            yield AdapterDelta(place=place, kind=DeltaKind.OTHER, loaded=None, tensors=found)


def _is_copy(tensor: AdapterTensor, retied: Part | None) -> bool:
    """Whether a tensor is part of a trained copy. The end that PEFT re-ties has no entry in `modules_to_save`."""
    again = retied is Part.SAVED and tensor.part is Part.BASE and ".base_layer." not in tensor.name
    return tensor.part is Part.SAVED or again


def _rows(
    config: AdapterConfig, base: BaseModel, place: TiedModule, module: str
) -> tuple[tuple[int, ...] | None, bool | None]:
    """The ids of the trained rows at this place, and whether PEFT loads them."""
    source = place is base.source
    if config.peft_type == TRAINABLE_TOKENS:
        ids = config.token_ids[0].ids if config.token_ids else None
        named = config.targets(module)
        return ids, named if named is not False else (base.tied is not False and not source)
    for one in config.token_ids:
        if (not one.module and source) or (one.module and names_module(one.module, module)):
            return one.ids, True
    owner = base.source.module if base.source is not None else ""
    of_source = [one for one in config.token_ids if not one.module or names_module(one.module, owner)]
    return (of_source[0].ids, base.tied is not False) if of_source else (None, False)


# --- whether all ends carry one change ------------------------------------------------------------------------------


def _alike(files: FileSet, deltas: Sequence[AdapterDelta], config: AdapterConfig) -> bool | None:
    """Whether the deltas are one in every bit. `None` if they are of kinds that cannot be compared, or too large."""
    kinds = {delta.kind for delta in deltas}
    if len(kinds) > 1 or kinds & {DeltaKind.DORA, DeltaKind.OTHER}:
        return False if len(kinds) > 1 or kinds == {DeltaKind.DORA} else None
    if len({(delta.rows, delta.scaling) for delta in deltas}) > 1:
        return False
    tensors = [tensor for delta in deltas for tensor in delta.tensors]
    if any(tensor.stored.dtype not in FLOATS for tensor in tensors):
        return None
    if sum(tensor.stored.nbytes for tensor in tensors) > MOST_VALUES:
        return None
    with files.open(tensors[0].stored.file) as source:
        return all(_same(source, one, other) for one, other in pairwise(deltas))


def _same(source: ByteSource, one: AdapterDelta, other: AdapterDelta) -> bool:
    """Whether two deltas have the same values. A LoRA of an embedding is that of a head, transposed."""
    import numpy as np

    ours, theirs = _in_a_heads_order(one), _in_a_heads_order(other)
    return ours.keys() == theirs.keys() and all(
        _shape(ours[part]) == _shape(theirs[part])
        and np.array_equal(_read(source, ours[part]), _read(source, theirs[part]))
        for part in ours
    )


def _odd_values(
    files: FileSet, adapter: Adapter, at_ends: Sequence[AdapterDelta]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The tensors of deltas that have a value that is not finite, and the modules whose delta is 0.

    Neither is looked for in an adapter whose deltas have more than `MOST_VALUES` bytes. Of a remote file only the
    deltas at the ends are read, since each tensor is a request.
    """
    import numpy as np

    parts = LORA_PARTS | {Part.TOKENS}
    every = adapter.tensors if files.parallel_reads == 1 else [one for delta in at_ends for one in delta.tensors]
    tensors = [tensor for tensor in every if tensor.part in parts and tensor.stored.dtype in FLOATS]
    if sum(tensor.stored.nbytes for tensor in tensors) > MOST_VALUES:
        return (), ()
    not_finite: list[str] = []
    zero: dict[str, None] = {}
    with_magnitude = {tensor.module for tensor in adapter.tensors if tensor.part is Part.MAGNITUDE}
    with files.open(adapter.file) as source:
        for tensor in tensors:
            values = _read(source, (tensor, False))
            if not np.isfinite(values).all():
                not_finite.append(tensor.name)
            elif tensor.rank is not None and tensor.module not in with_magnitude and not values.any():
                zero[tensor.module] = None
    return tuple(not_finite), tuple(zero)


def _in_a_heads_order(delta: AdapterDelta) -> dict[str, tuple[AdapterTensor, bool]]:
    found: dict[str, tuple[AdapterTensor, bool]] = {}
    for tensor in delta.tensors:
        if tensor.part is Part.EMBEDDING_A:
            found["left"] = (tensor, True)
        elif tensor.part is Part.EMBEDDING_B:
            found["right"] = (tensor, True)
        elif tensor.part in (Part.LORA_A, Part.LORA_B):
            found["left" if tensor.part is Part.LORA_B else "right"] = (tensor, False)
        else:
            found[f"{tensor.part.value} {tensor.attribute}"] = (tensor, False)
    return found


def _shape(entry: tuple[AdapterTensor, bool]) -> tuple[int, ...]:
    tensor, transposed = entry
    return tensor.stored.shape[::-1] if transposed else tensor.stored.shape


def _read(source: ByteSource, entry: tuple[AdapterTensor, bool]) -> npt.NDArray[Any]:
    from bowline.checkpoint.formats.stored_values import read_values

    tensor, transposed = entry
    values = read_values(source, tensor.stored)
    return values.T if transposed else values
