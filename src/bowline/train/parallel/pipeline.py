"""Runs the batches of a step through the stages of a pipeline, with torch's schedules, and keeps its ties."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from bowline.distributed.gradient_norm import clip_by_norm, gradient_norm
from bowline.distributed.pipeline_tie import PipelineTie
from bowline.errors import UsageError
from bowline.nn.state.gathering import with_those_elsewhere
from bowline.train.parallel.stages import Stage, keep_stage, tied_across

__all__ = ["Pipeline"]

Batch: TypeAlias = dict[str, torch.Tensor]


class Pipeline:
    """The stages of a model on the processes of one mesh dimension, one stage on each.

    Args:
        model: the whole model; all that other stages have is taken out of it.
        mesh: the dimension.
        before: called with a batch's number before a stage computes it; returns the context to compute in.

    Raises:
        UsageError: a model without stages, or a number of stages that it cannot have.
    """

    def __init__(self, model: nn.Module, mesh: Any, before: Callable[[int], Any]) -> None:
        self.group = mesh.get_group()
        self.at, self.of = mesh.get_local_rank(), mesh.size()
        self.last = self.at == self.of - 1
        self.copies: Mapping[str, str] = tied_across(model, self.of)
        """The names of a matrix that other stages have too, each with the name under which it is saved."""
        self.device = next(model.parameters()).device
        table = getattr(model.get_input_embeddings(), "weight", None)  # type: ignore[operator]
        self._tables = {name for name, held in model.named_parameters(remove_duplicate=False) if held is table}
        keep_stage(model, self.at, self.of)
        self.stage = Stage(model, self.at, self.of, before)
        self.ties: tuple[PipelineTie, ...] = ()
        self._schedules: dict[Any, Any] = {}
        self._factors: Callable[[torch.Tensor], float] = lambda labels: 1.0

    def tie(self) -> None:
        """Ties the copies, once every stage is sharded; their values are the source's then."""
        names: dict[str, list[str]] = {}
        for target, source in self.copies.items():
            names.setdefault(source, [source]).append(target)
        self.ties = tuple(PipelineTie(self.stage.model, group, self.group) for group in names.values())

    def tables(self) -> list[nn.Parameter]:
        """What this stage has of the input embedding: itself, or a copy; a head that is tied to it too."""
        held = self.stage.model.named_parameters(remove_duplicate=False)
        return [parameter for name, parameter in held if name in self._tables]

    def step(self, batches: Sequence[tuple[int, Batch]], factor: Callable[[Batch], float]) -> torch.Tensor:
        """Computes the gradients of all batches; returns the sum of their losses (), which only the last stage has.

        Args:
            batches: with the number of each.
            factor: what a batch's loss is multiplied by.
        """
        self._factors = lambda labels: factor({"labels": labels})
        losses = self._run("train", batches)
        for tie in self.ties:
            tie.reduce_gradients()
        return losses

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> torch.Tensor:
        """The loss () of one batch, which only the last stage has."""
        self._factors = lambda labels: 1.0
        return self._run("evaluate", [(0, batch)])

    def of_all_stages(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This stage's tensors and, on meta, those of the others; a matrix of several stages is there once.

        Args:
            tensors: those of this stage, by the name of a parameter or by that and more behind a dot.
        """
        copies = tuple(f"{name}." for name in self.copies)
        return with_those_elsewhere(
            {name: tensor for name, tensor in tensors.items() if not f"{name}.".startswith(copies or ("\0",))}
        )

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
        """Clips the gradients of all stages by their norm, and returns it; a tied matrix counts once."""
        most = max_norm or float("inf")
        if self.ties:
            return self.ties[0].clip_grad_norm_(parameters, most, others=self.ties[1:])
        norm = gradient_norm(parameters, group=self.group, device=self.device)
        clip_by_norm(parameters, most, norm)
        return norm

    def _run(self, purpose: str, batches: Sequence[tuple[int, Batch]]) -> torch.Tensor:
        whole = _joined([batch for _, batch in batches])
        key = purpose, len(batches), tuple((name, tuple(value.shape)) for name, value in whole.items())
        if key not in self._schedules:
            self._schedules = {old: kept for old, kept in self._schedules.items() if old[0] != purpose}
            self._schedules[key] = self._schedule(len(batches))
        losses: list[torch.Tensor] = []
        asked: dict[str, Any] = {"target": whole["labels"], "losses": losses} if self.last else {}
        numbers = torch.tensor([number for number, _ in batches])
        schedule = self._schedules[key]
        run = schedule.step if purpose == "train" else schedule.eval
        run(micro=numbers, **whole, **asked)
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros((), device=self.device)

    def _schedule(self, batches: int) -> Any:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        stage = PipelineStage(self.stage, self.at, self.of, self.device, group=self.group)
        kind = Schedule1F1B if batches >= self.of else ScheduleGPipe
        return kind(stage, n_microbatches=batches, loss_fn=self._weighted, scale_grads=False)

    def _weighted(self, loss: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return loss.reshape(()) * self._factors(labels)


def _joined(batches: Sequence[Batch]) -> Batch:
    """One batch of all rows, which the schedule cuts into as many equal parts again."""
    shapes = [{name: tuple(value.shape) for name, value in batch.items()} for batch in batches]
    if any(each != shapes[0] for each in shapes):
        raise UsageError(f"parallel='pp': the batches of a step have the shapes {shapes}, expected equal ones")
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
