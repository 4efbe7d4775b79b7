"""One quantised matrix at both ends of a tie, so that a tied model shrinks.

Quantising the head alone unties it: its int8 copy is stored beside the float embedding, and the model grows. Here the
shared matrix is quantised once, to int8 with one scale a row, and both ends read it. For inference only: the matrix is
then not a parameter, gets no gradient, and is unknown to optimizers. Smaller, not faster: the head computes in float.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from bowline.errors import TieError, UsageError
from bowline.nn.modules.heads import LMHead
from bowline.nn.modules.tied_embedding import TiedEmbedding
from bowline.nn.ties.declared_ties import Ties, as_ties
from bowline.nn.ties.shared_parameters import find_ties
from bowline.nn.ties.tensor_comparison import is_plain
from bowline.nn.tree.class_swap import own_class
from bowline.nn.tree.slots import Slot, slot, slots
from bowline.tie import Tie

__all__ = ["QuantizedEmbedding", "QuantizedHead", "QuantizedTable", "quantize_tied"]

LARGEST = 127
BLOCK_ELEMENTS = 1 << 22
LOOKUPS = (nn.Embedding.forward, TiedEmbedding.forward)
PRODUCTS = (nn.Linear.forward, LMHead.forward)
"""Entries per block in which rows are quantised, and converted back to float for the head."""


class QuantizedTable(nn.Module):
    """A `(V, D)` matrix as int8 `values` `(V, D)` and a float `scale` `(V,)`: row v is `scale[v] * values[v]`.

    Symmetric, to the nearest: `scale[v]` is the smallest number of the matrix's dtype that is no less than
    max|row v| / 127 (the one below it where 127 of these would overflow), so that each entry of the product is off by
    at most `scale[v] / 2`. `rows` rounds the product to the dtype: with that, an entry is off by at most
    `(1 + 127 eps) scale[v] / 2`, which in bfloat16, whose eps is 1/128, is nearly twice as much. A cast of the model
    afterwards (`.half()`) rounds the scales: cast first.

    Example:
        >>> table = QuantizedTable(torch.tensor([[127.0, -63.6], [0.0, 0.0]]))
        >>> table.values.tolist(), table.scale.tolist(), table.rows().tolist()
        ([[127, -64], [0, 0]], [1.0, 0.0], [[127.0, -64.0], [0.0, 0.0]])
    """

    values: torch.Tensor
    scale: torch.Tensor

    def __init__(self, matrix: torch.Tensor) -> None:
        super().__init__()
        matrix = matrix.detach()
        scale = _scale(matrix)
        self.register_buffer("values", _values(matrix, scale))
        self.register_buffer("scale", scale)

    def rows(self, at: torch.Tensor | slice = slice(None)) -> torch.Tensor:
        """The rows `at`, rounded to the scale's dtype: `(..., D)`."""
        return self.values[at].to(self.scale.dtype) * self.scale[at].unsqueeze(-1)

    def extra_repr(self) -> str:
        rows, width = self.values.shape
        return f"{rows}, {width}, {self.values.dtype}, scale={self.scale.dtype}"


