"""From text to a trained model in a directory: `bowline train` as a function.

OUT/run.json                 the configuration, and the fingerprint of the text
OUT/tokenizer/, OUT/tokens/  the tokenizer and the packed tokens, made once and used again by a resumed run
OUT/log.jsonl, checkpoints/  the log and the checkpoints of the training loop
OUT/config.json, model.safetensors, tokenizer.json ...   the model, once it is trained
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bowline.checkpoint.durable.file_creation import cannot_write
from bowline.checkpoint.durable.publication import publishing
from bowline.errors import CheckpointError
from bowline.functional.row_shard import is_dtensor
from bowline.models import PreTrainedModel
from bowline.models.common.from_pretrained import checked_device
from bowline.models.text_generation import GENERATION
from bowline.nn.ties.ends import makes_logits
from bowline.nn.ties.shared_parameters import find_ties
from bowline.nn.tree.slots import slots
from bowline.train.loop.adamw import decay_groups
from bowline.train.loop.run_checkpoints import newest, steps_in
from bowline.train.loop.trainer import Result, Trainer
from bowline.train.model_building import batches_for, begins_at_unigram, check_model, model_for, settle_biases
from bowline.train.parallel.mesh_sizes import mesh_sizes
from bowline.train.parallel.processes import Processes, joined
from bowline.train.run_directory import stated, taken
from bowline.train.text.corpus import Corpus, CorpusSurvey, find_text
from bowline.train.text.objectives import CausalBatches
from bowline.train.text.packed_tokens import Packed, held_out_documents, pack, training_documents
from bowline.train.text.tokenizer_training import TextTokenizer, take_tokenizer, train_tokenizer
from bowline.train.train_config import TrainConfig

__all__ = ["Plan", "Text", "TrainedRun", "prepare", "train"]

SAMPLING = {"do_sample": True, "temperature": 0.7, "top_k": 40}
"""The sampling options that are saved for `generate`, because greedy decoding soon repeats itself."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """The prepared text of a run: its survey, its tokenizer and its packed tokens."""

    survey: CorpusSurvey
    tokenizer: TextTokenizer
    packed: Packed


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The model and data of a run before its first step."""

    config: TrainConfig
    text: Text
    model: PreTrainedModel
    batches: CausalBatches
    sizes: Mapping[str, int] = field(default_factory=dict)
    """The number of processes along each dimension of the mesh."""

    @property
    def lines(self) -> list[str]:
        """The plan in a few lines to print."""
        config, packed = self.config, self.text.packed
        steps, rows = config.value("steps"), config.value("batch_size")
        each = f"{config.value('accumulation')} x " if config.value("accumulation") > 1 else ""
        drawn = (
            "initialised as usual for the family" if config.drawn_by is None else f"initialised by {config.drawn_by}"
        )
        drawn = drawn if config.init_from is None else f"from {config.init_from}"
        drawn += ", the head's bias from token frequencies" * begins_at_unigram(config, self.model)
        return [
            f"text      {self.text.survey}",
            f"tokens    {packed}; a vocabulary of {len(self.text.tokenizer):,}",
            f"model     {config.family} {config.size}: {self.model.num_parameters():,} parameters, {self._tied()}",
            f"weights   {drawn}, seed {config.seed}",
            f"optimizer {decay_groups(self.model, config.value('embedding_rate'))}",
            f"training  {steps:,} step{'s' * (steps != 1)} of {each}{rows} x {config.value('length')} tokens, "
            f"{steps / self.batches.epoch:.2g} times the text",
            *([f"processes {self._processes()}"] if math.prod(self.sizes.values()) > 1 else []),
        ]

    def _processes(self) -> str:
        return ", ".join(f"{size} along {name}" for name, size in self.sizes.items() if size > 1)

    def _tied(self) -> str:
        known = slots(self.model)
        for tie in find_ties(self.model).ties:
            if makes_logits(known[tie.target], known[tie.source]):
                count = known[tie.source].tensor.numel()
                share = count / self.model.num_parameters()
                when = self.config.untie_at_step
                until = "" if when is None else f" until step {when:,}"
                return f"{count:,} ({share:.1%}) of them in the tied matrix, {tie}{until}"
        return "the head has its own matrix"


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """A finished run: the directory of the model, the loop's result, and the perplexity."""

    directory: Path
    result: Result

    @property
    def perplexity(self) -> float:
        """The perplexity on the held-out text, exp of the last loss; of masked tokens (bert) or masked spans (t5)."""
        loss = self.result.held_out_loss
        return math.exp(loss) if loss is not None and loss < 700 else math.inf


