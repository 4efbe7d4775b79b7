"""Rules that compare the tie flag in `config.json` with the stored tensors."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

from bowline.auditing.evidence import Evidence, TieEvidence
from bowline.auditing.loaders import Fate, odd_flag
from bowline.auditing.rules.edit_commands import edit_command
from bowline.auditing.rules.rule import Observation, Severity, rule
from bowline.auditing.rules.token_texts import rows_and_tokens
from bowline.checkpoint.formats.graphs import ONNX, PT2
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.checkpoint.formats.strict_json import shown
from bowline.families.gguf_names import head_when_missing
from bowline.tie import TieState
from bowline.wording import joined, listed

CONFIG = "config.json"
QUANTISED = "the same table"
GRAPH_FROM_CONFIG = "the graph computes with its own head: export it again from the model that config.json describes"
GRAPH_WITHOUT_COPY = {
    ONNX: "export the model with torch.onnx.export(..., dynamo=True), or with do_constant_folding=False: one matrix "
    "then serves both",
    PT2: "make the two ends one parameter before torch.export (bowline.tie_weights does): one matrix then serves both",
}


@rule("BW101", "tied-but-diverged", Severity.ERROR)
def tied_but_diverged(evidence: Evidence) -> Iterator[Observation]:
    """The config says tied, but both tensors are stored and differ.

    What: `tie_word_embeddings` is true, and the checkpoint also stores a separate head whose values differ from the
    embedding's. The message says how many rows differ, by how much at most, and, if there is a pattern, what the
    difference looks like: added tokens, a merged low-rank delta, or noise from a cast.

    Why it hurts: transformers 4 overwrites the trained head with the embedding without a warning. transformers 5 keeps
    both and warns, but its next `tie_weights()` or `resize_token_embeddings` destroys the head, and a save writes
    the wrong flag again. vLLM before 0.29 dropped the head.

    Example: a LoRA trained on `lm_head` of a tied model and merged: the head changed, the flag did not.

    Fix: `bowline audit --fix` sets the flag to false at every level, in agreement with the stored tensors. If the
    head was meant to be tied, remove it from the file instead; then one matrix serves both ends.

    Reported in: vllm-project/vllm#51063, huggingface/transformers#45127, huggingface/peft#2777
    """
    for tie in evidence.ties:
        if tie.state is TieState.DIVERGED and tie.declared.flag.value and not _is_bias(tie) and tie.difference:
            difference = tie.difference
            if difference.cause.value == QUANTISED:
                continue
            pattern = f"; looks like {difference}" if difference.has_pattern else ""
            yield Observation(
                message=(
                    f"{tie.tie.target} and {tie.tie.source} differ in {difference.rows_differing} of "
                    f"{_rows(tie)} rows ({difference.extent}{pattern}), "
                    f"but {tie.declared.flag}{rows_and_tokens(evidence, difference)}"
                ),
                help=GRAPH_FROM_CONFIG
                if evidence.graph_file
                else (
                    "`bowline audit --fix` sets the flag to false; if the tie is intended, "
                    f"{edit_command(evidence, 'tie', '--keep embedding') or f'remove {tie.tie.target}'}"
                    if _if_config_decides(evidence, tie, value=False) is not None
                    else f"remove {tie.tie.target} from the file: no flag unties it"
                ),
                tensors=(tie.tie.target, tie.tie.source),
                file=evidence.graph_file or CONFIG,
                flag_from_bytes=_if_config_decides(evidence, tie, value=False),
            )


@rule("BW102", "untied-but-missing", Severity.ERROR)
def untied_but_missing(evidence: Evidence) -> Iterator[Observation]:
    """The config says untied, but the head (the target of the tie) is not stored.

    What: `tie_word_embeddings` is false, and the checkpoint stores only the embedding. Or a GGUF file stores only the
    embedding, and its architecture is one for which llama.cpp requires `output.weight`.

    Why it hurts: transformers draws the head at random, and says so in one row of its load report; vLLM leaves it
    uninitialised. The model loads and runs, but its output is noise. llama.cpp refuses such a GGUF file.

    Example: a model was tied at run time and saved while its config still said false. The save leaves out the shared
    head, and the next load draws a random one.

    Fix: `bowline audit --fix` sets the flag to true, in agreement with the stored tensors. If the head was trained,
    this file has lost it: fetch the checkpoint that has it. Convert a GGUF file again from a checkpoint with the head.

    Reported in: huggingface/transformers#43429, vllm-project/vllm#33359
    """
    for tie in evidence.ties:
        if tie.state is TieState.TARGET_MISSING and evidence.gguf_file and _loaders_with(evidence, tie, Fate.REFUSED):
            yield Observation(
                message=f"{tie.tie.target} is not stored, but llama.cpp requires it for {_architecture(evidence)}",
                help="convert the model again, from a checkpoint that has the head",
                tensors=(tie.tie.target, tie.tie.source),
                file=evidence.gguf_file,
            )
        if tie.state is TieState.TARGET_MISSING and tie.declared.flag.value is False:
            fates = _loaders_with(evidence, tie, Fate.RANDOM)
            if fates:
                yield Observation(
                    message=f"{tie.tie.target} is not stored, but {tie.declared.flag}: random in {fates}",
                    help="`bowline audit --fix` sets the flag to true; if the head was trained, fetch it instead",
                    tensors=(tie.tie.target, tie.tie.source),
                    file=CONFIG,
                    flag_from_bytes=_if_config_decides(evidence, tie, value=True),
                )


@rule("BW103", "flag-absent", Severity.WARNING)
def flag_absent(evidence: Evidence) -> Iterator[Observation]:
    """`tie_word_embeddings` is absent, and the loaders' defaults differ.

    What: no level of `config.json` states `tie_word_embeddings`, and transformers 4 and 5 take different values for
    it in this family. For a class that neither version knows, the base config's default is true in 4 and false in 5.

    Why it hurts: the same files load as two different models. One version ties the head; the other draws a random
    head or keeps a stored one.

    Example: remote code written for transformers 4 that relies on the default, loaded by transformers 5.

    Fix: `bowline audit --fix` writes the flag that agrees with the stored tensors.

    Reported in: huggingface/transformers#43429, huggingface/transformers#46400
    """
    if evidence.config is None:
        return
    tie = evidence.main_tie
    if tie is None or tie.declared.flag.path is not None or len(set(tie.declared.asked.values())) < 2:
        return
    asked = sorted(tie.declared.asked.items())
    words = ", ".join(f"{loader} {'ties' if value else 'does not tie'}" for loader, value in asked)
    truth = _flag_of_bytes(evidence, tie)
    yield Observation(
        message=f"tie_word_embeddings is absent, and its default depends on the loader: {words} {tie.tie.target}",
        help=(
            "`bowline audit --fix` writes the flag that agrees with the stored tensors"
            if truth is not None
            else "write the flag into config.json"
        ),
        tensors=(tie.tie.target, tie.tie.source),
        file=CONFIG,
        flag_from_bytes=truth,
    )


@rule("BW104", "levels-disagree", Severity.WARNING, also=Severity.INFO)
def levels_disagree(evidence: Evidence) -> Iterator[Observation]:
    """Levels of the config disagree about `tie_word_embeddings`.

    What: a nested config states `tie_word_embeddings` at the top and in its text or decoder config, with different
    values.

    Why it hurts: which level counts depends on the loader and its version. transformers 5 reads the config of the
    class that declares the tie, transformers 4 the text config, and vLLM mostly the top level. The finding is
    informational if both versions come to the same decision.

    Example: `tie_word_embeddings: true` at the top of a LLaVA config whose `text_config` says false.

    Fix: `bowline audit --fix` writes the value that agrees with the stored tensors at every level.

    Reported in: vllm-project/vllm#51063, huggingface/transformers#45857
    """
    levels = {
        path: value
        for path, value in evidence.declaration.levels.items()
        if evidence.config is not None and _is_text_level(evidence.config, path)
    }
    main = evidence.main_tie
    if len(set(levels.values())) < 2 or main is None:
        return
    loaders_differ = len(set(main.declared.asked.values())) > 1 and not main.declared.unconditional
    stated = listed([f"{path}: {str(value).lower()}" for path, value in levels.items()], limit=8)
    yield Observation(
        message=f"levels of the config disagree ({stated}); which level counts depends on the loader",
        help=(
            "`bowline audit --fix` writes the value that agrees with the stored tensors at every level"
            if loaders_differ and _flag_of_bytes(evidence, main) is not None
            else "transformers needs no change; the same value at every level suits every loader"
        ),
        tensors=(main.tie.target,),
        file=CONFIG,
        severity=None if loaders_differ else Severity.INFO,
        flag_from_bytes=_flag_of_bytes(evidence, main) if loaders_differ else None,
    )


@rule("BW105", "redundant-copy", Severity.WARNING, also=Severity.INFO)
def redundant_copy(evidence: Evidence) -> Iterator[Observation]:
    """A tied matrix is stored twice, with the same values.

    What: the config says tied, and the file holds the tensor under both names, equal in every value. A GGUF file has no
    flag, and a graph (ONNX, pt2) needs none: there every copy is reported, and one that looks like the same table in
    another type is information. An ONNX graph holds a copy transposed, for the product of the head; each is counted.

    Why it hurts: the copy wastes space on disk and in every download, and an edit of one tensor makes the two
    differ. llama.cpp's converter writes both into the GGUF file, and its runtime holds both in memory.

    Example: a state dict gathered from a sharded run and saved with both names.

    Fix: remove the copy from the file, and its name from the index. Saving from transformers 5 leaves it out. Convert a
    GGUF file again from a checkpoint without the copy: for most architectures llama.cpp falls back to the embedding.
    Export to ONNX with `torch.onnx.export(..., dynamo=True)`, or with `do_constant_folding=False`: the graph then
    transposes the one matrix. Before `torch.export`, make the two ends one parameter: `bowline.tie_weights(model)`.

    Reported in: vllm-project/vllm#51665
    """
    copies: dict[tuple[str, str, bool], list[StoredTensor]] = {}
    for tie in evidence.ties:
        if tie.quantised is not None:  # BW118 is about these
            continue
        in_graph = evidence.gguf_file or evidence.graph_file
        if tie.state is TieState.EQUAL and (tie.declared.flag.value or in_graph) and tie.target:
            copies.setdefault((tie.tie.source, tie.target.file, _is_bias(tie)), []).append(tie.target)
    for (source, file, is_bias), targets in copies.items():
        names = [target.name for target in targets]
        wasted = _bytes(sum(target.nbytes for target in targets))
        repeat, copy = ("repeats", "copy") if len(names) == 1 else ("each repeat", "copies")
        turned = ", transposed" if evidence.graph_file and all(target.strides for target in targets) else ""
        yield Observation(
            message=f"{joined(names)} {repeat} {source} value by value{turned}: {wasted} wasted",
            help=(
                _converted_without_copy(evidence)
                if evidence.gguf_file or evidence.graph_file
                else f"{command} leaves the {copy} out"
                if (command := edit_command(evidence, "dedupe"))
                else f"save the model again with transformers 5, which leaves the {copy} out"
            ),
            tensors=(*names, source),
            file=file,
            severity=Severity.INFO if is_bias else None,
        )
    for tie in evidence.ties:
        if tie.quantised is not None:  # BW118 tells how the two compare
            continue
        if tie.difference and tie.difference.cause.value == QUANTISED and tie.target and tie.source:
            target, other = tie.target, tie.source
            how = "in another type" if target.dtype != other.dtype else "with other scales"
            yield Observation(
                message=(
                    f"{target.name} ({target.dtype}) looks like {other.name} ({other.dtype}) {how}: "
                    f"{_bytes(target.nbytes)} for the same table"
                ),
                help=_converted_without_copy(evidence),
                tensors=(target.name, other.name),
                file=target.file,
                severity=Severity.INFO,
            )


@rule("BW106", "both-missing", Severity.ERROR, also=Severity.WARNING)
def both_missing(evidence: Evidence) -> Iterator[Observation]:
    """Neither of two tied tensors is stored.

    What: the class declares the tie, and the file holds neither tensor under any name that the class loads. If all
    names in the file begin with a prefix that the class's names do not have, the message says so.

    Why it hurts: both tensors are drawn at random.

    Example: a shard was not downloaded, or the state dict was saved from a wrapper that adds a prefix to every name.

    Fix: fetch the missing shard, or rename the tensors to what the class expects.

    Reported in: huggingface/transformers#43429
    """
    missing: dict[tuple[str, bool], list[TieEvidence]] = {}
    for tie in evidence.ties:
        if tie.state is TieState.BOTH_MISSING and _loaders_with(evidence, tie, Fate.RANDOM):
            stands_alone = _is_bias(tie) or any(
                other.state is not TieState.BOTH_MISSING and other.tie.source == tie.tie.source
                for other in evidence.ties
            )
            missing.setdefault((tie.tie.source, stands_alone), []).append(tie)
    for (source, stands_alone), ties in missing.items():
        ends = [*(tie.tie.target for tie in ties), source]
        prefix = _extra_prefix(evidence, ties[0])
        fits = bool(prefix) and any(prefix + end in evidence.tensors for end in ends)
        absent = (
            f"neither {ends[0]} nor {source} is stored: both"
            if len(ties) == 1
            else f"none of {joined(ends)} is stored: all"
        )
        yield Observation(
            message=f"{absent} will be drawn at random"
            + (f"; every tensor name begins with {shown(prefix)}" if prefix else ""),
            help=(
                f"remove the prefix {shown(prefix)} from every tensor name"
                if fits
                else "fetch the missing shard, or rename the tensors to what the class expects"
            ),
            tensors=tuple(ends),
            severity=Severity.WARNING if stands_alone else None,
        )


@rule("BW107", "only-target-stored", Severity.WARNING, also=Severity.ERROR)
def only_target_stored(evidence: Evidence) -> Iterator[Observation]:
    """Only the head (the target of the tie) is stored, and not the embedding (its source).

    What: the file holds the head and lacks the embedding that it is tied to.

    Why it hurts: transformers 5 ties the embedding to the stored head. Other loaders need the embedding: vLLM leaves
    it uninitialised, and llama.cpp cannot convert the file. If the flag is false, every loader draws a random
    embedding.

    Example: a tool removed duplicate tensors and kept the alphabetically first name.

    Fix: store the matrix under the embedding's name.

    Reported in: huggingface/safetensors#98
    """
    stored: dict[tuple[str, bool], list[str]] = {}
    for tie in evidence.ties:
        if tie.state is TieState.SOURCE_MISSING and not _is_recorded_alias(evidence, tie) and not _is_bias(tie):
            stored.setdefault((tie.tie.source, bool(tie.declared.flag.value)), []).append(tie.tie.target)
    for (source, tied), targets in stored.items():
        are = "is" if len(targets) == 1 else "are"
        yield Observation(
            message=f"{joined(targets)} {are} stored, but {source}, from which loaders take the matrix, is not",
            help=f"{command} stores the matrix as {source}"
            if (command := edit_command(evidence, "tie"))
            else f"store the matrix as {source}",
            tensors=(*targets, source),
            severity=None if tied else Severity.ERROR,
        )


@rule("BW108", "incompatible", Severity.ERROR, also=Severity.INFO)
def incompatible(evidence: Evidence) -> Iterator[Observation]:
    """Two tied tensors have different shapes or dtypes.

    What: both are stored, and cannot be one matrix because their shapes or dtypes differ.

    Why it hurts: if the shapes differ, loaders refuse the file, or pad and cut the tensors. If the dtypes differ,
    transformers compares the tensors after loading, finds values that a cast has changed, and leaves the pair untied.

    Example: the embedding was resized for new tokens and the head was not.

    Fix: resize the shorter tensor to the shape of the longer one and keep its trained rows, or cast both to one dtype.

    Reported in: huggingface/transformers#35141
    """
    for tie in evidence.ties:
        if tie.state is TieState.INCOMPATIBLE and not tie.quantised and tie.target and tie.source:
            same = "; the values agree once cast" if tie.equal_when_cast else ""
            yield Observation(
                message=(
                    f"{tie.tie.target} is {tie.target.dtype} {list(tie.target.shape)} but {tie.tie.source} is "
                    f"{tie.source.dtype} {list(tie.source.shape)}{same}"
                ),
                help="resize both tensors to one shape, or cast both to one dtype, with the tool that made them differ",
                tensors=(tie.tie.target, tie.tie.source),
                severity=None if tie.declared.flag.value or tie.target.shape != tie.source.shape else Severity.INFO,
            )


@rule("BW110", "bias-diverged", Severity.ERROR)
def bias_diverged(evidence: Evidence) -> Iterator[Observation]:
    """The two names of an output bias hold different values.

    What: a head has one output bias under two names, in BERT `cls.predictions.bias` and
    `cls.predictions.decoder.bias`. The file holds both and they differ. This is reported if a version of transformers
    computes with the bias that is not the decoder's, or if the config says tied.

    Why it hurts: transformers 5 keeps the two apart and computes with the decoder's bias. transformers 4 makes them
    one; in BERT and most other models it takes `cls.predictions.bias`, so the same file gives different logits. In
    RoBERTa and ALBERT version 4 also takes the decoder's bias, and the other one has no effect; but if the flag is
    true, the next `tie_weights()` of transformers 5 overwrites the decoder's bias with the other one.

    Example: an untied BERT was trained in transformers 5, or a tool that resized the vocabulary grew only one of the
    two.

    Fix: store the trained bias under both names.
    """
    for tie in evidence.ties:
        if (
            tie.state is TieState.DIVERGED
            and _is_bias(tie)
            and tie.difference
            and (tie.declared.flag.value or "transformers" in _loaders_with(evidence, tie, _decoders_bias_lost(tie)))
        ):
            yield Observation(
                message=(
                    f"{tie.tie.target} and {tie.tie.source} are one bias under two names, but differ in "
                    f"{tie.difference.rows_differing} entries ({tie.difference.extent})"
                    f"{rows_and_tokens(evidence, tie.difference, ('entry', 'entries'))}"
                ),
                help="store the trained bias under both names",
                tensors=(tie.tie.target, tie.tie.source),
            )


def _decoders_bias_lost(tie: TieEvidence) -> Fate:
    """Returns the fate of the target in a loader that overwrites the decoder's bias with the other one."""
    return Fate.DROPPED if tie.tie.target.endswith("decoder.bias") else Fate.TIED


