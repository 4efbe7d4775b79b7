"""Where two gradients of one matrix meet in one buffer: one end makes a dense gradient, the other adds to it in place.

While a backward pass runs, autograd keeps what a matrix has been given so far in the input buffer of the node that the
gradients of the matrix lead to: AccumulateGrad for a parameter, the node that made it for any other. The first dense
gradient to arrive is that buffer, the tensor itself and no copy. So an end that has only a few rows to add may write
them there and return no gradient of its own.

`offer` leaves a weak reference to a dense gradient on the node, with the number of the pass. `take` gives the tensor
back while it is the buffer and nothing else: the same node, input and pass, no graph of the gradient asked for, and one
owner by the reference counts, which is autograd. What those are where nobody else holds the tensor is measured once, on
a matrix of six numbers; where torch keeps its buffers in another way, nothing is ever given back. One case is not told:
autograd has added the gradient to another that came before, and something of torch's, no variable of Python, has kept
it, as a hook on the head's node that makes it another tensor's `grad`. What is added to it then is lost.
"""

from __future__ import annotations

import sys
import threading
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils.weak import TensorWeakRef

from bowline.functional.kernels.function_transforms import is_batched

__all__ = ["offer", "take"]

SLOT = "bowline.dense_gradient"


class Offer(NamedTuple):
    """A dense gradient that its maker has returned in the pass, not kept alive by this."""

    backward_pass: int
    gradient: TensorWeakRef

    def tensor(self, backward_pass: int) -> torch.Tensor | None:
        """None where the pass is another one, or where the tensor is gone: autograd has added it to another."""
        return self.gradient() if self.backward_pass == backward_pass else None


def offer(ctx: Any, position: int, gradient: torch.Tensor) -> None:
    """Say, in a Function's backward, that it returns `gradient` for the matrix that was its tensor `position`.

    To be called last: the Function returns this very tensor, keeps no other reference to it and never writes to it
    again. Costs microseconds, keeps nothing alive, and changes nothing where no end takes it.

    Args:
        ctx: the Function's own.
        position: the matrix's place among the tensors that the Function was applied to (others are not counted).
        gradient: dense and contiguous; of another kind it is not offered.
    """
    if torch.compiler.is_compiling() or not _usable(gradient):
        return
    at = _meeting(ctx, position)
    if at is None or _counts_of_one_owner() is None:
        return
    slot, key, backward_pass = at
    before: Offer | None = slot.get(key)
    if before is None or before.tensor(backward_pass) is None:  # to one that arrived first, autograd adds the others
        slot[key] = Offer(backward_pass, TensorWeakRef(gradient))


def take(ctx: Any, position: int) -> torch.Tensor | None:
    """In a Function's backward, the dense gradient of its tensor `position` that autograd holds, to be added to.

    Or None, where there is none or somebody else holds it too. What is added to it must not be returned as well.
    Several ends may take it one after the other. Arguments as for `offer`.
    """
    if torch.compiler.is_compiling():
        return None
    at = _meeting(ctx, position)
    if at is None:
        return None
    slot, key, backward_pass = at
    found: Offer | None = slot.get(key)
    gradient = None if found is None else found.tensor(backward_pass)
    if gradient is None or not _usable(gradient) or _counts(gradient) != _counts_of_one_owner():
        return None
    return gradient


def _meeting(ctx: Any, position: int) -> tuple[dict[Any, Any], tuple[str, int], int] | None:
    """The dictionary of the node that the gradient leads to, the key of the input there, and the pass; or None."""
    number = getattr(torch._C, "_current_graph_task_id", None)
    if number is None or torch.is_grad_enabled():  # enabled where a graph of the gradient is asked for
        return None
    backward_pass = number()
    node, place = ctx.next_functions[position]
    metadata = getattr(node, "metadata", None)
    return None if backward_pass < 0 or metadata is None else (metadata, (SLOT, place), backward_pass)


