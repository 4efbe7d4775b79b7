"""The training loop: `Trainer`, for any module that computes a loss from its `labels`.

A step is a function of its number: its batches are `batches.at(step, micro)`, dropout is drawn from the seed, the step
and the batch, and the rate follows from the step. So a run that was killed goes on from its last checkpoint and gives
the weights and losses of one that was not, bit for bit on a CPU; and on several processes, which share out the batches
of each step, it is the run of one process up to the order of sums.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import AdamW

from bowline.distributed.gradient_norm import clip_by_norm, gradient_norm
from bowline.errors import CheckpointError, UsageError
from bowline.functional.kernels.half_precision_emulation import wide_products
from bowline.functional.loss import resources
from bowline.nn.modules.gradient_split import GradientSplit
from bowline.nn.state.gathering import Whole, first_writes
from bowline.nn.tree.slots import expect_module
from bowline.train.loop.adamw import adamw, decay_groups, untie
from bowline.train.loop.allocator import kept_memory
from bowline.train.loop.batches import Batch, Batches, count_labels, count_tokens, loss_of, mixed_seed
from bowline.train.loop.interrupt import Interrupt
from bowline.train.loop.learning_rate import learning_rate_at
from bowline.train.loop.observations import diverged, peak_memory, split_of_gradient, tie_state
from bowline.train.loop.run_checkpoints import (
    Checkpoints,
    Saved,
    model_tensors,
    newest,
    optimizer_tensors,
    steps_in,
)
from bowline.train.loop.run_log import Log, Record
from bowline.train.loop.trainer_settings import MAY_DIFFER, TrainerSettings
from bowline.train.parallel.mesh_sizes import mesh_sizes
from bowline.train.parallel.parallelism import Parallelism
from bowline.train.parallel.pipeline import Pipeline
from bowline.train.parallel.processes import Processes, joined

__all__ = ["Batches", "Result", "Trainer"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Result:
    """The last step, its losses, and every record of the log; `held_out_loss` is None if nothing was held out."""

    step: int
    loss: float
    held_out_loss: float | None
    history: tuple[Mapping[str, Any], ...]


@dataclass(kw_only=True)
class RunState:
    """The state of one run, from its first step, or the step from which it resumes, to its last."""

    processes: Processes
    parallel: Parallelism
    share: range
    """The numbers of this process's batches in a step."""
    optimizer: AdamW
    checkpoints: Checkpoints | None
    """`None` if nothing is written: without `out`, and on every process except the first. The same holds for `log`."""
    log: Log | None = None
    tie: str
    """The `tie_state` of the whole model at the start."""
    step: int
    """The number of finished steps."""
    saved_at: int | None = None
    """The step of the last checkpoint."""
    history: list[Record] = field(default_factory=list)
    pending: list[float] = field(default_factory=list)
    """Losses since the last record."""
    before: tuple[float, float, float] | None = None
    """The run's first loss, its last loss, and the last gradient's norm."""
    unread: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Losses and norms of steps, still on the accelerator, that have not been read."""
    split: GradientSplit | None = None
    """The split of the last step's gradient, if it was measured and not yet recorded."""
    tokens: int = 0
    """Tokens since the last record, on all processes."""
    since: float = 0.0
    """When the last record was written, by `time.perf_counter`; time spent on checkpoints is added."""
    parameters: list[nn.Parameter] = field(default_factory=list)
    """The trained parameters, in the model's order."""
    compiled: Any = None
    """The module for evaluations: the model, or the result of `torch.compile`."""
    running: Any = None
    """The module for steps: `compiled`, or its wrapper for several processes."""


