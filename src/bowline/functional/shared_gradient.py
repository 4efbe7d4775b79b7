"""One gradient buffer for both ends of a tied matrix, without a second (V, D) for the lookup.

A lookup's gradient has few rows, a head's is dense. `Meeting` is a node of the autograd graph between the matrix and
its ends: the gradients of the heads flow into it, and lookups leave their rows with it. Autograd runs it after every
end that takes part in the backward pass. It adds the rows to the sum of the dense gradients and passes the result on to
the matrix. Optimizers, hooks and DDP see one dense, whole gradient.

The rows are added in place if reference counts show that nobody but autograd holds the dense gradient. Otherwise they
are added to a copy. The counts decide only whether a copy is made: a gradient that somebody holds is neither changed
nor lost. `_counts_of_one_owner` measures once, on a matrix of six numbers, what the counts are if nobody else holds the
gradient. If torch counts in another way, every gradient is copied.
"""

from __future__ import annotations

import threading
from functools import cache
from sys import getrefcount
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import TensorWeakRef

from bowline.functional.kernels.function_transforms import in_torch_func, is_batched
from bowline.functional.kernels.row_sums import add_rows, summed_rows

__all__ = ["LookupRows", "head_weight", "leave_rows", "meeting"]

SLOT = "bowline.meeting"


class LookupRows(NamedTuple):
    """The gradient (N, D) of looked-up rows, and their ids (N,); rows at padding_idx (-1: none) count as 0."""

    ids: torch.Tensor
    gradient: torch.Tensor
    padding_idx: int

    def dense(self, size: int) -> torch.Tensor:
        return summed_rows(self.gradient, self.ids, size, self.padding_idx)

    def add_to(self, table: torch.Tensor) -> None:
        add_rows(table, self.ids, self.gradient, padding_idx=self.padding_idx)


def meeting(weight: torch.Tensor) -> torch.Tensor | None:
    """The edge that a lookup of the weight is applied to: a tensor (V, D) without values whose node is a `Meeting`.

    The lookup keeps it alive; while it does, `head_weight` and later lookups of the same weight use it too.

    Returns:
        None if the lookup should be `F.embedding`: no gradient is wanted, or the pass is compiled, traced, transformed
        by torch.func, differentiated forward, on a tensor subclass, or on another CUDA stream than the default one.
    """
    if not _can_meet(weight):
        return None
    edge = _live(weight)
    if edge is None:
        node, place = _node(weight)
        function: Any = Meeting  # `apply` has no types
        edge = function.apply(weight, None)
        node.metadata[SLOT, place] = TensorWeakRef(edge)
    return edge


def head_weight(weight: torch.Tensor) -> torch.Tensor:
    """The weight as a head should use it: an alias whose gradient flows into the weight's `Meeting`.

    Without a live meeting, the weight itself.
    """
    edge = _live(weight) if _can_meet(weight) else None
    if edge is None:
        return weight
    function: Any = _Alias
    alias: torch.Tensor = function.apply(edge, weight.detach())
    return alias


