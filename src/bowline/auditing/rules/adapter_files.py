"""Rules about the files of an adapter: tensors that fit neither its config nor its base."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePath

from bowline.auditing.adapter_evidence import AdapterEvidence
from bowline.auditing.rules.rule import Observation, Severity, adapter_rule
from bowline.checkpoint.formats.other_files import ADAPTER_CONFIG
from bowline.checkpoint.formats.peft_adapter import LORA, AdapterTensor, Part
from bowline.checkpoint.formats.strict_json import shown
from bowline.families.transformers_table import load_table
from bowline.wording import joined, listed

SHOWN = 3
PAIRS = ((Part.LORA_A, Part.LORA_B), (Part.EMBEDDING_A, Part.EMBEDDING_B))
PLAIN = (Part.SAVED, Part.BASE, Part.BIAS)


@adapter_rule("BW521", "not-in-base", Severity.ERROR, also=Severity.WARNING)
def not_in_base(evidence: AdapterEvidence) -> Iterator[Observation]:
    """The adapter has tensors of modules that the base lacks.

    What: the base was read, and it has no module of that path. A new head that `modules_to_save` adds, such as `score`,
    is not reported. This is a warning if no module of the adapter is in the base, or if the class has other names in
    memory than in its files: the names may then only be spelled in another way.

    Why it hurts: PEFT 0.21.2 leaves such tensors out without a word. The adapter then computes with a part of what was
    trained.

    Example: an adapter of a model with 32 layers, put on one with 24.

    Fix: give the base that the adapter was trained on.
    """
    base, absent = evidence.base, _absent(evidence)
    if not absent:
        return
    found = any(base.has(tensor.module) for tensor in evidence.adapter.tensors)
    yield Observation(
        message=f"the base lacks {_some(absent)}, so {'these' if found else 'its'} tensors have no place in it",
        help="give the base that the adapter was trained on",
        tensors=tuple(name for names in absent.values() for name in names),
        file=evidence.adapter.file,
        severity=None if found and not base.renamed else Severity.WARNING,
    )


@adapter_rule("BW522", "does-not-fit", Severity.ERROR)
def does_not_fit(evidence: AdapterEvidence) -> Iterator[Observation]:
    """A tensor of the adapter does not fit the shape that the base has.

    What: the shapes of the base's tensors were read, and the delta, the copy or the rows have other sizes. A table with
    more rows than the base's means that the vocabulary was resized before the adapter was trained: PEFT then saves the
    table with the adapter.

    Why it hurts: PEFT refuses to load the adapter ("size mismatch").

    Example: two tokens were added with `resize_token_embeddings`, and the adapter is put on the base as published.

    Fix: resize the base to the adapter's rows first, or give the base that the adapter was trained on.
    """
    misfits = dict(_misfits(evidence))
    resized = {
        tensor.stored.shape[0]
        for tensor in evidence.adapter.tensors
        if tensor.name in misfits
        and tensor.part in PLAIN
        and len(tensor.stored.shape) == 2
        and evidence.base.find(tensor.module) is not None
    }
    if misfits:
        yield Observation(
            message=listed(list(misfits.values()), SHOWN),
            help=(
                f"resize the base to {min(resized)} rows before the adapter is put on"
                if len(resized) == 1
                else "give the base that the adapter was trained on"
            ),
            tensors=tuple(misfits),
            file=evidence.adapter.file,
        )


@adapter_rule("BW523", "rank-differs", Severity.ERROR)
def rank_differs(evidence: AdapterEvidence) -> Iterator[Observation]:
    """The rank of a LoRA differs from the one that `adapter_config.json` states.

    What: `r`, or the entry of `rank_pattern` that names the module, differs from the shape of `lora_A` or `lora_B`, or
    the two factors differ. Entries of `rank_pattern` that are regular expressions are not run.

    Why it hurts: PEFT refuses to load the adapter ("size mismatch"). A tool that reads only the config scales the delta
    by another alpha / rank.

    Example: the config of another adapter was copied.

    Fix: write the rank of the tensors into the config.
    """
    if evidence.adapter.config.peft_type != LORA or evidence.adapter.config.target_parameters:
        return
    wrong: dict[str, tuple[str, ...]] = {}
    for module, parts in evidence.adapter.modules.items():
        stated = evidence.adapter.config.settings(module).rank
        for pair in PAIRS:
            factors = [parts[part] for part in pair if part in parts]
            ranks = {tensor.rank for tensor in factors if tensor.rank is not None}
            if len(ranks) > 1 or (ranks and stated is not None and ranks != {stated}):
                seen = joined([f"{tensor.part.value} {list(tensor.stored.shape)}" for tensor in factors])
                wrong[f"{module} has {seen}"] = tuple(tensor.name for tensor in factors)
    if wrong:
        stated = evidence.adapter.config.rank
        yield Observation(
            message=f"{listed(list(wrong), SHOWN)}, but the config states the rank {stated if stated else 'of none'}",
            help="write the rank of the tensors into adapter_config.json (r, or rank_pattern for single modules)",
            tensors=tuple(name for names in wrong.values() for name in names),
            file=ADAPTER_CONFIG,
        )


@adapter_rule("BW524", "left-out-at-load", Severity.ERROR)
def left_out_at_load(evidence: AdapterEvidence) -> Iterator[Observation]:
    """PEFT leaves tensors out when it loads the adapter, because the config does not name their module.

    What: the file has LoRA tensors of a module that `target_modules` does not name, or rows of a module that
    `trainable_token_indices` does not name. If `target_modules` is a regular expression, it is not run.

    Why it hurts: PEFT 0.21.2 loads the rest without a word. With `ensure_weight_tying=True` this happens in GPT-2, T5
    and other models whose embedding is called neither `embed_tokens` nor `lm_head`: PEFT saves the head's half, takes
    the head out of `target_modules`, and does not tie it again at the next load. The logits of the loaded adapter then
    differ from those that were trained.

    Example: `LoraConfig(target_modules=["lm_head"], ensure_weight_tying=True)` on a GPT-2, saved and loaded.

    Fix: add the modules to `target_modules` in `adapter_config.json`.
    """
    config = evidence.adapter.config
    if config.peft_type != LORA or config.target_parameters:
        return
    at_ends = {tensor.name: delta for delta in evidence.deltas for tensor in delta.tensors}
    left_out: dict[str, list[str]] = {}
    for tensor in evidence.adapter.tensors:
        delta = at_ends.get(tensor.name)
        if delta is not None:
            lost = delta.loaded is False
        else:
            lost = tensor.part in (*PAIRS[0], *PAIRS[1]) and config.targets(tensor.module) is False
        if lost:
            left_out.setdefault(tensor.module, []).append(tensor.name)
    if left_out:
        yield Observation(
            message=f"adapter_config.json does not name {_some(left_out)}: PEFT loads the adapter without it",
            help="add the modules to target_modules (or trainable_token_indices) in adapter_config.json",
            tensors=tuple(name for names in left_out.values() for name in names),
            file=ADAPTER_CONFIG,
        )


@adapter_rule("BW525", "half-a-delta", Severity.ERROR)
def half_a_delta(evidence: AdapterEvidence) -> Iterator[Observation]:
    """One factor of a LoRA is missing.

    What: the file has `lora_A` of a module and not `lora_B`, or the other way round.

    Why it hurts: PEFT says so in a warning and loads the rest. A fresh `lora_B` is 0, so the module's delta is lost; a
    fresh `lora_A` is random, so the delta is another one.

    Example: a tool copied the tensors by a filter on their names.

    Fix: fetch the adapter again, or save it again.
    """
    halves = {
        next(iter(present)).module: [tensor.name for tensor in present]
        for parts in evidence.adapter.modules.values()
        for pair in PAIRS
        if len(present := [parts[part] for part in pair if part in parts]) == 1
    }
    if halves:
        yield Observation(
            message=f"{_some(halves)}: one of the two factors is missing",
            help="fetch the adapter again, or save it again with PEFT's save_pretrained",
            tensors=tuple(name for names in halves.values() for name in names),
            file=evidence.adapter.file,
        )


@adapter_rule("BW526", "unknown-tensor", Severity.WARNING)
def unknown_tensor(evidence: AdapterEvidence) -> Iterator[Observation]:
    """The adapter has tensors of a kind that is not known.

    What: the name is neither that of a LoRA factor, a magnitude vector, trained rows or a saved module, nor that of a
    parameter of the base.

    Why it hurts: PEFT 0.21.2 leaves such tensors out without a word, and a merge does not count them.

    Example: a newer PEFT or another tool wrote the adapter.

    Fix: load and merge the adapter with the tool that wrote it.
    """
    unknown = [tensor.name for tensor in evidence.adapter.tensors if tensor.part is Part.UNKNOWN]
    if unknown:
        yield Observation(
            message=f"{listed([shown(name) for name in unknown], SHOWN)}: not tensors of a LoRA adapter",
            help="load and merge the adapter with the tool that wrote it",
            tensors=tuple(unknown),
            file=evidence.adapter.file,
        )


@adapter_rule("BW527", "other-base", Severity.WARNING, also=Severity.INFO)
def other_base(evidence: AdapterEvidence) -> Iterator[Observation]:
    """The base that was given is not the one that the adapter names.

    What: the class that the adapter records is of another family than the base's. If only the name differs, this is
    information: a directory may be called otherwise than the model on the Hub.

    Why it hurts: the deltas were trained on other weights, and fit by shape at most.

    Example: an adapter of an instruction-tuned model, put on the pretrained one.

    Fix: give the base that the adapter names.
    """
    base, config = evidence.base, evidence.adapter.config
    if not base.given or base.location is None:
        return
    theirs, ours = (load_table().architecture(name or "") for name in (config.base_class, base.architecture))
    if theirs is not None and ours is not None and theirs.family != ours.family:
        yield Observation(
            message=f"the adapter was made for {shown(config.base_class)}, and the base is {shown(base.architecture)}",
            help="give the base that the adapter was trained on",
            file=ADAPTER_CONFIG,
        )
    elif config.base and _last(config.base) != _last(base.location):
        yield Observation(
            message=f"the adapter names {shown(config.base)} as its base, and the base given is {shown(base.location)}",
            help="make sure that they are one model",
            file=ADAPTER_CONFIG,
            severity=Severity.INFO,
        )


@adapter_rule("BW528", "adapter-pickle", Severity.INFO)
def adapter_pickle(evidence: AdapterEvidence) -> Iterator[Observation]:
    """The adapter's tensors are in a pickle, or in two files.

    What: the weights are in `adapter_model.bin`, or that file lies beside `adapter_model.safetensors`.

    Why it hurts: a pickle can run code when it is loaded. Bowline read it without executing anything, and found only
    tensors in it. Of two files PEFT reads the safetensors file.

    Example: `save_pretrained(path, safe_serialization=False)`.

    Fix: load the adapter, save it again with safetensors, and remove the pickle.
    """
    adapter = evidence.adapter
    if adapter.is_pickle or adapter.other_files:
        yield Observation(
            message=(
                f"{adapter.file} is a pickle; only tensors are in it"
                if adapter.is_pickle
                else f"{joined(adapter.other_files)} lies beside {adapter.file}, which PEFT reads"
            ),
            help="save the adapter with safetensors, and remove the pickle",
            file=adapter.file if adapter.is_pickle else adapter.other_files[0],
        )


@adapter_rule("BW529", "base-tables-stored", Severity.INFO)
def base_tables_stored(evidence: AdapterEvidence) -> Iterator[Observation]:
    """The adapter has copies of the base's embedding or head in it, which were not trained.

    What: PEFT saves the whole table beside the deltas if `target_modules` names `embed_tokens` or `lm_head`, or if the
    vocabulary was resized.

    Why it hurts: the adapter is larger by a table. When it is loaded, the table replaces the base's, so an adapter put
    on another base changes it.

    Example: `LoraConfig(target_modules=["lm_head"])`, then `save_pretrained(path)`.

    Fix: `save_pretrained(path, save_embedding_layers=False)`, unless the vocabulary was resized.
    """
    trained = {tensor.name for delta in evidence.deltas for tensor in delta.tensors}
    copies = [tensor for tensor in evidence.adapter.tensors if tensor.part is Part.BASE and tensor.name not in trained]
    if copies:
        size = sum(tensor.stored.nbytes for tensor in copies)
        yield Observation(
            message=f"{listed([tensor.module for tensor in copies], SHOWN)}: the base's own "
            f"{'table is' if len(copies) == 1 else 'tables are'} stored with the adapter ({size:,} bytes of "
            f"{evidence.adapter.nbytes:,})",
            help="save with save_embedding_layers=False, unless the vocabulary was resized",
            tensors=tuple(tensor.name for tensor in copies),
            file=evidence.adapter.file,
        )


@adapter_rule("BW530", "delta-not-finite", Severity.ERROR)
def delta_not_finite(evidence: AdapterEvidence) -> Iterator[Observation]:
    """A delta has a NaN or an infinity.

    What: `lora_A`, `lora_B`, a magnitude vector or trained rows hold a value that is not finite. With `--headers-only`,
    and in adapters whose deltas have more than 256 MB, values are not read; of an adapter on the Hub, only those at the
    ends of the vocabulary.

    Why it hurts: merged, it makes every value of its row or column NaN.

    Example: a training in float16 overflowed.

    Fix: take an earlier checkpoint of the training.
    """
    if evidence.not_finite:
        yield Observation(
            message=f"{listed([shown(name) for name in evidence.not_finite], SHOWN)}: not all values are finite",
            help="take an earlier checkpoint of the training",
            tensors=evidence.not_finite,
            file=evidence.adapter.file,
        )


@adapter_rule("BW531", "delta-is-zero", Severity.WARNING, also=Severity.INFO)
def delta_is_zero(evidence: AdapterEvidence) -> Iterator[Observation]:
    """A LoRA is 0: one of its factors is, as before the first step of training.

    What: every value of `lora_B` (of an embedding's: `lora_embedding_A`) is 0, as PEFT initialises it. This is a
    warning if it holds for all modules of the adapter, and information for some. Which values are read is as in BW530.

    Why it hurts: the module computes what the base computes. The adapter was saved before it was trained, or the module
    gets no gradient.

    Example: `shared` of a T5, which no layer calls.

    Fix: train the adapter, or leave the module out of `target_modules`.
    """
    if evidence.zero:
        adapted = {tensor.module for tensor in evidence.adapter.tensors if tensor.rank is not None}
        everything = adapted == set(evidence.zero)
        yield Observation(
            message=(
                f"all {len(adapted)} LoRA deltas are 0: the adapter changes nothing"
                if everything and len(adapted) > 1
                else f"{listed([shown(module) for module in evidence.zero], SHOWN)}: the LoRA is 0 and changes nothing"
            ),
            help="train the adapter, or leave the modules out of target_modules",
            tensors=tuple(
                tensor.name
                for tensor in evidence.adapter.tensors
                if tensor.module in set(evidence.zero) and tensor.rank is not None
            ),
            file=evidence.adapter.file,
            severity=None if everything else Severity.INFO,
        )


def _absent(evidence: AdapterEvidence) -> dict[str, list[str]]:
    """The modules that the base lacks, with their tensors; none if the base is not known."""
    base, config = evidence.base, evidence.adapter.config
    if base.evidence is None or not base.evidence.complete or config.raw.get("layer_replication"):
        return {}
    absent: dict[str, list[str]] = {}
    for tensor in evidence.adapter.tensors:
        known = tensor.part is not Part.UNKNOWN and tensor.module
        added = tensor.part is Part.SAVED  # a new head, such as a classifier, is no module of the base
        if known and not added and not base.has(tensor.module) and tensor.part is not Part.METHOD:
            absent.setdefault(tensor.module, []).append(tensor.name)
    return absent


def _misfits(evidence: AdapterEvidence) -> Iterator[tuple[str, str]]:
    """The first tensor of each delta that does not fit, and a phrase that says why."""
    base, config = evidence.base, evidence.adapter.config
    if base.evidence is None or config.target_parameters or config.raw.get("use_bdlora"):
        return
    for module, parts in evidence.adapter.modules.items():
        weight = base.shape(module)
        if weight is None or len(weight) != 2:
            continue
        for pair in PAIRS:
            yield from _factors(parts, pair, module, weight)
        for part in PLAIN:
            tensor = parts.get(part)
            expected = base.shape(module, tensor.attribute) if tensor is not None else None
            if tensor is not None and expected is not None and tensor.stored.shape != expected:
                yield tensor.name, f"{tensor.name} is {list(tensor.stored.shape)}, and the base's is {list(expected)}"
    for delta in evidence.deltas:
        rows = next((tensor for tensor in delta.tensors if tensor.part is Part.TOKENS), None)
        weight = base.shape(delta.place.module)
        if rows is None or weight is None or len(weight) != 2:
            continue
        count = len(delta.rows) if delta.rows is not None else None
        if count is not None and rows.stored.shape != (count, weight[-1]):
            yield rows.name, f"{rows.name} is {list(rows.stored.shape)}, expected {[count, weight[-1]]}"
        elif delta.rows and max(delta.rows) >= weight[0]:
            yield (
                rows.name,
                f"{delta.place.module} has a trained row {max(delta.rows)}, and the base has {weight[0]} rows",
            )


def _factors(
    parts: Mapping[Part, AdapterTensor], pair: tuple[Part, Part], module: str, weight: tuple[int, ...]
) -> Iterator[tuple[str, str]]:
    """Whether the two factors make a matrix of the base's shape. GPT-2's layers have theirs transposed."""
    first, second = (parts.get(part) for part in pair)
    if first is None or second is None:
        return
    a, b = first.stored.shape, second.stored.shape
    if len(a) != 2 or len(b) != 2:
        return
    shape = (b[0], a[1])
    if sorted(shape) != sorted(weight):
        order = shape if pair[0] is Part.LORA_A else shape[::-1]
        yield first.name, f"{module} has a delta of {list(order)}, and the base's weight is {list(weight)}"


def _some(modules: Mapping[str, object]) -> str:
    return listed([shown(module) for module in modules], SHOWN)


def _last(path: str) -> str:
    return PurePath(path.partition("@")[0]).name.lower()
