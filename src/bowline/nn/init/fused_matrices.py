"""Several matrices in one tensor: queries, keys and values as one product, each drawn by its own role."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bowline.errors import UsageError
from bowline.families.quirks import FUSED_NAMES, FusedOrder, quirks_of
from bowline.recipes import Role

__all__ = ["Fused", "check_fits", "fused_in", "is_conv1d", "output_axis"]

OUT = ("c_proj", "o_proj", "out_proj", "dense", "proj", "Wo")
"""What the matrix behind the attention is called; it reads as many numbers as there are in all queries."""


@dataclass(frozen=True)
class Fused:
    """The outputs of a matrix lie as `groups` times `parts`, each a role and how many outputs it has in a group.

    Example:
        >>> print(Fused(((Role.QUERY, 8), (Role.KEY, 8), (Role.VALUE, 8))))
        query, key, value
        >>> weight = torch.arange(6).reshape(6, 1)  # two heads of one number each
        >>> by_head = Fused(((Role.QUERY, 1), (Role.KEY, 1), (Role.VALUE, 1)), groups=2)
        >>> [(str(role), block.flatten().tolist()) for role, block in by_head.blocks(weight, 0)]
        [('query', [0, 3]), ('key', [1, 4]), ('value', [2, 5])]
    """

    parts: tuple[tuple[Role, int], ...]
    groups: int = 1

    @property
    def outputs(self) -> int:
        """Outputs of the whole matrix."""
        return self.groups * sum(size for _, size in self.parts)

    def blocks(self, tensor: torch.Tensor, axis: int) -> Iterator[tuple[Role, torch.Tensor]]:
        """Each part as a view of `tensor`, whose outputs are along `axis`."""
        grouped = tensor.unflatten(axis, (self.groups, -1))
        start = 0
        for role, size in self.parts:
            yield role, grouped.narrow(axis + 1, start, size)
            start += size

    def __str__(self) -> str:
        return ", ".join(role for role, _ in self.parts) + (f", {self.groups} times" if self.groups > 1 else "")


def is_conv1d(module: nn.Module) -> bool:
    """Whether the weight is (in, out), as in OpenAI's GPT-2; the class has that name here and in transformers."""
    return any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)


def output_axis(module: nn.Module) -> int:
    """Along which axis of the weight its outputs lie."""
    return 1 if is_conv1d(module) else 0


def fused_in(leaf: str, module: nn.Module, tensor: torch.Tensor, parent: nn.Module, config: Any) -> Fused | None:
    """The matrices that the weight of `module` holds, in their order; `parent` has the module under the name `leaf`.

    `None` if it holds one matrix, or if nothing says how several lie in it.
    """
    outputs = tensor.shape[output_axis(module)]
    if leaf == "gate_up_proj":
        return _sized(outputs, (Role.FEED_FORWARD_IN, outputs // 2), (Role.FEED_FORWARD_IN, outputs // 2))
    if leaf == "c_attn" and "q_attn" in parent._modules:  # attention to another's output: its queries stand beside it
        return _sized(outputs, (Role.KEY, outputs // 2), (Role.VALUE, outputs // 2))
    kind = getattr(config, "model_type", None)
    if kind is None:
        return _side_by_side(outputs, parent) if leaf in FUSED_NAMES else None
    attention = quirks_of(kind).fused_attention
    if attention is None or attention.name != leaf:
        return None
    match attention.order_in(config):
        case FusedOrder.BY_HEAD:
            return _grouped(outputs, config.num_attention_heads, config.num_attention_heads)
        case FusedOrder.BY_KEY_VALUE_HEAD:
            return _grouped(outputs, config.num_kv_heads, config.num_attention_heads)
        case FusedOrder.SIDE_BY_SIDE:
            return _side_by_side(outputs, parent)


def _sized(outputs: int, *parts: tuple[Role, int], groups: int = 1) -> Fused | None:
    made = Fused(parts, groups)
    return made if made.outputs == outputs and all(size > 0 for _, size in parts) else None


def _grouped(outputs: int, groups: int, heads: int) -> Fused | None:
    """One key and one value in each group, and the queries that share them."""
    queries = heads // groups
    size = outputs // (groups * (queries + 2))
    return _sized(outputs, (Role.QUERY, queries * size), (Role.KEY, size), (Role.VALUE, size), groups=groups)


def _side_by_side(outputs: int, parent: nn.Module) -> Fused | None:
    """As many queries as the matrix behind them reads; keys and values share the rest."""
    behind = [parent._modules[name] for name in OUT if parent._modules.get(name) is not None]
    queries = outputs // 3
    for module in behind[:1]:
        weight = module._parameters.get("weight") if module is not None else None
        if weight is not None and weight.ndim == 2:
            queries = weight.shape[1 - output_axis(module)]  # type: ignore[arg-type]
    rest = (outputs - queries) // 2
    return _sized(outputs, (Role.QUERY, queries), (Role.KEY, rest), (Role.VALUE, rest))


def check_fits(name: str, role: Fused, tensor: torch.Tensor, module: nn.Module) -> None:
    """Raise a `UsageError` where a caller's `Fused` is not the tensor's."""
    outputs = tensor.shape[output_axis(module)] if tensor.ndim == 2 else 0
    if role.outputs != outputs:
        raise UsageError(
            f"{name} {tuple(tensor.shape)}: has {outputs or 'no'} outputs, but its Fused ({role}) has {role.outputs}",
            help="give Fused(((role, outputs in a group), ...), groups) for all outputs of the tensor",
        )
