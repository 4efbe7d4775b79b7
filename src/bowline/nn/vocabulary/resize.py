"""Resizes a model's vocabulary in place: every tensor with that axis, ties, the optimizer and configs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from bowline.errors import UsageError
from bowline.nn.ties.optimizer_groups import resize_state
from bowline.nn.vocabulary.axes import Axis
from bowline.nn.vocabulary.axis_search import find_vocabulary
from bowline.nn.vocabulary.new_rows import NewRows, check_rule, make_rows, spread
from bowline.nn.vocabulary.size_edits import edits_of, padding_of
from bowline.nn.vocabulary.token_selection import Selection, select

__all__ = ["NewRows", "VocabChange", "resize_vocab"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VocabChange:
    """The result of a resize: `old_size` tokens became `new_size`, with padding rows counted.

    `kept` are the old ids of the new tokens 0, 1, ... (K,). `remap` gives for each old id the new one, -1 where the
    token was dropped; (old size,), or longer if the embedding has rows past the vocabulary, which have ids too.
    `tensors` are the names of all that were resized; a shared parameter is listed under each name.
    """

    old_size: int
    new_size: int
    kept: torch.Tensor
    remap: torch.Tensor
    tensors: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.old_size} -> {self.new_size} tokens, {len(self.kept)} kept: {', '.join(self.tensors)}"


def resize_vocab(
    model: nn.Module,
    n: int | Sequence[int] | torch.Tensor,
    *,
    new_rows: NewRows = "mean",
    pad_to_multiple_of: int | None = None,
    optimizer: Optimizer | None = None,
    axes: Mapping[str, int] | None = None,
) -> VocabChange:
    """Give `model` a vocabulary of `n` tokens, or of the token ids in `n`, in that order: every axis of it, in place.

    Every tensor of the vocabulary is resized once and stays the object that it was, so ties, hooks and optimizers hold:
    tied stays tied, and an untied head keeps its own rows. The vocabulary's tensors are those that the families' table
    lists for the class; for any other module they are found from its input embedding; or `axes` (tensor name to axis)
    lists them. Sizes that modules state, and `vocab_size` and the special token ids in every config that counts these
    tokens, follow. Gradients of what was resized are cleared.

    A new row is, in each tensor, `"mean"`: the mean of its old rows; `"scaled-mean"`: that mean, scaled to the median
    norm of the old rows (a bias: its mean); `"gaussian"`: the mean plus a sample of N(0, 1e-5 covariance of the old
    rows) (Hewitt 2021, nlp.stanford.edu/~johnhew/vocab-expansion.html); `"zeros"`; `"copy:<id>"`: the row of that old
    token; or what a function makes of (old tensor with the vocabulary's axis first (V, ...), count): (count, ...).
    Means, norms and covariances leave the padding row and rows that are not finite out, are computed in float64 and
    rounded once. Biases and logit-bias buffers follow the same rule by their own values; integer tables repeat their
    rows. In a table that `quantize_tied` made, a kept row keeps its codes and its scales; a new row is made from the
    float rows that the codes stand for, and then quantised. `pad_to_multiple_of` rounds `n` up; the rows beyond it are
    new rows.

    In `optimizer`, moments of kept rows are carried along and those of new rows are zero. After an error the model is
    unchanged.

    Raises:
        UsageError: an invalid argument, or a token to drop that an embedding or a config names.
        TieError: the vocabulary's axes cannot be told from others, or one of its tensors is quantised, sharded,
            computed, or shares another tensor's memory.

    Example:
        >>> model = nn.ModuleDict({"wte": nn.Embedding(9, 4), "lm_head": nn.Linear(4, 9, bias=False)})
        >>> model["lm_head"].weight = model["wte"].weight
        >>> print(resize_vocab(model, 12))
        9 -> 12 tokens, 9 kept: wte.weight, lm_head.weight
        >>> resize_vocab(model, [0, 7, 2]).remap
        tensor([ 0, -1,  2, -1, -1, -1, -1,  1, -1, -1, -1, -1])
        >>> model["lm_head"].weight is model["wte"].weight, model["lm_head"].out_features
        (True, 3)
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"model is a {type(model).__name__}, expected a torch.nn.Module", argument="model")
    if isinstance(model, DistributedDataParallel):
        raise UsageError(
            "model is wrapped in DistributedDataParallel, whose gradient buckets have the old sizes",
            help="resize model.module, then wrap it again",
            argument="model",
        )
    with torch.inference_mode(False), torch.no_grad():
        vocabulary = find_vocabulary(model, axes)
        check_rule(new_rows, vocabulary.size)
        selection = select(n, vocabulary.size, vocabulary.tail, pad_to_multiple_of)
        if vocabulary.fixed_ids and not selection.in_place:
            raise UsageError(
                f"{type(model).__name__} hashes token ids, so no token can get another id",
                help="keep the first ids in their order, or give a number of tokens",
            )
        edits = edits_of(model, vocabulary, selection)
        padding = padding_of(vocabulary)
        work = [_Resize(axis, selection, new_rows, padding, optimizer) for axis in vocabulary.axes]
        with ExitStack() as undo:
            for edit in edits:
                undo.callback(edit.apply())
            for resize in sorted(work, key=lambda one: -one.axis.tensor.numel()):
                resize.run(undo)
            undo.pop_all()
        for resize in work:
            if resize.changes:
                resize.axis.tensor.grad = None
    return VocabChange(
        old_size=vocabulary.size,
        new_size=selection.size,
        kept=selection.kept,
        remap=selection.remap,
        tensors=vocabulary.names,
    )