@rule("BW111", "stored-under-alias", Severity.WARNING)
def stored_under_alias(evidence: Evidence) -> Iterator[Observation]:
    """A shared tensor is stored under a name that other tools do not read.

    What: `safetensors.torch.save_model` keeps the alphabetically first name of a shared tensor and records the other
    in the file's metadata. For GPT-2 the kept name is `lm_head.weight`, not `transformer.wte.weight`.

    Why it hurts: only `safetensors.torch.load_model` reads that record. transformers 5 ties to the stored tensor, but
    vLLM and llama.cpp find no embedding.

    Example: `save_model(model, "model.safetensors")` on any tied model whose head sorts first.

    Fix: save with `model.save_pretrained`, or rename the tensor to the embedding's name.

    Reported in: huggingface/safetensors#98, huggingface/safetensors#493
    """
    for tie in evidence.ties:
        if tie.state is TieState.SOURCE_MISSING and _is_recorded_alias(evidence, tie):
            yield Observation(
                message=(
                    f"stored only as {tie.tie.target}; the file's metadata says that {tie.tie.source} was left out as "
                    "its duplicate"
                ),
                help=f"rename the tensor to {tie.tie.source}, or save the model with save_pretrained",
                tensors=(tie.tie.target, tie.tie.source),
            )