def _usable(gradient: torch.Tensor) -> bool:
    """A plain dense tensor with memory; on a GPU, which is at work on its default stream: others are waited for."""
    if type(gradient) is not torch.Tensor or gradient.layout != torch.strided or gradient.requires_grad:
        return False
    if is_batched(gradient):
        return False
    if gradient.device.type == "cuda":
        here, usual = torch.cuda.current_stream(gradient.device), torch.cuda.default_stream(gradient.device)
        return gradient.is_contiguous() and here == usual
    return gradient.is_contiguous() and gradient.device.type == "cpu"


def _counts(gradient: torch.Tensor) -> tuple[int, int, int]:
    """How many hold the tensor in Python, how many in C++, and how many tensors its memory has; callers included."""
    torchs: Any = torch._C  # not by `untyped_storage()`, which the memory counts as one more owner from then on
    owners: Any = gradient
    return sys.getrefcount(gradient), owners._use_count(), torchs._storage_Use_Count(torchs._storage_address(gradient))


@cache
def _counts_of_one_owner() -> tuple[int, int, int] | None:
    """`_counts` of a gradient that autograd's buffer alone holds; None where this torch does not let it be written to.

    In a thread of its own, which has no mode, hook or autocast of the caller's.
    """
    found: list[tuple[int, int, int] | None] = []

    def measure() -> None:
        try:
            with torch.enable_grad():
                found.append(_measured())
        except Exception:  # a torch without one of the private functions
            found.append(None)

    thread = threading.Thread(target=measure, name="bowline-shared-gradient")
    thread.start()
    thread.join()
    return found[0]


def _measured() -> tuple[int, int, int] | None:
    alone, sums, same = _Trial().run()
    held, _, _ = _Trial(keep_in_python=True).run()
    stored, _, _ = _Trial(keep_in_torch=True).run()
    return alone if sums and same and alone is not None and alone not in (held, stored) else None


class _Trial:
    """One pass over a matrix with a dense gradient of ones, to which ones are added where autograd holds it."""

    def __init__(self, *, keep_in_python: bool = False, keep_in_torch: bool = False) -> None:
        self.keep_in_python, self.keep_in_torch = keep_in_python, keep_in_torch
        self.kept: list[Any] = []
        self.reference: TensorWeakRef | None = None
        self.address = -1
        self.counts: tuple[int, int, int] | None = None

    def run(self) -> tuple[tuple[int, int, int] | None, bool, bool]:
        """The counts, whether the sum is right, and whether the gradient lies in the memory of the dense one."""
        matrix = torch.zeros(3, 2, dtype=torch.float32, device="cpu", requires_grad=True)
        ends: tuple[Any, Any] = _Few, _Dense  # `apply` has no types; the later one's backward runs first
        sum(end.apply(matrix, self) for end in ends).backward()
        gradient = matrix.grad
        if gradient is None:
            return self.counts, False, False
        return self.counts, bool((gradient == 2).all()), gradient.data_ptr() == self.address

    def given(self, gradient: torch.Tensor) -> None:
        self.reference, self.address = TensorWeakRef(gradient), gradient.data_ptr()
        if self.keep_in_python:
            self.kept.append(gradient)
        if self.keep_in_torch:
            holder = torch.zeros_like(gradient)
            holder.grad = gradient
            self.kept.append(holder)

    def added(self) -> None:
        gradient = None if self.reference is None else self.reference()
        if gradient is not None:
            self.counts = _counts(gradient)
            gradient.add_(1)


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: torch.Tensor, trial: _Trial) -> torch.Tensor:
        ctx.trial, ctx.shape = trial, matrix.shape
        return matrix.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gradient = torch.ones(ctx.shape, dtype=torch.float32, device="cpu")
        ctx.trial.given(gradient)
        return gradient, None


class _Few(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: torch.Tensor, trial: _Trial) -> torch.Tensor:
        ctx.trial = trial
        return matrix.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.trial.added()
        return None, None
