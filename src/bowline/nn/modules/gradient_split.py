"""Measures how much of a tied matrix's gradient comes from its output end, and how much from its input end.

The lookup's gradient has rows for the tokens that were looked up, and arrives at the embedding's output; the rest of
the matrix's gradient is the head's. So two hooks and one pass over the gradient separate the two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bowline.errors import UsageError

__all__ = ["GradientSplit", "SplitMeter", "split_gradient"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSplit:
    """Frobenius norms of a shared matrix's gradient and of its two parts, and the cosine between the parts.

    total² = output² + input² + 2 output input cosine.
    """

    output: float
    input: float
    total: float
    cosine: float


class SplitMeter:
    """Records the gradients at the outputs of one matrix's lookups; `split_gradient` makes it."""

    def __init__(self, embeddings: list[nn.Module]) -> None:
        self._embeddings = embeddings
        self._rows: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def weight(self) -> Any:
        """The tied matrix (V, D), or `None` if the model has none."""
        return self._embeddings[0].weight if self._embeddings else None

    def _watch(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            given = next(one for one in (*args, *named.values()) if isinstance(one, torch.Tensor))
            ids = given.detach().flatten().clone()  # a buffer may be filled again before the gradient arrives
            factor, padding = _factor(module), getattr(module, "padding_idx", None)

            def keep(gradient: torch.Tensor) -> None:
                rows = gradient.detach().reshape(len(ids), gradient.shape[-1])
                counted = slice(None) if padding is None else ids != padding
                self._rows.append((ids[counted], rows[counted] if factor == 1 else rows[counted] * factor))

            output.register_hook(keep)

    @torch.no_grad()
    def read(self) -> GradientSplit | None:
        """The split of the matrix's present gradient; `None` if nothing is tied or there is no gradient."""
        gradient = None if self.weight is None else self.weight.grad
        if gradient is None or not self._rows:
            return None
        wide = torch.promote_types(gradient.dtype, torch.float32)
        ids, places = torch.cat([ids for ids, _ in self._rows]).unique(return_inverse=True)
        grad_input = torch.zeros(len(ids), gradient.shape[1], dtype=wide, device=gradient.device)
        grad_input.index_add_(0, places, torch.cat([rows.to(wide) for _, rows in self._rows]))
        seen = gradient[ids].to(wide)
        grad_output = seen - grad_input
        total = math.fsum(_square(part) for part in gradient.split(2**14))
        output = max(0.0, total - _square(seen)) + _square(
            grad_output
        )  # without lookups, the whole gradient is the head's
        inner = float((grad_output.double() * grad_input).sum())
        norms = math.sqrt(output), math.sqrt(_square(grad_input))
        cosine = inner / (norms[0] * norms[1]) if norms[0] and norms[1] else 0.0
        return GradientSplit(output=norms[0], input=norms[1], total=math.sqrt(total), cosine=cosine)


@contextmanager
def split_gradient(model: nn.Module, embedding: nn.Module | None = None) -> Iterator[SplitMeter]:
    """Records the gradient that reaches the input end of the tied matrix, so that `read()` can split the whole.

    Put it around the forward and backward passes of one step, with all of its micro-batches, and read it before
    gradients are clipped or set to zero. It keeps the rows' gradients (N, D) and reads the gradient (V, D) once. In a
    data-parallel run the gradient is the sum over all processes and the rows are not: there, read it within `no_sync`.

    Args:
        model: any module, with the parameters that it trains.
        embedding: the input end, where the model ties without a second module (`F.linear(hidden, table.weight)`);
            otherwise every embedding whose weight another module uses too.

    Raises:
        UsageError: the matrix has a gradient already, several matrices are tied, or `embedding` has no weight.

    Example:
        >>> from bowline.nn import LMHead
        >>> table = nn.Embedding(9, 4)
        >>> model = nn.Sequential(table, LMHead(4, 9, bias=False))
        >>> model[1].weight = table.weight
        >>> with split_gradient(model) as meter:
        ...     model(torch.tensor([1, 2])).logsumexp(-1).sum().backward()
        ...     split = meter.read()
        >>> total = split.output**2 + split.input**2 + 2 * split.output * split.input * split.cosine
        >>> abs(total - split.total**2) < 1e-3 * split.total**2
        True
    """
    meter = SplitMeter(_lookups(model) if embedding is None else [_expect_lookup(embedding)])
    gradient = None if meter.weight is None else meter.weight.grad
    if gradient is not None and gradient.any():
        raise UsageError("the shared matrix has a gradient already", help="optimizer.zero_grad() before the step")
    hooks = [module.register_forward_hook(meter._watch, with_kwargs=True) for module in meter._embeddings]
    try:
        yield meter
    finally:
        for hook in hooks:
            hook.remove()


def _lookups(model: nn.Module) -> list[nn.Module]:
    """The embeddings whose matrix is used at both ends."""
    holders: dict[int, dict[int, nn.Module]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        end = model.get_submodule(name.rpartition(".")[0])
        holders.setdefault(id(parameter), {})[id(end)] = end
    groups = []
    for ends in holders.values():
        lookups: list[nn.Module] = [end for end in ends.values() if isinstance(end, nn.Embedding)]
        if lookups and len(lookups) < len(ends):
            groups.append(lookups)
    if len(groups) > 1:
        raise UsageError(f"{len(groups)} matrices are tied: expected one", help="say which: embedding=model....")
    return groups[0] if groups else []


def _expect_lookup(module: Any) -> nn.Module:
    if not isinstance(module, nn.Module) or not isinstance(getattr(module, "weight", None), nn.Parameter):
        raise UsageError(f"embedding is a {type(module).__name__}: expected a module with a weight, as nn.Embedding")
    return module


def _factor(module: nn.Module) -> float:
    """The factor on the rows of a scaled embedding, by transformers' name for it."""
    scale = getattr(module, "embed_scale", None)
    return 1.0 if scale is None or type(module).forward is nn.Embedding.forward else float(scale)


def _square(part: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(part, dtype=torch.promote_types(part.dtype, torch.float32)).double().square())
