"""Chooses the backend that `auto` runs, by the results asked for, by shape and by device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bowline.errors import UsageError
from bowline.functional.kernels.function_transforms import in_torch_func
from bowline.functional.loss.adapter_terms import AdapterTerms
from bowline.functional.loss.loss_options import check_backend
from bowline.functional.loss.peer_backends import PEERS
from bowline.functional.loss.resource_limits import current
from bowline.functional.row_shard import RowShard, is_dtensor

__all__ = ["chosen_backend", "pick"]

SMALL = 2**22
"""Bytes of logits up to which chunking is not worth its cost."""


def chosen_backend(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    reduction: str = "mean",
    return_lse: bool = False,
    return_logits: bool = False,
    adapters: AdapterTerms | None = None,
    backend: str = "auto",
) -> str:
    """The backend that `linear_cross_entropy` runs for these arguments here and now; never "auto".

    For a DTensor weight whose rows are split over processes: what this process runs for its own rows.

    Example:
        >>> hidden, weight = torch.zeros(512, 64), torch.zeros(50000, 64, requires_grad=True)
        >>> chosen_backend(hidden, weight), chosen_backend(hidden, weight, return_logits=True)
        ('chunked', 'logits')
        >>> chosen_backend(hidden[:4], weight)
        'logits'
    """
    check_backend(backend)
    total = reduction != "none" and not return_lse
    if is_dtensor(weight):
        with torch.no_grad():
            weight, hidden, total = RowShard.of(weight).part(), _plain(hidden), False
    return pick(hidden, weight, total, return_logits, backend, adapters=adapters)


def _plain(hidden: Any) -> torch.Tensor:
    found: torch.Tensor = hidden.to_local() if is_dtensor(hidden) else hidden
    return found


def pick(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    total: bool,
    return_logits: bool,
    backend: str,
    *others: torch.Tensor | None,
    adapters: AdapterTerms | None = None,
) -> str:
    """The backend to run; `total`: one number is wanted, not each position's loss; `others`: bias and labels.

    With adapters "reference" keeps the logits, because "logits" has no products of adapters.

    Raises:
        UsageError: the backend that was asked for has no adapters.
    """
    if adapters is None:
        return _pick(hidden, weight, total, return_logits, backend, *others)
    name = _pick(
        hidden, weight, total, return_logits, backend, *others, adapters.left, adapters.right, adapters.columns
    )
    if name == "torch" or name in PEERS:
        raise UsageError(f"backend={name!r} has no adapters", help='backend="auto"', argument="backend")
    return "reference" if name == "logits" or torch.compiler.is_compiling() else name


def _pick(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    total: bool,
    return_logits: bool,
    backend: str,
    *others: torch.Tensor | None,
) -> str:
    if backend in ("reference", "torch"):
        return backend
    if backend in PEERS:
        return backend if hidden.numel() else "reference"  # the libraries do not handle a batch without tokens
    if not weight.numel():
        return "reference"
    if in_torch_func():
        return "reference" if backend == "auto" else backend
    plain = all(type(one) in (torch.Tensor, nn.Parameter, type(None)) for one in (hidden, weight, *others))
    here = hidden.device == weight.device and hidden.device.type in ("cpu", "cuda")
    if return_logits or not plain or not here or (torch.compiler.is_compiling() and not total):
        return "logits"  # it returns logits, can be traced, and lets a tensor subclass multiply
    if backend == "chunked":
        return backend
    logits = hidden.shape[:-1].numel() * len(weight) * weight.dtype.itemsize
    enough = SMALL if total else current().scratch(weight)  # a loss for each position costs a fourth product
    return "logits" if backend == "logits" or logits <= enough else "chunked"
