"""Rules about adapters at the ends of a tie: what PEFT's merge makes of them.

PEFT's merges were run, in the versions that `adapter_merge` names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bowline.auditing.adapter_evidence import AdapterDelta, AdapterEvidence, DeltaKind, End, Merge
from bowline.auditing.adapter_merge import PEFT, PEFT_RUN, PEFTS_NAMES, nests
from bowline.auditing.rules.rule import Observation, Severity, adapter_rule
from bowline.wording import joined

FACTORS = (DeltaKind.LORA, DeltaKind.DORA)
MERGE_LORA = (
    "merge with `bowline merge BASE ADAPTER DST`, or "
    'bowline.nn.merge_lora(model, on_tie="untie"): each end gets its own'
)
ONE_FOR_BOTH = (
    "; or train again with ensure_weight_tying=True, which makes one adapter for both ends, and merge with merge_lora"
)


@adapter_rule("BW501", "adapter-on-one-end", Severity.ERROR)
def adapter_on_one_end(evidence: AdapterEvidence) -> Iterator[Observation]:
    """A LoRA is on one end of a tie: PEFT's merge changes the other end too.

    What: the base is tied, and the adapter has a LoRA (or DoRA) at one of the modules that share the matrix.

    Why it hurts: while the adapter is on, only that end computes with the delta. `merge_and_unload()` adds the delta to
    the shared matrix, so the other end changes as well, and the merged model computes other logits than the adapter
    model did. The flag stays true and no loader can notice it.

    Example: `LoraConfig(target_modules=["q_proj", "lm_head"])` on a tied model.

    Fix: merge with `bowline.nn.merge_lora(model, on_tie="untie")`, which gives each end its own matrix and sets the
    flag to false. To keep the tie, train one adapter for both ends: `ensure_weight_tying=True`.

    Reported in: huggingface/peft#2018, huggingface/peft#2777
    """
    if evidence.base.tied and len(evidence.loaded) == 1 and evidence.loaded[0].kind in FACTORS:
        (delta,) = evidence.loaded
        yield Observation(
            message=(
                f"{delta.place.module} has {delta}, and the rest of the tie "
                f"({evidence.base.others(delta.place.module)}) has none: PEFT's merge ({PEFT_RUN}) changes every end"
            ),
            help=_way_out(evidence),
            tensors=_names([delta]),
            file=evidence.adapter.file,
        )


@adapter_rule("BW502", "separate-deltas", Severity.ERROR)
def separate_deltas(evidence: AdapterEvidence) -> Iterator[Observation]:
    """Several ends of a tie were trained separately: PEFT's merge gives every end the changes of all.

    What: the base is tied, and two or more of the modules that share the matrix have a LoRA, or trained rows, with
    different values. With `--headers-only` the values are not compared, and the finding says so.

    Why it hurts: PEFT merges each change into the shared matrix, one after the other. No end then holds what it was
    trained to hold, and the logits differ from those of the adapter model.

    Example: `LoraConfig(target_modules=["embed_tokens", "lm_head"])` on a tied model.

    Fix: merge with `bowline.nn.merge_lora(model, on_tie="untie")`, which gives each end its own.

    Reported in: huggingface/peft#2864
    """
    kinds = {delta.kind for delta in evidence.loaded}
    if not evidence.base.tied or len(evidence.loaded) < 2 or not (kinds <= set(FACTORS) or kinds == {DeltaKind.ROWS}):
        return
    if kinds == {DeltaKind.LORA} and evidence.alike:
        return
    if kinds == {DeltaKind.ROWS} and evidence.alike:
        return
    each = joined([f"{delta.place.module} ({delta})" for delta in evidence.loaded])
    unknown = "; their values were not compared" if evidence.alike is None else ""
    yield Observation(
        message=f"{each} share one matrix and are trained separately{unknown}: PEFT's merge ({PEFT_RUN}) writes all of "
        "them into it",
        help=_way_out(evidence),
        tensors=_names(evidence.loaded),
        file=evidence.adapter.file,
    )


@adapter_rule("BW503", "delta-merged-twice", Severity.ERROR)
def delta_merged_twice(evidence: AdapterEvidence) -> Iterator[Observation]:
    """One LoRA serves both ends of a tie: PEFT's merge adds it to the shared matrix once for each end.

    What: the base is tied, and its ends carry the same LoRA, as `ensure_weight_tying=True` trains it.

    Why it hurts: PEFT adds the delta for the embedding and again for the head, so the merged matrix is W + 2 delta
    where the adapter model computed with W + delta. The flag stays true and no loader can notice it.

    Example: `LoraConfig(target_modules=["embed_tokens"], ensure_weight_tying=True)`, then `merge_and_unload()`.

    Fix: merge with `bowline.nn.merge_lora(model)`, which adds the delta once and keeps the tie.

    Reported in: huggingface/peft#2864
    """
    if evidence.base.tied and evidence.alike and {delta.kind for delta in evidence.loaded} == {DeltaKind.LORA}:
        delta = evidence.loaded[0]
        ends = _modules(evidence.loaded)
        yield Observation(
            message=f"{ends} share one matrix and carry one {delta}: PEFT's merge ({PEFT_RUN}) adds it "
            f"{'twice' if len(evidence.loaded) == 2 else f'{len(evidence.loaded)} times'}",
            help="merge with `bowline merge BASE ADAPTER DST`, or bowline.nn.merge_lora(model): it is added once, and "
            "the tie stays",
            tensors=_names(evidence.loaded),
            file=evidence.adapter.file,
        )


@adapter_rule("BW504", "saved-copy-unties", Severity.WARNING, also=Severity.ERROR)
def saved_copy_unties(evidence: AdapterEvidence) -> Iterator[Observation]:
    """A trained copy of an end (`modules_to_save`) unties the model when it is merged.

    What: the base is tied, and `modules_to_save` names its embedding or its head. While it is trained, that end has a
    matrix of its own.

    Why it hurts: the merged model has two matrices where the base has one, and PEFT sets `tie_word_embeddings` to
    false. PEFT 0.21.2 does this exactly, except in two cases, which are errors here. If only the embedding of a BERT is
    copied, the false flag also unties the head's bias, which is stored once, and the next load draws the decoder's bias
    afresh. If `shared` of a T5 is copied, no layer computes with the copy until the next load ties encoder and decoder
    to it.

    Example: `LoraConfig(modules_to_save=["lm_head"])` on a tied model.

    Fix: none is needed if the ends are meant to part. To keep one matrix, train with `ensure_weight_tying=True`.
    `bowline.nn.merge_lora(model, on_tie="untie")` writes every flag and keeps the bias.

    Reported in: huggingface/peft#2777, huggingface/transformers#45127
    """
    peft = _peft(evidence)
    copies = [delta for delta in evidence.loaded if delta.kind is DeltaKind.COPY]
    if not evidence.base.tied or not copies or peft is None or peft.tie_stays is not False:
        return
    yield Observation(
        message=f"{_modules(copies)} of a tied base {_has(copies)} a trained copy: "
        f"merged by PEFT ({PEFT_RUN}), {peft.text}",
        help=(
            "nothing is wrong if the ends are meant to part; to keep one matrix, train with ensure_weight_tying=True"
            if peft.exact
            else 'merge with bowline.nn.merge_lora(model, on_tie="untie") and save with bowline.nn.save_checkpoint'
        ),
        tensors=_names(copies),
        file=evidence.adapter.file,
        severity=None if peft.exact else Severity.ERROR,
    )


@adapter_rule("BW505", "rows-at-one-end", Severity.ERROR)
def rows_at_one_end(evidence: AdapterEvidence) -> Iterator[Observation]:
    """Rows were trained at one end of a tie that is not the input embedding: PEFT's merge changes every end.

    What: the base is tied, and `trainable_token_indices` names the head, or another module that shares the matrix, but
    not the input embedding. If it names the input embedding or is a list, PEFT trains the rows for every end, with and
    without `ensure_weight_tying`, and merges them exactly.

    Why it hurts: the merge writes the rows into the shared matrix, so the embedding changes as well, and the logits
    differ from those of the adapter model.

    Example: `LoraConfig(trainable_token_indices={"lm_head": [32000, 32001]})` on a tied model.

    Fix: merge with `bowline.nn.merge_lora(model, on_tie="untie")`, or train with `trainable_token_indices=[...]`.
    """
    if not evidence.base.tied or len(evidence.loaded) != 1:
        return
    (delta,) = evidence.loaded
    if delta.kind is DeltaKind.ROWS and delta.place is not evidence.base.source:
        yield Observation(
            message=(
                f"{delta.place.module} has {delta}, and the rest of the tie "
                f"({evidence.base.others(delta.place.module)}) has none: PEFT's merge ({PEFT_RUN}) writes "
                "them into the shared matrix"
            ),
            help=f"{MERGE_LORA}; or train with trainable_token_indices=[...], which trains the rows for every end",
            tensors=_names([delta]),
            file=evidence.adapter.file,
        )


@adapter_rule("BW506", "rows-without-bias", Severity.WARNING)
def rows_without_bias(evidence: AdapterEvidence) -> Iterator[Observation]:
    """Rows are trained at a head that has a bias, which PEFT leaves out while the adapter is on.

    What: the head has a bias (as BERT's decoder has), and the adapter trains rows of the head, or of an embedding that
    is tied to it.

    Why it hurts: PEFT 0.21.2 computes such a head without its bias. The adapter was trained on logits without it, and
    once it is merged the bias counts again, so the logits differ.

    Example: `LoraConfig(trainable_token_indices=[0, 1])` on `BertForMaskedLM`.

    Fix: none is known for a trained adapter. Train with `modules_to_save`, or LoRA, instead.

    Reported in: huggingface/peft#3649, huggingface/peft#3688
    """
    if not evidence.base.head_bias:
        return
    for delta in evidence.loaded:
        if delta.kind is DeltaKind.ROWS and (delta.place.end is End.HEAD or evidence.base.tied):
            yield Observation(
                message=f"{delta.place.module} has {delta}, and the head has a bias: PEFT ({PEFT_RUN}) computes "
                "without the bias while the adapter is on",
                help="train with modules_to_save or LoRA instead of trainable_token_indices",
                tensors=_names([delta]),
                file=evidence.adapter.file,
            )
            return


@adapter_rule("BW507", "unused-embedding", Severity.WARNING)
def unused_embedding(evidence: AdapterEvidence) -> Iterator[Observation]:
    """The adapter trains `shared`, which no layer computes with.

    What: in T5, BART and their like, encoder and decoder look tokens up in `encoder.embed_tokens` and
    `decoder.embed_tokens`. `shared` owns their matrix, but no layer calls it. The adapter has a LoRA or a trained copy
    at `shared`.

    Why it hurts: the adapter has no effect at that end, and gets no gradient there. Once it is merged, the matrix
    changes for encoder, decoder and head.

    Example: `LoraConfig(target_modules=["shared"])` on a T5.

    Fix: name `embed_tokens` in `target_modules`, and train again.
    """
    for delta in evidence.loaded:
        if delta.place.module in evidence.base.unused and delta.kind is not DeltaKind.ROWS:
            yield Observation(
                message=f"{delta.place.module} has {delta}, but encoder and decoder look tokens up in embed_tokens of "
                "their own: it has no effect before it is merged",
                help="name embed_tokens in the config instead, and train again",
                tensors=_names([delta]),
                file=evidence.adapter.file,
            )


@adapter_rule("BW508", "tie-not-known", Severity.WARNING)
def tie_not_known(evidence: AdapterEvidence) -> Iterator[Observation]:
    """The adapter trains an end of the vocabulary, and whether the base ties it is not known.

    What: `--base` was not given, and the base that the adapter names is not a directory of this machine; or the base
    cannot be read; or transformers 5 does not load it tied or untied.

    Why it hurts: on a tied base PEFT's merge can change the other end as well, on an untied base it cannot.

    Example: an adapter whose `base_model_name_or_path` is a name on the Hub.

    Fix: `bowline audit ADAPTER --base BASE`, with a directory or a name on the Hub.
    """
    if evidence.base.tied is None and evidence.deltas:
        modules = _modules(evidence.deltas)
        yield Observation(
            message=f"{modules} {_has(evidence.deltas)} an adapter, and whether the base is tied is not known: "
            f"{evidence.base.reason}",
            help="give the base model with --base",
            tensors=_names(evidence.deltas),
            file=evidence.adapter.file,
        )


@adapter_rule("BW509", "merge-not-known", Severity.WARNING)
def merge_not_known(evidence: AdapterEvidence) -> Iterator[Observation]:
    """The adapter changes an end of a tie in a way whose merge was not run.

    What: the base is tied, and the adapter uses another method of PEFT than LoRA at one of its ends, or several methods
    at once in a way that is not named elsewhere (trained rows of the head and a LoRA on the embedding, for example).

    Why it hurts: the merge may change the other end as well, as it does for LoRA.

    Example: `LoHaConfig(target_modules=["lm_head"])` on a tied model.

    Fix: merge a copy, and compare the logits with those of the adapter model before the merged model is used.
    """
    peft = _peft(evidence)
    if evidence.base.tied and evidence.loaded and peft is not None and peft.exact is None:
        what = _listed(evidence.loaded)
        yield Observation(
            message=f"the base is tied and {what} ({evidence.adapter.config.peft_type}): what PEFT's merge makes of it "
            "was not run",
            help="merge a copy, and compare its logits with those of the adapter model",
            tensors=_names(evidence.loaded),
            file=evidence.adapter.file,
        )


@adapter_rule("BW510", "adapter-in-adapter", Severity.ERROR)
def adapter_in_adapter(evidence: AdapterEvidence) -> Iterator[Observation]:
    """Rows of a tied embedding and a LoRA of its head: the head has one adapter inside another.

    What: the base is tied, `trainable_token_indices` trains rows of the input embedding, which PEFT trains for every
    end of the tie, and the head has a LoRA as well.

    Why it hurts: PEFT 0.21.2 merges only the outer adapter. The merged model computes other logits than the adapter
    model, and `save_pretrained` refuses it. `merge_lora` refuses to merge.

    Example: `LoraConfig(target_modules=["q_proj", "lm_head"], trainable_token_indices=[1, 2])` on a tied model.

    Fix: leave the head out of `target_modules`, and train again.
    """
    if evidence.base.tied and nests(evidence.base, evidence.loaded):
        each = _listed(evidence.loaded)
        yield Observation(
            message=f"{each}, and the rows count for every end of the tie: PEFT's merge ({PEFT_RUN}) loses one of the "
            "two",
            help="leave the head out of target_modules, and train again",
            tensors=_names(evidence.loaded),
            file=evidence.adapter.file,
        )


def _peft(evidence: AdapterEvidence) -> Merge | None:
    return next((merge for merge in evidence.merges if merge.tool == PEFT and merge.tied_base), None)


def _way_out(evidence: AdapterEvidence) -> str:
    """What to do about a delta at one end. PEFT makes one adapter of both only under the names that it knows."""
    source = evidence.base.source
    again = source is not None and source.module.rpartition(".")[2] in PEFTS_NAMES
    return MERGE_LORA + (ONE_FOR_BOTH if again else "")


def _names(deltas: Sequence[AdapterDelta]) -> tuple[str, ...]:
    """The adapter's tensors of these deltas."""
    return tuple(tensor.name for delta in deltas for tensor in delta.tensors)


def _modules(deltas: Sequence[AdapterDelta]) -> str:
    return joined([delta.place.module for delta in deltas])


def _listed(deltas: Sequence[AdapterDelta]) -> str:
    return joined([f"{delta.place.module} has {delta}" for delta in deltas])


def _has(deltas: Sequence[AdapterDelta]) -> str:
    return "has" if len(deltas) == 1 else "have"