@rule("BW112", "untied-but-equal", Severity.INFO)
def untied_but_equal(evidence: Evidence) -> Iterator[Observation]:
    """The config says untied, and both tensors hold the same values.

    What: the two tensors are equal in every value, and `tie_word_embeddings` is false.

    Why it hurts: it does no harm until training, which makes the two differ. If they were meant to be tied, the flag
    is wrong. If the head was untied on purpose, by copying the embedding, nothing is wrong.

    Example: the head was untied before a LoRA was added to it.

    Fix: none is needed if the head was untied on purpose; otherwise set the flag to true.
    """
    for tie in evidence.ties:
        if tie.state is TieState.EQUAL and tie.declared.flag.value is False and not _is_bias(tie):
            yield Observation(
                message=f"{tie.tie.target} equals {tie.tie.source} in every value, but {tie.declared.flag}",
                help="no change is needed if the head was untied on purpose; otherwise "
                + (edit_command(evidence, "tie") or "set the flag to true"),
                tensors=(tie.tie.target, tie.tie.source),
            )


@rule("BW114", "flag-not-boolean", Severity.ERROR, also=Severity.WARNING)
def flag_not_boolean(evidence: Evidence) -> Iterator[Observation]:
    """`tie_word_embeddings` is neither true nor false.

    What: `tie_word_embeddings` is null, a number, a string or a list.

    Why it hurts: transformers 5 refuses such a config for nearly every class. Version 4 uses the value's truth in
    Python, so the string `"false"` ties. If version 5 does so too, as for T5 and remote code, this is a warning.

    Example: the config was written by hand, or by a tool that writes null for settings that were never set.

    Fix: `bowline audit --fix` writes the flag that agrees with the stored tensors.
    """
    main = evidence.main_tie
    truth = None if main is None else _if_config_decides(evidence, main, value=_flag_of_bytes(evidence, main))
    for path, value in evidence.declaration.not_boolean.items():
        if evidence.config is not None and _is_text_level(evidence.config, path):
            taken = str(bool(value)).lower()
            yield Observation(
                message=f"{path} is {shown(value)}, expected true or false; transformers 4 reads it as {taken}",
                help="write true or false"
                if truth is None
                else "`bowline audit --fix` writes the value that agrees with the stored tensors",
                tensors=() if main is None else (main.tie.target, main.tie.source),
                file=CONFIG,
                severity=None if odd_flag(evidence.declaration) else Severity.WARNING,
                flag_from_bytes=truth,
            )


