"""`TieGuard`: checks ties during a whole training run, and stops the run when one breaks."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from bowline.errors import TieError, UsageError
from bowline.nn.guards.replicas import compared_across
from bowline.nn.guards.trainer_callbacks import CallbackHooks, lightning_callback, trainer_callback
from bowline.nn.ties.declared_ties import Ties, as_ties, declared_ties
from bowline.nn.ties.optimizer_groups import expect_groups
from bowline.nn.ties.shared_parameters import find_ties
from bowline.nn.ties.tie_check import check_ties
from bowline.nn.tree.table_slots import SharedTable, TableEnd
from bowline.tie import Tie

__all__ = ["TieGuard"]

WAY_OUT = (
    'tie_weights(model, guard.ties, optimizer=optimizer, on_conflict="source" or "target") ties them again; '
    "or call untie_weights(model) and remove the guard"
)


class TieGuard(CallbackHooks):
    """Raises at the step at which a tie of `model` stops being one `Parameter`.

    What breaks a tie in the middle of a run breaks it silently: `model.lm_head = nn.Linear(...)`,
    `load_state_dict(assign=True)`, a parametrization, `to_empty`. `ties` are those that are declared or shared now,
    unless they are given. Both ends are looked up by name from `model` at every check, and compared by identity: a
    check costs a few microseconds, whatever the model's size. The guard holds the model that it was given, so it goes
    on working when that model is wrapped later (DDP, `torch.compile`, accelerate). `optimizer` is looked at when the
    guard is made, and again to explain a broken tie.

    With a process `group` the guard also compares the processes: by one all-reduce of two numbers a tie it sees a tie
    that broke on one of them, or replicas (DDP's, or a pipeline's) whose bits differ; all of them raise then. It reads
    the matrix for that, so `every=100` suits a large one. Parameters that are sharded have other rows on every process,
    and are compared by identity only. Every process has to have the guard, and to step equally often.

    The guard is a callback itself, `callbacks=[guard]`, of transformers' `Trainer` and of Lightning's.

    Raises:
        TieError: there is no tie to guard, or one that does not hold now.
        UsageError: `every` is not a positive number of steps, or `group` is no process group.

    Example:
        >>> model = nn.ModuleDict({"wte": nn.Embedding(9, 4), "lm_head": nn.Linear(4, 9, bias=False)})
        >>> model["lm_head"].weight = model["wte"].weight
        >>> from torch.optim import SGD
        >>> optimizer = SGD(model.parameters(), lr=0.1)
        >>> guard = TieGuard(model, optimizer=optimizer)
        >>> with guard.attach(optimizer):
        ...     model["lm_head"] = nn.Linear(4, 9, bias=False)
        ...     optimizer.step()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        bowline.errors.TieError: after 1 guarded step, 1 of 1 ties does not hold: lm_head.weight <- wte.weight ...
    """

    def __init__(
        self,
        model: nn.Module,
        ties: Ties | None = None,
        *,
        every: int = 1,
        optimizer: Optimizer | None = None,
        group: distributed.ProcessGroup | None = None,
    ) -> None:
        if not isinstance(every, int) or every < 1:
            raise UsageError(f"every={every!r}: expected a whole number of steps from 1", argument="every")
        if group is not None and not isinstance(group, distributed.ProcessGroup):
            raise UsageError(
                f"group is a {type(group).__name__}, expected a torch.distributed.ProcessGroup",
                help="torch.distributed.group.WORLD is all processes; a DeviceMesh gives its own by get_group()",
                argument="group",
            )
        self.model = model
        self.group = group
        self.ties = as_ties([*declared_ties(model), *find_ties(model)] if ties is None else ties)
        self.every = every
        self.optimizer = optimizer
        self.steps = 0
        if not self.ties:
            seen = f"{type(model).__name__} declares no ties and shares no parameters"
            raise TieError(
                f"{seen if ties is None else 'no ties were given'}, so there is nothing to guard",
                help="call tie_weights(model) first, or name the ties: TieGuard(model, [(target, source)])",
            )
        check_ties(model, self.ties, optimizer=optimizer).raise_if_broken()
        self._ends = tuple((tie, _place(tie.target), _place(tie.source)) for tie in self.ties)

    def check(self) -> None:
        """Every tie is one `Parameter` now: identity only, values are not read, unless there is a group.

        Raises:
            TieError: one is not; the message names both tensors and says how they stand. Or, with a group, replicas
                differ, or a tie broke on another process.
        """
        broken = []
        kept: list[Any] = []
        for tie, target, source in self._ends:
            held = _held(self.model, target)
            if held is None or held is not _held(self.model, source):
                broken.append(tie)
                held = None
            kept.append(held)
        elsewhere = [None] * len(kept) if self.group is None else self._across(kept)
        if broken:
            self._explain(broken)
        wrong = [f"{tie} {seen}" for tie, seen in zip(self.ties, elsewhere, strict=True) if seen is not None]
        if wrong:
            raise TieError(
                f"{self._when()}{'; '.join(wrong)}",
                help="reload the last checkpoint on every process; PipelineTie keeps copies on two stages equal",
            )

    def _across(self, kept: list[Any]) -> list[str | None]:
        """What the processes of the group say of each tie; of a quantised table its codes are compared."""
        assert self.group is not None
        return compared_across(self.group, [_bits(held) for held in kept])

    def _when(self) -> str:
        return f"after {self.steps} guarded step{'s' * (self.steps != 1)}, " if self.steps else ""

    def step(self) -> None:
        """Count one step, and `check` at every `every`-th.

        Raises:
            TieError: as `check`.
        """
        self.steps += 1
        if self.steps % self.every == 0:
            self.check()

    def attach(self, optimizer: Optimizer) -> RemovableHandle:
        """Have each `optimizer.step()` end with `self.step()`; the handle's `remove()`, or its `with`, ends that.

        A step that raises has been taken: the hook runs after it.
        """
        expect_groups(optimizer)
        inner: Any = optimizer
        while isinstance(getattr(inner, "optimizer", None), Optimizer):  # accelerate's and Lightning's run no hooks
            inner = inner.optimizer
        handle: RemovableHandle = inner.register_step_post_hook(lambda *_: self.step())
        return handle

    def trainer_callback(self) -> Any:
        """A `transformers.TrainerCallback`: `step` after each step, `check` at the beginning, at saves and at the end.

        Raises:
            UsageError: transformers is not installed.
        """
        return trainer_callback(self)

    def lightning_callback(self) -> Any:
        """A Lightning `Callback`: `step` after each batch, `check` at the beginning, before saves and at the end.

        Raises:
            UsageError: neither lightning nor pytorch_lightning is installed.
        """
        return lightning_callback(self)

    def _explain(self, broken: list[Tie]) -> None:
        """The full check, which decides when the fast one fails."""
        try:
            check_ties(self.model, broken, optimizer=self.optimizer).raise_if_broken()
        except TieError as error:
            raise TieError(self._when() + error.message, help=WAY_OUT) from None


def _bits(held: Any) -> torch.Tensor | None:
    """The tensor to compare with the other processes' one: of a quantised table its codes."""
    return held.values if isinstance(held, SharedTable) else held


Place = tuple[tuple[str, ...], str]
"""The modules on the way from the root, and the tensor's name in the last one."""


def _place(name: str) -> Place:
    *modules, attribute = name.split(".")
    return tuple(modules), attribute


def _held(model: nn.Module, place: Place) -> Any:
    """The tensor at `place` now, or `None`; wrappers on the way (a compiled layer, a LoRA layer) are looked through.

    Uses `_modules` and `_parameters` if possible, which is faster than `get_submodule` and `getattr`.
    """
    modules, attribute = place
    module: Any = model
    for name in modules:
        below = module._modules[name] if name in module._modules else None  # noqa: SIM401 - TorchScript's has no get
        module = getattr(module, name, None) if below is None else below
        if not isinstance(module, nn.Module):
            return None
    parameter = module._parameters[attribute] if attribute in module._parameters else None  # noqa: SIM401
    if parameter is not None or parametrize.is_parametrized(module, attribute):  # which is computed, not stored
        return parameter
    return module.table if isinstance(module, TableEnd) else getattr(module, attribute, None)