def leave_rows(edge: torch.Tensor, ids: torch.Tensor, gradient: torch.Tensor, padding_idx: int) -> bool:
    """Leave the gradient of looked-up rows with the edge's `Meeting`, from the backward pass of a lookup.

    Args:
        edge: the one that the lookup was applied to.
        ids: (...) of integers.
        gradient: (..., D), of the rows.
        padding_idx: rows at this id count as 0; -1 for none.

    Returns:
        False if nothing was left. The lookup then returns a dense gradient: a graph of the gradient is wanted
        (`create_graph`), or the gradient is compiled, batched, or on another CUDA stream than the default one.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    if type(gradient) is not torch.Tensor or is_batched(gradient) or not _on_default_stream(gradient):
        return False
    backward_pass = _backward_pass()
    if backward_pass < 0:
        return False
    node: Any = edge.grad_fn
    rows = LookupRows(ids.reshape(-1), gradient.reshape(ids.numel(), gradient.shape[-1]), padding_idx)
    node.left.setdefault(backward_pass, []).append(rows)
    return True


class Meeting(torch.autograd.Function):
    """weight (V, D) to an edge (V, D) of one number in memory; saves no tensors, so it may run many times."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, trial: _Trial | None) -> torch.Tensor:
        left: dict[int, list[LookupRows]] = {}  # by pass: threads may run one graph at once
        ctx.left, ctx.trial, ctx.size = left, trial, len(weight)
        ctx.set_materialize_grads(False)
        return weight.new_empty(()).expand(weight.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.compiler.is_compiling():
            return grads[0], None
        left = ctx.left.pop(_backward_pass(), None)
        if left is None:
            return grads[0], None
        if grads[0] is None:
            return _summed(left[0].dense(ctx.size), left[1:]), None
        if not _is_plain(grads[0]):
            return _summed(left[0].dense(ctx.size), left[1:]) + grads[0], None  # torch adds a sparse one in this order
        counts = _counts(grads[0])
        if ctx.trial is not None:
            ctx.trial.counts = counts
        elif counts != _counts_of_one_owner():
            return _summed(_copy(grads[0]), left), None
        return _summed(grads[0], left), None


class _Alias(torch.autograd.Function):
    """The edge of a meeting and the weight's values, both (V, D), to the weight whose gradient goes to the meeting."""

    @staticmethod
    def forward(ctx: Any, edge: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return weight.detach()  # unlike a view, it may be saved and checked as the weight itself is

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def _summed(table: torch.Tensor, left: list[LookupRows]) -> torch.Tensor:
    """The table, after the rows are added to it in place."""
    for rows in left:
        rows.add_to(table)
    return table


def _copy(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.detach().clone(memory_format=torch.contiguous_format)


def _can_meet(weight: torch.Tensor) -> bool:
    jit: Any = torch.jit
    if torch.compiler.is_compiling() or jit.is_tracing() or in_torch_func():
        return False
    if not torch.is_grad_enabled() or not weight.requires_grad or type(weight) not in (torch.Tensor, nn.Parameter):
        return False
    if weight.device.type not in ("cpu", "cuda") or not _on_default_stream(weight):
        return False
    return torch.autograd.forward_ad.unpack_dual(weight).tangent is None


def _live(weight: torch.Tensor) -> torch.Tensor | None:
    """The edge of the weight's meeting that a lookup keeps alive, or None.

    It is found on the node that the weight's gradient leads to, so it never belongs to another graph of the weight. A
    meeting where rows lie is not used again: if their pass has failed, they are freed with its graph.
    """
    node, place = _node(weight)
    reference: TensorWeakRef | None = node.metadata.get((SLOT, place))
    edge = None if reference is None else reference()
    if edge is None:
        return None
    made: Any = edge.grad_fn
    fits = (edge.shape, edge.dtype, edge.device) == (weight.shape, weight.dtype, weight.device)
    return edge if fits and not made.left else None


def _node(weight: torch.Tensor) -> tuple[Any, int]:
    """The node that the weight's gradient leads to, and its input there. Hold it: a parameter does not."""
    return get_gradient_edge(weight)[:2]


def _backward_pass() -> int:
    """The number of the backward pass that runs in this thread; -1 outside one, or if this torch does not tell."""
    number: Any = getattr(torch._C, "_current_graph_task_id", None)
    return -1 if number is None else number()


def _on_default_stream(tensor: torch.Tensor) -> bool:
    """Whether work on the tensor's device is queued on its default stream; True on the CPU."""
    if tensor.device.type != "cuda":
        return True
    return bool(torch.cuda.current_stream(tensor.device) == torch.cuda.default_stream(tensor.device))


def _is_plain(gradient: torch.Tensor) -> bool:
    """Whether it is a dense tensor with memory of its own, which `_copy` or an addition in place may handle."""
    return type(gradient) is torch.Tensor and gradient.layout == torch.strided and not is_batched(gradient)


def _counts(gradient: torch.Tensor) -> tuple[int, int, int] | None:
    """How many hold the tensor in Python and in C++, and how many tensors share its memory; callers included.

    None if it cannot be written to in place.
    """
    if gradient.requires_grad or not gradient.is_contiguous():
        return None
    torchs: Any = torch._C  # not by `untyped_storage()`, which the memory counts as one more owner from then on
    owners: Any = gradient
    try:
        in_memory = torchs._storage_Use_Count(torchs._storage_address(gradient))
        return getrefcount(gradient), owners._use_count(), in_memory
    except (AttributeError, TypeError):  # a torch without one of the private functions, or with another of its name
        return None


@cache
def _counts_of_one_owner() -> tuple[int, int, int]:
    """`_counts` of a gradient that nobody but autograd holds; zeros, which no gradient has, if counts do not tell.

    In a thread of its own, which has none of the caller's modes, hooks or autocast.
    """
    found: list[tuple[int, int, int]] = []

    def measure() -> None:
        with torch.enable_grad():
            found.append(_measured())

    thread = threading.Thread(target=measure, name="bowline-shared-gradient")
    thread.start()
    thread.join()
    return found[0] if found else NEVER


NEVER = (0, 0, 0)


def _measured() -> tuple[int, int, int]:
    alone, sums, same = _Trial().run()
    held, _, _ = _Trial(keep_in_python=True).run()
    stored, _, _ = _Trial(keep_in_torch=True).run()
    return alone if sums and same and alone is not None and alone not in (held, stored) else NEVER


class _Trial:
    """One backward pass over a matrix of zeros: a head whose gradient is ones, and a lookup of row 0."""

    def __init__(self, *, keep_in_python: bool = False, keep_in_torch: bool = False) -> None:
        self.keep_in_python, self.keep_in_torch = keep_in_python, keep_in_torch
        self.kept: list[Any] = []
        self.address = -1
        self.counts: tuple[int, int, int] | None = None

    def run(self) -> tuple[tuple[int, int, int] | None, bool, bool]:
        """The counts, whether the sum is right, and whether the sum lies in the memory of the head's gradient."""
        matrix = torch.zeros(3, 2, dtype=torch.float32, device="cpu", requires_grad=True)
        functions: tuple[Any, ...] = Meeting, _Alias, _TrialLookup, _TrialHead  # `apply` has no types
        meet, alias, lookup, head = (function.apply for function in functions)
        edge = meet(matrix, self)
        (lookup(edge) + head(alias(edge, matrix.detach()), self)).backward()
        gradient = matrix.grad
        if gradient is None:
            return self.counts, False, False
        return self.counts, gradient.tolist() == [[2, 2], [1, 1], [1, 1]], gradient.data_ptr() == self.address

    def given(self, gradient: torch.Tensor) -> None:
        self.address = gradient.data_ptr()
        if self.keep_in_python:
            self.kept.append(gradient)
        if self.keep_in_torch:
            holder = torch.zeros_like(gradient)
            holder.grad = gradient
            self.kept.append(holder)


class _TrialHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: torch.Tensor, trial: _Trial) -> torch.Tensor:
        ctx.trial, ctx.shape = trial, matrix.shape
        return matrix.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gradient = torch.ones(ctx.shape, dtype=torch.float32, device="cpu")
        ctx.trial.given(gradient)
        return gradient, None


class _TrialLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, edge: torch.Tensor) -> torch.Tensor:
        ctx.edge = edge
        return torch.zeros((), dtype=torch.float32, device="cpu")

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ids = torch.zeros(1, dtype=torch.int64, device="cpu")
        leave_rows(ctx.edge, ids, torch.ones(1, 2, dtype=torch.float32, device="cpu"), -1)
        return None