def prepare(
    config: TrainConfig,
    directory: Path,
    corpus: Corpus | None = None,
    say: Callable[[str], object] | None = None,
) -> Text:
    """Prepare the text of a run: make `directory`/tokenizer and `directory`/tokens if missing or different.

    The tokenizer is trained on the documents that are not held out. Several runs over one text can share a directory.

    Raises:
        UsageError: no text or too little, a vocabulary that the text does not support, or bytes that `strict` refuses.
        CheckpointError: the directory cannot be written.
    """
    corpus = corpus or find_text(config.data, strict=config.strict, without=directory)
    survey = corpus.survey
    origin = config.tokenizer or config.init_from
    of_family = "gpt2" if config.family == "lstm" else config.family
    asked: dict[str, Any] = {"family": of_family, "origin": origin, "text": survey.fingerprint}
    asked |= {"vocab_size": config.vocab_size, "or_less": config.preset.vocab_size, "share": config.held_out_share}
    place = directory / "tokenizer"
    if stated(place / "made.json") != asked:
        if origin is not None:
            tokenizer = take_tokenizer(config.family, origin, asked_for=config.tokenizer is not None)
        else:
            if say is not None:
                say(f"training a tokenizer on {survey.characters:,} characters ...")
            held_out = held_out_documents(survey, config.held_out_share)
            tokenizer = train_tokenizer(
                config.family,
                training_documents(corpus, held_out),
                config.vocab_size or config.preset.vocab_size,
                characters=survey.characters,
                exactly=config.vocab_size is not None,
            )
        with publishing(place, replaces=lambda name: True) as stage:
            tokenizer.save(stage)
            (stage / "made.json").write_text(json.dumps(asked, indent=2) + "\n")
    tokenizer = take_tokenizer(config.family, place)
    if say is not None:
        say("packing the text ...")
    packed = pack(corpus, tokenizer, directory / "tokens", share=config.held_out_share)
    return Text(survey=survey, tokenizer=tokenizer, packed=packed)


def train(
    config: TrainConfig,
    out: str | os.PathLike[str],
    *,
    resume: bool = False,
    say: Callable[[str], object] | None = None,
    on_plan: Callable[[Plan], object] | None = None,
    log: Callable[[Mapping[str, Any]], None] | None = None,
    on_step: Callable[[int], None] | None = None,
) -> TrainedRun:
    """Train the model that `config` describes; `out` is then a checkpoint with its tokenizer.

    Under `torchrun` every process calls this function in the same way, and the first one writes.

    Args:
        config: see `TrainConfig`.
        out: a new directory, or an empty one.
        resume: continue the run in `out`. If there is none, a new run begins, and `say` gets a line about that.
        say: called with a line before each part that takes time.
        on_plan: called with the plan before the first step.
        log: called with each record of the loop.
        on_step: called with the number of each finished step.

    Raises:
        UsageError: a directory that holds something else or another run; too little text; as `model_for` and
            `batches_for`; as `Trainer.train`.
        CheckpointError: as `Trainer.train`; the model cannot be written to `out`.
        TrainingError: as `Trainer.train`.
        KeyboardInterrupt: the run was stopped by a signal, after a complete checkpoint.
    """
    place = Path(out)
    with ExitStack() as stack:
        processes = stack.enter_context(joined(checked_device(config.device)))
        check_model(config)
        sizes = mesh_sizes(config.parallel, config.mesh, processes.count)
        if processes.first:
            corpus = find_text(config.data, strict=config.strict, without=place)
            goes_on = stack.enter_context(taken(place, config, corpus.survey, resume=resume))
            if resume and not goes_on and say is not None:
                say(f"{place}: no checkpoint to resume from, so a new run starts")
            text = prepare(config, place, corpus, say)
        processes.total([0.0])  # the others wait until the text is prepared
        if not processes.first:
            text = prepare(config, place)
        model = model_for(config, text.tokenizer, text.packed)
        batches = batches_for(config, text.tokenizer, text.packed)
        if on_plan is not None and processes.first:
            on_plan(Plan(config=config, text=text, model=model, batches=batches, sizes=sizes))
        trainer = Trainer(model, batches, config.settings(), out=place, resume=resume, log=log, on_step=on_step)
        result = trainer.train()
        if sizes.get("pp", 1) > 1:
            model = _whole_again(config, text, place, processes) or model
        settle_biases(model)
        spread = any(map(is_dtensor, model.parameters()))
        try:
            if processes.first:
                _save_beside(place, text.tokenizer, model)
            if processes.first or spread:
                model.eval().save_pretrained(place)
        except (OSError, CheckpointError) as error:
            raise _kept(place, error) from error
        processes.total([0.0])
    return TrainedRun(directory=place, result=result)


def _whole_again(config: TrainConfig, text: Text, place: Path, processes: Processes) -> PreTrainedModel | None:
    """The whole model of a run in stages, from its last checkpoint, on the process that saves it."""
    last = newest(place / "checkpoints") if processes.first else None
    if last is None:
        return None
    model = model_for(config, text.tokenizer, text.packed)
    last.restore(model, None)
    return model


def _save_beside(place: Path, tokenizer: TextTokenizer, model: PreTrainedModel) -> None:
    """Save what a model directory holds beside config and weights."""
    tokenizer.save(place)
    if model.config.model_type in ("gpt2", "lstm"):
        ends = {name: getattr(model.config, name) for name in ("bos_token_id", "eos_token_id")}
        (place / GENERATION).write_text(json.dumps({**ends, **SAMPLING}, indent=2) + "\n")


def _kept(place: Path, error: OSError | CheckpointError) -> CheckpointError:
    """Make the error for a model that cannot be written to `out`; it says that the last checkpoint has it."""
    found = error if isinstance(error, CheckpointError) else cannot_write(place, error)
    last = place / "checkpoints" / f"step-{steps_in(place / 'checkpoints')[-1]:08d}"
    return type(found)(
        f"{found.message}; {last} is complete", help="--resume writes the model, once there is space for it"
    )
