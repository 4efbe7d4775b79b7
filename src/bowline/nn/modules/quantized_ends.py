"""The two ends of a tie whose matrix is one quantised table: the lookup and the head. For inference only."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import nn

from bowline.nn.modules.heads import LMHead
from bowline.nn.modules.tied_embedding import TiedEmbedding
from bowline.nn.tree.class_swap import own_class
from bowline.nn.tree.slots import Slot
from bowline.nn.tree.table_slots import SharedTable, TableEnd

__all__ = ["Multiplier", "QuantizedEmbedding", "QuantizedHead", "multiplier_of", "quantized", "unlike_what_it_computes"]

LOOKUPS = (nn.Embedding.forward, TiedEmbedding.forward)
PRODUCTS = (nn.Linear.forward, LMHead.forward)
MULTIPLIER = "embed_scale"
"""The attribute of a scaled embedding by which it multiplies its rows (Gemma, BART, XGLM and their relatives)."""
IDS_AT_ONCE = 4096


class Multiplier:
    """The number by which a scaled embedding multiplies its rows.

    A class that holds it in a buffer rounds it to the rows' dtype first (Gemma); a class with a plain number does not
    (BART). Here it is a plain number either way: a buffer that no file holds is lost when a model on meta is loaded.
    """

    def __init__(self, number: float, *, rounds: bool) -> None:
        self.number = number
        self._rounds = rounds
        self._rounded: dict[torch.dtype, float] = {}

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows times the number."""
        if not self._rounds:
            return rows * self.number
        if rows.dtype not in self._rounded:
            exact = torch.tensor(self.number, dtype=torch.float64, device="cpu")
            self._rounded[rows.dtype] = exact.to(rows.dtype).item()
        return rows * self._rounded[rows.dtype]

    def as_the_class_has_it(self, device: torch.device) -> float | torch.Tensor:
        """A tensor of no axes if the class holds a buffer, else the number."""
        return torch.tensor(self.number, device=device) if self._rounds else self.number


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
        for home in ("_parameters", "_buffers", "_modules"):
            module.__dict__[home] = dict(module.__dict__[home])
        module._parameters.update(self._parameters)  # the bias
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

    def __init__(
        self, table: SharedTable, padding_idx: int | None = None, multiplier: Multiplier | None = None
    ) -> None:
        super().__init__()
        self._modules["table"] = table
        self.padding_idx = padding_idx
        self.multiplier = multiplier
        self.num_embeddings, self.embedding_dim = table.shape

    @property
    def table(self) -> SharedTable:
        """The table, which is this module's child."""
        return cast(SharedTable, self._modules["table"])

    @property
    def embed_scale(self) -> float | torch.Tensor | None:
        """The multiplier as the class had it, which some models read (DiffusionGemma): a tensor or a number."""
        return None if self.multiplier is None else self.multiplier.as_the_class_has_it(self.table.scale.device)

    def read(self, table: SharedTable) -> None:
        """Use `table` from now on."""
        self._modules["table"] = table

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of `ids`."""
        rows = self.table.rows(ids)
        return rows if self.multiplier is None else self.multiplier(rows)

    def in_float(self, parameter: nn.Parameter) -> nn.Module:
        """The embedding that was here before the table, with `parameter` as its weight."""
        module = super().in_float(parameter)
        old = module._buffers.get(MULTIPLIER)
        if old is not None and self.multiplier is not None:
            number = torch.tensor(self.multiplier.number, dtype=old.dtype, device=parameter.device)
            module._buffers[MULTIPLIER] = number
        return module


class QuantizedHead(_Replacement):
    """The output end: `(..., D)` hidden states to `(..., V)` logits, `hidden @ rows.T + bias`.

    With h the hidden state, a logit of the rounded int8 matrix is off by at most `(1 + 127 eps) scale[v] / 2 * |h|_1`.
    The table is the embedding's: the head reads it there and lists it neither in its modules nor in its state.
    """

    looks_up = False
    bias: nn.Parameter | None

    def __init__(self, table: SharedTable, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self._shared = (table,)  # in a tuple: a module in a plain attribute would be registered, and stored again
        self.register_parameter("bias", bias)
        self.out_features, self.in_features = table.shape

    @property
    def table(self) -> SharedTable:
        """The embedding's table."""
        return self._shared[0]

    def read(self, table: SharedTable) -> None:
        """Use `table` from now on."""
        self._shared = (table,)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits."""
        logits = self.table.product(hidden)
        return logits if self.bias is None else logits + self.bias


def quantized(end: Slot, table: SharedTable) -> TableEnd:
    """The module that reads `table` in place of the end's module."""
    module: Any = end.module
    made: _Replacement
    if isinstance(module, nn.Embedding):
        made = QuantizedEmbedding(table, module.padding_idx, multiplier_of(module))
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
    factor = multiplier_of(module)
    if others or buffers or factor is None:
        return f"a {own.__name__}"
    return None if _agrees(module, factor) else f"a {own.__name__}, whose output is not its rows times {MULTIPLIER}"


@torch.no_grad()
def _agrees(module: nn.Embedding, factor: Multiplier) -> bool:
    """Whether the module's output is its rows times its factor, up to one rounding, for every id."""
    weight, forward = module.weight.detach(), type(module).forward
    if weight.is_meta:  # there are no values to compare: transformers' classes of this form all scale
        return own_class(module).__module__.startswith("transformers.")
    for start in range(0, len(weight), IDS_AT_ONCE):
        ids = torch.arange(start, min(start + IDS_AT_ONCE, len(weight)), device=weight.device)
        found, expected = forward(module, ids), factor(weight[ids])
        if found.shape != expected.shape or found.dtype != expected.dtype:
            return False
        eps = torch.finfo(expected.dtype).eps
        if not torch.allclose(found, expected, rtol=2 * eps, atol=0.0, equal_nan=True):
            return False
    return True


def multiplier_of(module: nn.Module) -> Multiplier | None:
    """The multiplier of a scaled embedding, or `None`. On meta, the number that its buffer was made of."""
    factor: Any = getattr(module, MULTIPLIER, None)
    if isinstance(factor, torch.Tensor):
        number = getattr(module, f"scalar_{MULTIPLIER}", None) if factor.is_meta else factor
        if isinstance(number, (int, float)):
            number = torch.tensor(number, dtype=factor.dtype, device="cpu")
        if isinstance(number, torch.Tensor) and number.numel() == 1:
            return Multiplier(number.item(), rounds=True)
        return None
    return Multiplier(factor, rounds=False) if isinstance(factor, (int, float)) else None