class QuantizedEmbedding(nn.Module):
    """The input end: `(...)` ids to `(..., D)` rows of the table."""

    table: QuantizedTable

    def __init__(self, table: QuantizedTable, padding_idx: int | None = None) -> None:
        super().__init__()
        self.table = table
        self.padding_idx = padding_idx
        self.num_embeddings, self.embedding_dim = table.values.shape

    @property
    def weight(self) -> torch.Tensor:
        """The matrix that it computes with, `(V, D)`, made anew at each access."""
        return self.table.rows()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of `ids`."""
        return self.table.rows(ids)


class QuantizedHead(nn.Module):
    """The output end: `(..., D)` hidden states to `(..., V)` logits, `hidden @ rows.T + bias`.

    With h the hidden state, a logit of the rounded matrix is off by at most `(1 + 127 eps) scale[v] / 2 * |h|_1`. The
    table is the embedding's: the head reads it there and lists it neither in its modules nor in its state.
    """

    bias: nn.Parameter | None

    def __init__(self, table: QuantizedTable, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self._shared = (table,)  # in a tuple: a module in a plain attribute would be registered, and stored again
        self.register_parameter("bias", bias)
        self.out_features, self.in_features = table.values.shape

    @property
    def table(self) -> QuantizedTable:
        """The embedding's table."""
        return self._shared[0]

    @property
    def weight(self) -> torch.Tensor:
        """The matrix that it computes with, `(V, D)`, made anew at each access."""
        return self.table.rows()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits, computed in blocks of the vocabulary."""
        blocks = _blocks(self.table.values)
        logits = torch.cat([F.linear(hidden, self.table.rows(block)) for block in blocks], dim=-1)
        return logits if self.bias is None else logits + self.bias


def quantize_tied(model: nn.Module, ties: Ties | None = None, *, dtype: torch.dtype = torch.int8) -> tuple[Tie, ...]:
    """Quantise each shared matrix once and share it between its ends, in place; returns the ties, as they were called.

    `ties` are those found on an embedding (`find_ties`), unless they are given. Every module that holds the matrix is
    replaced: an `Embedding` by a `QuantizedEmbedding`, a `Linear` by a `QuantizedHead` with the bias it had. What they
    share is stored once, as `<embedding>.table.values` and `<embedding>.table.scale`; to load that, quantise a model
    built afresh in the same way, then `load_state_dict` (transformers' `from_pretrained` cannot). For inference only.

    Raises:
        UsageError: a dtype other than int8.
        TieError: no tie, ends that are not one parameter, a matrix that is not finite, or a module that does more than
            look up or multiply, or holds the matrix by another name than `weight`; the model is as it was.

    Example:
        >>> model = nn.ModuleDict({"wte": nn.Embedding(9, 4), "lm_head": nn.Linear(4, 9, bias=False)})
        >>> model["lm_head"].weight = model["wte"].weight
        >>> quantize_tied(model)
        (Tie(target='lm_head.weight', source='wte.weight'),)
        >>> {name: tensor.dtype for name, tensor in model.state_dict().items()}
        {'wte.table.values': torch.int8, 'wte.table.scale': torch.float32}
    """
    if dtype is not torch.int8:
        raise UsageError(f"dtype={dtype}: expected torch.int8")
    known = slots(model)
    if ties is None:
        wanted = tuple(tie for tie in find_ties(model) if isinstance(known[tie.source].module, nn.Embedding))
    else:
        wanted = as_ties(ties)
    if not wanted:
        raise TieError(f"{type(model).__name__}: no matrix is shared", help="tie_weights(model) first")
    fresh: dict[str, nn.Module] = {}
    for source in dict.fromkeys(tie.source for tie in wanted):
        fresh |= _replacements(model, [tie for tie in wanted if tie.source == source], known)
    for path, module in fresh.items():
        parent, _, child = path.rpartition(".")
        model.get_submodule(parent)._modules[child] = module
    return wanted


def _replacements(model: nn.Module, ties: list[Tie], known: dict[str, Slot]) -> dict[str, nn.Module]:
    """The replacement for each module that holds the matrix of these ties, by path."""
    source = slot(model, ties[0].source, known)
    for tie in ties:
        if slot(model, tie.target, known).tensor is not source.tensor:
            raise TieError(
                f"{tie}: the two ends are not one parameter, expected a tie", help="tie_weights(model) first"
            )
    ends = [source, *(end for end in known.values() if end.tensor is source.tensor and end.name != source.name)]
    for end in ends:
        _check(end)
    table = QuantizedTable(source.tensor)
    if not bool(torch.isfinite(table.scale).all()):
        raise TieError(
            f"{source.name}: holds values that are not finite, expected numbers", help="mend the checkpoint first"
        )
    made: dict[int, nn.Module] = {}  # a module with two names is replaced by one module
    return {end.name.removesuffix(".weight"): made.setdefault(id(end.module), _quantized(end, table)) for end in ends}


def _check(end: Slot) -> None:
    module, own = end.module, own_class(end.module)
    looks_up = own.forward in LOOKUPS and cast(Any, module).max_norm is None
    if not (end.name.endswith(".weight") and (looks_up or own.forward in PRODUCTS)):
        kind = "an Embedding with max_norm" if own is nn.Embedding else f"a {own.__name__}"
        raise TieError(
            f"{end.name}: belongs to {kind}, expected the weight of an Embedding or a Linear that does nothing more",
            help="quantise this model in the format of its runtime",
        )
    if not is_plain(end.tensor) or not end.tensor.is_floating_point():
        raise TieError(
            f"{end.name}: is {end.tensor.dtype} in a {type(end.tensor).__name__}, expected a plain float matrix",
            help="quantise before sharding, and once",
        )


def _quantized(end: Slot, table: QuantizedTable) -> nn.Module:
    module: Any = end.module
    made = (
        QuantizedEmbedding(table, module.padding_idx)
        if isinstance(module, nn.Embedding)
        else QuantizedHead(table, module.bias)
    )
    return made.train(module.training)


def _blocks(matrix: torch.Tensor) -> list[slice]:
    step = max(1, BLOCK_ELEMENTS // max(1, matrix.shape[1]))
    return [slice(start, start + step) for start in range(0, len(matrix), step)]


def _scale(matrix: torch.Tensor) -> torch.Tensor:
    """max|row| / 127 in the matrix's dtype, rounded up: rounded down, the largest entry would be 128 steps away.

    Except where 127 steps would overflow: there the largest entry is no more than 127.5 of the steps rounded down.
    """
    largest = torch.cat([matrix[block].abs().amax(1) for block in _blocks(matrix)])
    scale = (largest.double() / LARGEST).to(matrix.dtype)
    is_short = scale.double() * LARGEST < largest.double()
    scale = torch.where(is_short, torch.nextafter(scale, torch.full_like(scale, torch.inf)), scale)
    overflows = torch.isinf(scale * LARGEST) & torch.isfinite(largest)
    return torch.where(overflows, torch.nextafter(scale, torch.zeros_like(scale)), scale)


def _values(matrix: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Each entry in steps of its row's scale, to the nearest; divided in float64, where a half is not rounded away."""
    steps = scale.double().masked_fill(scale == 0, 1.0).unsqueeze(-1)
    exact = (matrix[block].double() / steps[block] for block in _blocks(matrix))
    return torch.cat([entries.round().clamp(-LARGEST, LARGEST).to(torch.int8) for entries in exact])
