"""The two ends of a tie whose matrix is one int8 table: the lookup and the head. For inference only."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import nn

from bowline.nn.modules.heads import LMHead
from bowline.nn.modules.quantized_table import QuantizedTable
from bowline.nn.modules.tied_embedding import TiedEmbedding
from bowline.nn.tree.class_swap import own_class
from bowline.nn.tree.slots import Slot
from bowline.nn.tree.table_slots import SharedTable, TableEnd

__all__ = ["QuantizedEmbedding", "QuantizedHead", "quantized", "unlike_what_it_computes"]

LOOKUPS = (nn.Embedding.forward, TiedEmbedding.forward)
PRODUCTS = (nn.Linear.forward, LMHead.forward)
MULTIPLIER = "embed_scale"
"""The attribute of a scaled embedding by which it multiplies its rows (Gemma, BART, XGLM and their relatives)."""
IDS_AT_ONCE = 4096


class _Replacement(TableEnd):
    """An end that remembers the module it replaced, without that module's weight."""

    _replaced: tuple[nn.Module, bool] | None = None

    def remember(self, module: nn.Module) -> None:
        """Keep what `in_float` needs of the module that this one replaces."""
        emptied = copy.copy(module)
        for home in ("_parameters", "_buffers", "_modules"):
            emptied.__dict__[home] = dict(emptied.__dict__[home])
        weight = emptied._parameters["weight"]
        emptied._parameters["weight"] = None
        self._replaced = (emptied, weight is not None and weight.requires_grad)  # in a tuple: not to be registered

    def in_float(self, parameter: nn.Parameter) -> nn.Module:
        """The module that was here before the table, with `parameter` as its weight."""
        assert self._replaced is not None
        module = copy.copy(self._replaced[0])
        for home, mine in (("_parameters", self._parameters), ("_buffers", self._buffers)):
            module.__dict__[home] = {**module.__dict__[home], **mine}
        module._modules = dict(module._modules)
        module._parameters["weight"] = parameter
        rows, width = parameter.shape
        names = ("num_embeddings", "embedding_dim") if self.looks_up else ("out_features", "in_features")
        module.__dict__.update(zip(names, (rows, width), strict=True))
        if "padding_idx" in self.__dict__:
            module.__dict__["padding_idx"] = self.__dict__["padding_idx"]
        return module.train(self.training)

    @property
    def took_gradient(self) -> bool:
        """Whether the matrix took a gradient before it was quantised."""
        return self._replaced is None or self._replaced[1]


class QuantizedEmbedding(_Replacement):
    """The input end: `(...)` ids to `(..., D)` rows of the table, times the multiplier of a scaled embedding."""

    looks_up = True
    embed_scale: float | torch.Tensor | None

    def __init__(
        self, table: QuantizedTable, padding_idx: int | None = None, embed_scale: float | torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self._modules["table"] = table
        self.padding_idx = padding_idx
        if isinstance(embed_scale, torch.Tensor):
            self.register_buffer(MULTIPLIER, embed_scale, persistent=False)
        else:
            self.embed_scale = embed_scale
        self.num_embeddings, self.embedding_dim = table.values.shape

    @property
    def table(self) -> QuantizedTable:
        """The table, which is this module's child."""
        return cast(QuantizedTable, self._modules["table"])

    def read(self, table: SharedTable) -> None:
        """Use `table` from now on."""
        self._modules["table"] = table

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of `ids`."""
        return _scaled(self.table.rows(ids), self.embed_scale)


class QuantizedHead(_Replacement):
    """The output end: `(..., D)` hidden states to `(..., V)` logits, `hidden @ rows.T + bias`.

    With h the hidden state, a logit of the rounded matrix is off by at most `(1 + 127 eps) scale[v] / 2 * |h|_1`. The
    table is the embedding's: the head reads it there and lists it neither in its modules nor in its state.
    """

    looks_up = False
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

    def read(self, table: SharedTable) -> None:
        """Use `table` from now on."""
        self._shared = (cast(QuantizedTable, table),)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits."""
        logits = self.table.product(hidden)
        return logits if self.bias is None else logits + self.bias


def quantized(end: Slot, table: QuantizedTable) -> TableEnd:
    """The module that reads `table` in place of the end's module."""
    module: Any = end.module
    made: _Replacement
    if isinstance(module, nn.Embedding):
        made = QuantizedEmbedding(table, module.padding_idx, _factor(module))
    else:
        made = QuantizedHead(table, module.bias)
    made.remember(module)
    return made.train(module.training)


def unlike_what_it_computes(end: Slot) -> str | None:
    """Why no quantised end can replace the end's module, or `None`: it looks up, scales by one factor, or multiplies.

    A subclass of `nn.Embedding` with another `forward` is compared with its rows times its factor, for every id.
    """
    module, own = cast(Any, end.module), own_class(end.module)
    if not end.name.endswith(".weight"):
        return f"a {own.__name__}"
    if own.forward in PRODUCTS:
        return None
    if not isinstance(module, nn.Embedding):
        return f"a {own.__name__}"
    if module.max_norm is not None:
        return "an Embedding with max_norm" if own is nn.Embedding else f"a {own.__name__} with max_norm"
    if own.forward in LOOKUPS:
        return None
    others = [name for name, _ in module.named_parameters() if name != "weight"]
    buffers = [name for name, _ in module.named_buffers() if name != MULTIPLIER]
    factor = _factor(module)
    single = isinstance(factor, (int, float)) or (isinstance(factor, torch.Tensor) and factor.numel() == 1)
    if others or buffers or not single:
        return f"a {own.__name__}"
    return None if _agrees(module, factor) else f"a {own.__name__}, whose output is not its rows times {MULTIPLIER}"


@torch.no_grad()
def _agrees(module: nn.Embedding, factor: Any) -> bool:
    """Whether the module's output is its rows times its factor, up to one rounding, for every id."""
    weight, forward = module.weight.detach(), type(module).forward
    if weight.is_meta:  # there are no values to compare: transformers' classes of this form all scale
        return own_class(module).__module__.startswith("transformers.")
    for start in range(0, len(weight), IDS_AT_ONCE):
        ids = torch.arange(start, min(start + IDS_AT_ONCE, len(weight)), device=weight.device)
        found, expected = forward(module, ids), _scaled(weight[ids], factor)
        if found.shape != expected.shape or found.dtype != expected.dtype:
            return False
        eps = torch.finfo(expected.dtype).eps
        if not torch.allclose(found, expected, rtol=2 * eps, atol=0.0, equal_nan=True):
            return False
    return True


def _factor(module: Any) -> Any:
    """The module's multiplier, or `None`. On meta it has no value, but the number it was made of stands beside it."""
    factor = getattr(module, MULTIPLIER, None)
    if isinstance(factor, torch.Tensor) and factor.is_meta:
        number = getattr(module, f"scalar_{MULTIPLIER}", None)
        return None if number is None else torch.tensor(number, dtype=factor.dtype, device="cpu")
    return factor


def _scaled(rows: torch.Tensor, factor: float | torch.Tensor | None) -> torch.Tensor:
    """The rows times the factor, a tensor's rounded to the rows' dtype first, as the classes of transformers do."""
    if factor is None:
        return rows
    return rows * (factor.to(rows.dtype) if isinstance(factor, torch.Tensor) else factor)