def _architecture(evidence: Evidence) -> str:
    return f"the architecture {shown(evidence.declaration.family)}"


def _converted_without_copy(evidence: Evidence) -> str:
    if evidence.graph_format:
        return GRAPH_WITHOUT_COPY[evidence.graph_format]
    if head_when_missing(evidence.declaration.family) != "tied":
        return f"leave it: llama.cpp requires a stored head for {_architecture(evidence)}"
    return "convert the model again, from a checkpoint that stores the embedding alone"


@rule("BW117", "default-drops-head", Severity.WARNING)
def default_drops_head(evidence: Evidence) -> Iterator[Observation]:
    """`tie_word_embeddings` is absent, the head differs from the embedding, and mlx-lm drops the head.

    What: no level of `config.json` states `tie_word_embeddings`. transformers takes it as false in this family and
    keeps the stored head. mlx-lm has a default of its own for each `model_type`; here it is true.

    Why it hurts: mlx-lm uses the embedding as the head, without a warning. In mlx-lm 0.32.2 this happens to Llama,
    Mistral, Qwen2, Glm, Granite, Jamba, SeedOss, SmolLM3 and others.

    Example: a Llama with a trained head whose config leaves out every value that equals transformers' default.

    Fix: state `"tie_word_embeddings": false` in config.json, which `bowline audit --fix` does.
    """
    for tie in evidence.ties:
        in_mlx = evidence.outcomes.get("mlx-lm", {}).get(tie.tie.target)
        flag = tie.declared.flag
        if in_mlx and in_mlx.fate is Fate.DROPPED and flag.path is None and flag.value is False:
            yield Observation(
                message=(
                    f"tie_word_embeddings is absent: transformers keeps {tie.tie.target}, and mlx-lm, whose default is "
                    "true, drops it"
                ),
                help="`bowline audit --fix` writes tie_word_embeddings: false into config.json",
                tensors=(tie.tie.target, tie.tie.source),
                file=CONFIG,
                flag_from_bytes=_if_config_decides(evidence, tie, value=False),
            )