class Trainer:
    """Trains `model` in place; no wrapper is left around it.

    With `parallel` or `mesh` in the settings the model stays spread over the processes: sharded by FSDP2, split, or
    with only its stage on each. `bowline.save_checkpoint` saves what is sharded or split; of a model in stages, the
    last checkpoint in `out` is whole.

    Args:
        model: `model(**batch)` returns an object with `loss`, a dict with "loss", or a tuple that begins with the loss.
        batches: see `Batches`.
        settings: see `TrainerSettings`.
        out: the directory of `log.jsonl` and `checkpoints/`; None to write nothing.
        resume: continue from the last checkpoint in `out`, if there is one. The model must be built as before.
        log: called with each record, on the first process.
        on_step: called with the number of each finished step, on the first process.

    Raises:
        UsageError: invalid arguments.

    Example:
        >>> class Noise:
        ...     def at(self, step, micro=0):
        ...         ids = torch.randint(9, (4, 8), generator=torch.Generator().manual_seed(step))
        ...         return {"input_ids": ids, "labels": ids}
        ...     def held_out(self):
        ...         return [self.at(-1)]
        >>> from bowline.models import GPT2Config, GPT2LMHeadModel
        >>> tiny = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_positions=8, n_embd=8, n_layer=1, n_head=1))
        >>> result = Trainer(tiny, Noise(), TrainerSettings(steps=3)).train()
        >>> result.step, [record["tie"] for record in result.history]
        (3, ['tied', 'tied'])
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Batches,
        settings: TrainerSettings,
        *,
        out: Path | None = None,
        resume: bool = False,
        log: Callable[[Mapping[str, Any]], None] | None = None,
        on_step: Callable[[int], None] | None = None,
    ) -> None:
        expect_module(model)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise UsageError(
                f"{type(model).__name__}: has no parameter with requires_grad=True, so nothing can be trained"
            )
        if resume and out is None:
            raise UsageError("resume=True without out: expected the directory of the run to resume")
        self.model, self.batches, self.settings = model, batches, settings
        self.out, self.resume = out, resume
        self.log, self.on_step = log, on_step
        self.device = next(model.parameters()).device
        self.groups = decay_groups(model, settings.embedding_rate)
        self._state: RunState | None = None

    @property
    def step(self) -> int:
        """The steps that are done."""
        return 0 if self._state is None else self._state.step

    @property
    def optimizer(self) -> AdamW:
        """The optimizer of the run; there is none before `train`."""
        return self._run.optimizer

    @property
    def _run(self) -> RunState:
        if self._state is None:
            raise UsageError("the trainer has not started", help="call train() first")
        return self._state

    # --- the loop -----------------------------------------------------------------------------------------------------

    def train(self) -> Result:
        """Train to the last step.

        A first Ctrl-C or SIGTERM ends the loop behind a whole step, with a checkpoint.

        Raises:
            KeyboardInterrupt: it was ended so; the message says where it can be gone on with.
            UsageError: `out` has checkpoints and nobody said `resume`, or the settings are not those of the run.
            CheckpointError: a checkpoint cannot be written (the disk is full) or is another model's.
            TrainingError: the loss or a gradient is no number any more.
        """
        with ExitStack() as stack:
            stack.enter_context(kept_memory(self.device))
            stack.enter_context(resources(onednn=False))  # another process might find another library the faster
            run = self._begin(stack)
            interrupt = stack.enter_context(Interrupt())
            stack.enter_context(self._saying_what_is_left())
            while run.step < self.settings.steps:
                mine = [(micro, self.batches.at(run.step, micro)) for micro in run.share]
                stop, labelled = self._agree(interrupt, mine)
                if stop:
                    self._stop(interrupt.seen or "a signal")
                if run.step == self.settings.untie_at_step:
                    untie(self.model, run.optimizer)
                    self._wrap()
                self._one_step(mine, labelled)
                run.step += 1
                self._after_step()
            return self._result()

    def _one_step(self, mine: list[tuple[int, Batch]], labelled: float) -> None:
        """Compute this process's gradients, average them over all processes, clip them, and step the optimizer."""
        run = self._run
        settings = self.settings
        for group in run.optimizer.param_groups:
            group["lr"] = learning_rate_at(run.step, settings) * group["rate"]
        if run.parallel.pipeline is not None:
            self._pipeline_step(run.parallel.pipeline, mine, labelled)
            return
        losses = []
        # A gradient of several processes is split by none of them, and a compiled model runs no hooks that come and go.
        split = self._is_logged(run.step + 1) and not (run.processes.together or settings.compile)
        with split_of_gradient(self.model, split) as meter, self._products():
            for at, (micro, batch) in enumerate(mine):
                share = self._share_of(batch, labelled)
                self._seed(micro)
                with nullcontext() if at == len(mine) - 1 else self._without_sync():
                    with self._precision():
                        loss = loss_of(run.running(**self._moved(batch)))
                    factor = share * run.parallel.replicas  # the average over processes divides by it
                    (loss if factor == 1.0 else loss * factor).backward()
                losses.append(loss.detach() if share == 1.0 else loss.detach() * share)
            run.split = None if meter is None else meter.read()
        norm = gradient_norm(run.parameters)
        if settings.clip and (self.device.type != "cpu" or norm.item() > settings.clip):
            clip_by_norm(run.parameters, settings.clip, norm)
        self._update(sum(losses[1:], losses[0]), norm, mine)

    def _pipeline_step(self, pipeline: Pipeline, mine: list[tuple[int, Batch]], labelled: float) -> None:
        """Take a step in which each stage of a pipeline has its own part of the gradients."""
        run = self._run
        replicas = run.parallel.replicas
        with self._products():
            moved = [(number, self._moved(batch)) for number, batch in mine]
            loss = pipeline.step(moved, lambda batch: replicas * self._share_of(batch, labelled))
        norm = pipeline.clip(run.parameters, self.settings.clip)
        self._update(loss / replicas, norm, mine)

    def _share_of(self, batch: Batch, labelled: float) -> float:
        """The share of a batch in the step's loss."""
        return count_labels(batch) / labelled if labelled else 1 / self.settings.accumulation

    def _update(self, loss: torch.Tensor, norm: torch.Tensor, mine: list[tuple[int, Batch]]) -> None:
        """Step the optimizer, and keep the step's loss and norm to be read."""
        run = self._run
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=True)
        run.unread.append((loss, norm))
        run.tokens += run.parallel.replicas * sum(count_tokens(batch) for _, batch in mine)

    def _after_step(self) -> None:
        """Write records and checkpoints and evaluate, at the steps where each is due."""
        run = self._run
        settings, step = self.settings, run.step
        last = step == settings.steps
        evaluate = last or step % settings.evaluate_every == 0
        save = last or step % settings.save_every == 0
        record = evaluate or self._is_logged(step)
        if record or save or (self.device.type == "cpu" and run.processes.count == 1):
            self._read()
        if self.on_step is not None and run.processes.first:
            self.on_step(step)
        if record:
            self._record(evaluate)
        if save:
            self._save()

    def _is_logged(self, step: int) -> bool:
        return step % self.settings.log_every == 0 or step in (1, self.settings.steps)

    # --- before the first step ----------------------------------------------------------------------------------------

    def _begin(self, stack: ExitStack) -> RunState:
        """Make everything that a step needs, from the last checkpoint if there is one and `resume` is set."""
        settings = self.settings
        processes = stack.enter_context(joined(self.device))
        parallel = Parallelism(processes, self._sizes(processes.count), self.device)
        share = parallel.share(settings.accumulation)
        directory = None if self.out is None else self.out / "checkpoints"
        checkpoints = None
        if directory is not None and processes.first:
            checkpoints = stack.enter_context(Checkpoints(directory, settings.keep))
        saved = None if directory is None else self._saved(directory)
        tie = tie_state(self.model)
        parallel.spread_out(self.model, self._before_batch)
        pipeline = parallel.pipeline
        tables = None if pipeline is None else pipeline.tables()
        self.groups = decay_groups(self.model, settings.embedding_rate, tables)  # also of a model that is untied below
        run = self._state = RunState(
            processes=processes,
            parallel=parallel,
            share=share,
            optimizer=adamw(self.groups, settings),
            tie=tie,
            checkpoints=checkpoints,
            step=saved.step if saved else 0,
        )
        if settings.untie_at_step is not None and run.step > settings.untie_at_step:
            untie(self.model, run.optimizer)
        if saved:
            saved.restore(self.model, run.optimizer, None if pipeline is None else pipeline.copies)
            run.pending, run.before = list(saved.state["pending"]), tuple(saved.state["before"]) or None
            run.saved_at = saved.step
        if self.out is not None and processes.first:
            run.log = stack.enter_context(Log(self.out, up_to=run.step))
            run.history = run.log.history
        if settings.activation_checkpointing:
            self._checkpoint_activations(stack)
        model: Any = self.model
        if getattr(model, "loss_only", None) is False:  # our families': nobody reads logits here
            model.loss_only = True
            stack.callback(setattr, model, "loss_only", False)
        self._wrap()
        stack.callback(self._unwrap)
        self.model.train()
        run.since = time.perf_counter()
        logger.info("%s", self.groups)
        return run

    def _sizes(self, processes: int) -> Mapping[str, int]:
        """Return the mesh's sizes, with which every setting has to go together."""
        settings = self.settings
        sizes = mesh_sizes(settings.parallel, settings.mesh, processes)
        spread = [name for name, size in sizes.items() if size > 1 and name != "ddp"]
        for name, why in (
            ("untie_at_step", "a head that is spread out gets no copy of its own"),
            ("compile", "compiled models that are spread out have not been tried"),
        ):
            if spread and getattr(settings, name) not in (None, False):
                raise UsageError(
                    f"{name} with {' and '.join(spread)}: {why}", help="leave it out, or use ddp", argument=name
                )
        return sizes

    def _saved(self, directory: Path) -> Saved | None:
        saved = newest(directory)
        if saved is None:
            return None
        if not self.resume:
            raise UsageError(
                f"{directory}: already holds a run of {saved.step} step{'s' * (saved.step != 1)}",
                help="set resume=True to continue it, or give another directory",
            )
        saved.expect(self.settings.to_dict(), MAY_DIFFER)
        return saved

    def _checkpoint_activations(self, stack: ExitStack) -> None:
        enable = getattr(self.model, "gradient_checkpointing_enable", None)
        if not callable(enable):
            raise UsageError(
                f"activation_checkpointing=True: {type(self.model).__name__} has no gradient_checkpointing_enable()",
                help="wrap its blocks in torch.utils.checkpoint yourself",
                argument="activation_checkpointing",
            )
        enable()
        disable = getattr(self.model, "gradient_checkpointing_disable", None)
        if callable(disable):
            stack.callback(disable)

    def _wrap(self) -> None:
        """Make the modules for steps and evaluations from the present model, and list its parameters in its order."""
        run = self._run
        run.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        run.compiled = torch.compile(self.model) if self.settings.compile else self.model
        run.running = run.compiled
        if self._has_replicas():
            place = [self.device.index] if self.device.type == "cuda" else None
            run.running = nn.parallel.DistributedDataParallel(
                run.compiled, device_ids=place, gradient_as_bucket_view=True
            )

    def _has_replicas(self) -> bool:
        """Whether DDP averages the gradients of several whole models."""
        return self._run.processes.together and not self._run.parallel.spread

    def _unwrap(self) -> None:
        """Whoever holds this trainer holds no group of processes by it."""
        run = self._run
        run.running = run.compiled = self.model

    # --- within a step ------------------------------------------------------------------------------------------------

    def _agree(self, interrupt: Interrupt, mine: list[tuple[int, Batch]]) -> tuple[bool, float]:
        """Whether any process must stop, and the number of labels in the whole step (0 if batches need no weights)."""
        run = self._run
        several = self.settings.accumulation > 1
        labelled = sum(count_labels(batch) for _, batch in mine) if several and run.parallel.counts else 0
        stop, total = run.processes.total([interrupt.seen is not None, labelled])
        return stop > 0, total

    def _seed(self, micro: int) -> None:
        """Dropout is a function of the seed, the step and the batch, on whichever process."""
        run = self._run
        mixed = mixed_seed(self.settings.seed, run.step, micro)
        torch.default_generator.manual_seed(mixed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(mixed)

    def _before_batch(self, micro: int) -> AbstractContextManager[Any]:
        """What a stage of a pipeline needs before it computes a batch; each stage draws its own dropout."""
        run, pipeline = self._run, self._run.parallel.pipeline
        at = pipeline.at if pipeline is not None else 0
        if self.model.training:
            torch.default_generator.manual_seed(mixed_seed(self.settings.seed, run.step, micro, *([at] if at else [])))
        return self._precision()

    def _moved(self, batch: Batch) -> Batch:
        if self.device.type == "cpu":
            return batch
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.settings.bf16 else nullcontext()

    def _products(self) -> AbstractContextManager[Any]:
        """For forward and backward passes: on a processor without bf16 in float32. A compiled model has its own."""
        wide = self.settings.bf16 and not self.settings.compile
        return wide_products(torch.bfloat16, self.device) if wide else nullcontext()

    def _without_sync(self) -> AbstractContextManager[Any]:
        run = self._run
        return run.running.no_sync() if self._has_replicas() else nullcontext()

    # --- after a step -------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Losses and norms since the last time, which an accelerator is waited for; all of them numbers, or the end."""
        run = self._run
        if not run.unread:
            return
        losses = run.parallel.total(torch.stack([loss for loss, _ in run.unread]).double().tolist())
        norms = torch.stack([norm for _, norm in run.unread]).tolist()
        run.unread.clear()
        begin = run.step - len(losses) + 1
        for step, loss, norm in zip(range(begin, run.step + 1), losses, norms, strict=True):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                seen = {"loss": loss, "gradient's norm": norm}
                raise diverged(self.model, step, seen, run.before, self._kept())
            run.pending.append(loss)
            run.before = (run.before[0] if run.before else loss, loss, norm)

    def _record(self, evaluate: bool) -> None:
        run = self._run
        seconds = time.perf_counter() - run.since
        record: Record = {
            "step": run.step,
            "loss": math.fsum(run.pending) / len(run.pending),
            "lr": learning_rate_at(run.step - 1, self.settings),
            "tokens_per_second": round(run.tokens / seconds, 1),
            "gradient_norm": run.before[2] if run.before else None,
        }
        if evaluate:
            held_out = self._evaluate()
            if held_out is not None:
                if not math.isfinite(held_out):
                    raise diverged(self.model, run.step, {"held-out loss": held_out}, run.before, self._kept())
                record["held_out_loss"] = held_out
                record["perplexity"] = math.exp(min(held_out, 700.0))
        record["memory_mb"] = round(peak_memory(self.device), 1)
        record["tie"] = self._tie_state()
        if run.split is not None:
            record["gradient_split"] = dataclasses.asdict(run.split)
            run.split = None
        if run.step == 1:
            record["groups"] = str(self.groups)
        run.pending.clear()
        if run.log is not None:
            run.log.write(record)
        else:
            run.history.append(record)
        if self.log is not None and run.processes.first:
            self.log(record)
        run.tokens, run.since = 0, time.perf_counter()

    @torch.no_grad()
    def _evaluate(self) -> float | None:
        """The mean loss over held-out labels, each process reading its share; None if nothing is held out."""
        run = self._run
        self.model.eval()
        total: float = 0
        count: float = 0
        held_out, mine = iter(self.batches.held_out()), run.parallel.replica
        while batches := list(islice(held_out, run.parallel.replicas)):
            others_only = mine >= len(batches)  # every process that has a part of the model has to compute
            if others_only and not run.parallel.spread:
                break
            batch = batches[0 if others_only else mine]
            labels = 0 if others_only else count_labels(batch)
            with self._products():
                loss = self._evaluated(self._moved(batch))
            total, count = total + float(loss) * labels, count + labels
        run.parallel.reshard(self.model)
        self.model.train()
        total, count = run.parallel.total([total, count])
        return total / count if count else None

    def _evaluated(self, batch: Batch) -> torch.Tensor:
        run = self._run
        if run.parallel.pipeline is not None:
            return run.parallel.pipeline.evaluate(batch)
        with self._precision():
            return loss_of(run.compiled(**batch))

    def _tie_state(self) -> str:
        """Whether head and table are one; the copies of stages are compared."""
        pipeline = self._run.parallel.pipeline
        if pipeline is None:
            return tie_state(self.model)
        for tie in pipeline.ties:
            tie.check()
        return self._run.tie

    def _save(self) -> None:
        """Write a checkpoint if checkpoints are wanted and this step has none yet."""
        run = self._run
        spread = run.parallel.spread and self.out is not None
        if run.saved_at == run.step or not (spread or run.checkpoints is not None):
            return
        began = time.perf_counter()
        state = {
            "format": 1,
            "step": run.step,
            "settings": self.settings.to_dict(),
            "pending": run.pending,
            "before": run.before or [],
            "torch": torch.__version__,
        }
        tensors, moments = model_tensors(self.model), optimizer_tensors(self.model, run.optimizer)
        if run.parallel.pipeline is not None:
            tensors, moments = (run.parallel.pipeline.of_all_stages(each) for each in (tensors, moments))

        def write(whole: Whole | None = None) -> None:
            assert run.log is not None
            assert run.checkpoints is not None
            run.log.synchronise()
            run.checkpoints.save(tensors, moments, state, whole)

        if spread:
            first_writes({**tensors, **moments}, write)
        else:
            write()
        run.saved_at = run.step
        run.since += time.perf_counter() - began

    @contextmanager
    def _saying_what_is_left(self) -> Iterator[None]:
        """Add the step and the last complete checkpoint to an error such as that of a full disk."""
        run = self._run
        try:
            yield
        except CheckpointError as error:
            raise type(error)(f"step {run.step}: {error.message}; {self._kept()}", help=error.help) from error

    def _kept(self) -> str:
        steps = [] if self.out is None else steps_in(self.out / "checkpoints")
        return f"the checkpoint of step {steps[-1]} is complete" if steps else "there is no checkpoint"

    def _stop(self, by: str) -> NoReturn:
        run = self._run
        self._read()
        self._save()
        run.processes.total([0.0])  # nobody leaves before it is written: torchrun ends the others then
        there = f"{self._kept()}, and a resumed run continues from it" if self.out is not None else "nothing is saved"
        raise KeyboardInterrupt(f"ended by {by} after step {run.step}: {there}")

    def _result(self) -> Result:
        run = self._run
        held_out = [record["held_out_loss"] for record in run.history if "held_out_loss" in record]
        return Result(
            step=run.step,
            loss=run.history[-1].get("loss", math.nan) if run.history else math.nan,
            held_out_loss=held_out[-1] if held_out else None,
            history=tuple(run.history),
        )
