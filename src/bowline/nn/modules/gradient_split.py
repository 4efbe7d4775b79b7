"""How much of a tied matrix's gradient comes from its output end, and how much from its input end.

The gradient of the lookup has rows for the tokens that were looked up, and is what arrives at the embedding's output;
what is left of the matrix's gradient is the head's. So two hooks and one pass over the gradient tell them apart.
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
    """Frobenius norms of a shared matrix's gradient and of its two parts, and the cosine between these.

    total² = output² + input² + 2 output input cosine.
    """

    output: float
    input: float
    total: float
    cosine: float


class SplitMeter:
    """What arrived at the outputs of the lookups of one matrix; `split_gradient` makes it."""

    def __init__(self, embeddings: list[nn.Module]) -> None:
        self._embeddings = embeddings
        self._rows: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def weight(self) -> Any:
        """The matrix (V, D), or `None` where the model has no tied one."""
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
        """The split of the gradient that the matrix has now; `None` where nothing is tied or there is no gradient."""
        gradient = None if self.weight is None else self.weight.grad
        if gradient is None or not self._rows:
            return None
        wide = torch.promote_types(gradient.dtype, torch.float32)
        ids, places = torch.cat([ids for ids, _ in self._rows]).unique(return_inverse=True)
        of_input = torch.zeros(len(ids), gradient.shape[1], dtype=wide, device=gradient.device)
        of_input.index_add_(0, places, torch.cat([rows.to(wide) for _, rows in self._rows]))
        seen = gradient[ids].to(wide)
        of_output = seen - of_input
        total = math.fsum(_square(part) for part in gradient.split(2**14))
        output = max(0.0, total - _square(seen)) + _square(of_output)  # where nothing was looked up, all is the head's
        inner = float((of_output.double() * of_input).sum())
        norms = math.sqrt(output), math.sqrt(_square(of_input))
        cosine = inner / (norms[0] * norms[1]) if norms[0] and norms[1] else 0.0
        return GradientSplit(output=norms[0], input=norms[1], total=math.sqrt(total), cosine=cosine)


@contextmanager
def split_gradient(model: nn.Module, embedding: nn.Module | None = None) -> Iterator[SplitMeter]:
    """Inside, what flows back to the input end of the tied matrix is noted, and `read()` splits its gradient.

    To be put around the forward and backward passes of one step, all of its micro-batches, and read before gradients
    are clipped or set to zero. It keeps the rows' gradients (N, D) and reads the gradient (V, D) once. In a process of
    a data-parallel run the gradient is of all processes and the rows are not: there it must be read with `no_sync`.

    Args:
        model: any module, with the parameters that it trains.
        embedding: the input end, where the model ties without a second module (`F.linear(hidden, table.weight)`);
            otherwise every embedding whose weight another module has too.

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
    """The embeddings of the matrix that is both ends."""
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
    """What a scaled embedding multiplies its rows by, as transformers names it."""
    scale = getattr(module, "embed_scale", None)
    return 1.0 if scale is None or type(module).forward is nn.Embedding.forward else float(scale)


def _square(part: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(part, dtype=torch.promote_types(part.dtype, torch.float32)).double().square())