def _is_bias(tie: TieEvidence) -> bool:
    return tie.tie.target.endswith("bias")


def _flag_of_bytes(evidence: Evidence, tie: TieEvidence) -> bool | None:
    """The flag that agrees with the stored tensors; `None` if they were not read or are missing.

    `None` too if one end is the other but for its quantisation.
    """
    if tie.difference is not None and tie.difference.cause.value == QUANTISED:
        return None
    if tie.state in (TieState.DIVERGED, TieState.INCOMPATIBLE):
        return False
    if tie.state is TieState.EQUAL:
        return tie.declared.flag.value is not False
    if tie.state is None or tie.state is TieState.BOTH_MISSING:
        return None
    return True


def _is_recorded_alias(evidence: Evidence, tie: TieEvidence) -> bool:
    return evidence.metadata.get(tie.tie.source) == tie.tie.target


def _loaders_with(evidence: Evidence, tie: TieEvidence, fate: Fate) -> str:
    loaders = [
        loader
        for loader, targets in evidence.outcomes.items()
        if (outcome := targets.get(tie.tie.target)) and outcome.fate is fate
    ]
    return ", ".join(loaders)


def _if_config_decides(evidence: Evidence, tie: TieEvidence, *, value: bool | None) -> bool | None:
    """`value`, if any loader reads the config to decide this tie; otherwise `None`."""
    asks = set(tie.declared.asked) - tie.declared.unconditional or evidence.declaration.inferred
    return value if evidence.config is not None and asks else None


def _is_text_level(config: object, path: str) -> bool:
    """Whether `path` is at the top level or in a nested config that has a vocabulary."""
    *keys, _ = path.split(".")
    for key in keys:
        config = config.get(key) if isinstance(config, dict) else None
    return not keys or (isinstance(config, dict) and "vocab_size" in config)


def _extra_prefix(evidence: Evidence, tie: TieEvidence) -> str:
    """The prefix that all tensor names have, as far as the tie's source does not have it too."""
    paths = [name.split(".")[:-1] for name in evidence.tensors]
    ends = zip(min(paths), max(paths), strict=False) if paths else ()  # what these two share, all share
    common = [segment for segment, _ in takewhile(lambda pair: pair[0] == pair[1], ends)]
    own = tie.tie.source.split(".")[0]
    extra = common[: common.index(own)] if own in common else common
    return "".join(f"{segment}." for segment in extra)


def _rows(tie: TieEvidence) -> int:
    if tie.quantised is not None and tie.quantised.shape is not None:
        return tie.quantised.shape[0]
    return tie.target.shape[0] if tie.target is not None and tie.target.shape else 1


def _bytes(count: int) -> str:
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count = count / 1000  # type: ignore[assignment]
    return f"{count:.3g} GB"