class _Resize:
    """The resize of one tensor: computes its new rows at once, and changes the tensor in `run`.

    By then only memory can run out. A run that keeps every row can be undone; one that drops rows cannot, but the
    largest tensor goes first, and the memory that it frees is enough for all others.
    """

    def __init__(
        self, axis: Axis, selection: Selection, rule: NewRows, padding: frozenset[int], optimizer: Optimizer | None
    ) -> None:
        self.axis = axis
        self._optimizer = optimizer
        self._old_length = axis.length
        self._origins = selection.origins(axis.excess, axis.stand_in)
        count = int((self._origins < 0).sum())
        self._table = axis.table
        self._made_parts: dict[str, torch.Tensor] = {}
        copies = isinstance(rule, str) and rule.startswith("copy:")
        matrix = axis.tensor if self._table is None or copies else self._table.rows()
        self._made = make_rows(rule, matrix, axis.axis, selection.old_size, count, padding, axis.name)
        if self._table is not None:
            made = (
                {
                    name: make_rows(rule, part, 0, selection.old_size, count, padding, axis.name)
                    for name, part in self._parts.items()
                }
                if copies
                else self._table.coded(self._made)
            )
            self._made = self._made if copies else made.pop("values")
            self._made_parts = made

    @property
    def _parts(self) -> dict[str, torch.Tensor]:
        """What the table has beside its codes."""
        names = () if self._table is None else self._table.PARTS[1:]
        return {name: getattr(self._table, name) for name in names}

    @property
    def changes(self) -> bool:
        """Whether any row is added, dropped or moved."""
        return not torch.equal(self._origins, torch.arange(self._old_length))

    def run(self, undo: ExitStack) -> None:
        """Resize the tensor and its state in the optimizer."""
        if not self.changes:
            return
        tensor, axis, old_length = self.axis.tensor, self.axis.axis, self._old_length
        _set(tensor, spread(tensor, axis, self._origins, self._made))
        for name, part in self._parts.items():
            _set(part, spread(part, 0, self._origins, self._made_parts[name]))
        back = _inverse(self._origins, old_length)
        if back is not None:
            undo.callback(lambda: _set(tensor, spread(tensor, axis, back, None)))
            for part in self._parts.values():
                undo.callback(_put_back, part, back)
            undo.callback(lambda: self._resize_state(len(self._origins), back))
        self._resize_state(old_length, self._origins)

    def _resize_state(self, length: int, origins: torch.Tensor) -> None:
        """Resize one state tensor: moments have the parameter's shape, Adafactor's factored ones only its rows."""
        tensor, axis = self.axis.tensor, self.axis.axis
        if self._optimizer is None or not isinstance(tensor, nn.Parameter):
            return
        shape, rows = list(tensor.shape), [1] * tensor.ndim
        shape[axis] = rows[axis] = length
        for old in dict.fromkeys((torch.Size(shape), torch.Size(rows))):
            resize_state(self._optimizer, tensor, old, lambda state: spread(state, axis, origins, None))
        if axis == 0 and tensor.ndim > 1:
            flat = torch.Size([length])
            resize_state(self._optimizer, tensor, flat, lambda state: spread(state, 0, origins, None))


def _inverse(origins: torch.Tensor, old_length: int) -> torch.Tensor | None:
    """The new position of each old row, or `None` if a row was dropped."""
    back = torch.full((old_length,), -1)
    kept = origins >= 0
    back[origins[kept]] = torch.arange(len(origins))[kept]
    return None if bool((back < 0).any()) else back


def _put_back(part: torch.Tensor, back: torch.Tensor) -> None:
    """Give a part of a table the rows that it had."""
    _set(part, spread(part, 0, back, None))


def _set(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """Replace the values of a tensor that stays the same object.

    It is set to another dtype in between, so that autograd forgets the old shape: otherwise a graph that is still
    alive (the last step's loss) would reject the next gradient.
    """
    if tensor.is_leaf and tensor.is_floating_point():
        other = torch.float16 if tensor.dtype is not torch.float16 else torch.float32
        tensor.data = torch.empty(0, dtype=other, device=tensor.device)
    tensor.data = new
