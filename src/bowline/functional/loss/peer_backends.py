"""The backends "liger", "quack" and "cut_cross_entropy": losses of other libraries, where installed and applicable.

They take the arguments of the other backends, with the same checks and a loss in float32 or wider, so that `backend=`
alone switches a model to one of them. Each library is called as its users call it, and its accuracy is its own. `auto`
never picks one of them: their arguments vary with their versions, and none of them offers its weight gradient for
`tied_embedding` to add to.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from bowline.errors import UsageError
from bowline.functional.kernels.triton_support import triton_runs_on
from bowline.functional.loss.loss_options import Options, Reduction

__all__ = ["PEERS", "peer_loss"]

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A library's name, how to call it, and what it accepts: dtypes by device, and which of our options."""

    package: str
    module: str
    function: str
    call: Callable[..., torch.Tensor]
    dtypes: Callable[[torch.device], tuple[torch.dtype, ...]]
    takes: tuple[str, ...] = ()
    multiple: int = 1


def _liger(
    function: Any,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    options: Options,
    reduction: str,
) -> torch.Tensor:
    found: torch.Tensor = function(
        hidden,
        weight,
        labels,
        bias=bias,
        ignore_index=options.ignore_index,
        lse_square_scale=options.z_loss,
        label_smoothing=options.label_smoothing,
        reduction=reduction,
        softcap=options.softcap,
        accum_dtype=torch.float32,  # or its chunks are added up in half precision
    )
    return found


def _quack(
    function: Any,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    _: None,
    labels: torch.Tensor,
    options: Options,
    reduction: str,
) -> torch.Tensor:
    total = function(hidden, weight, labels, ignore_index=options.ignore_index, reduction="sum")
    return _mean_of(total, labels, options, reduction)


def _cut(
    function: Any,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    _: None,
    labels: torch.Tensor,
    options: Options,
    reduction: str,
) -> torch.Tensor:
    found = function(
        hidden,
        weight,
        labels,
        ignore_index=options.ignore_index,
        softcap=options.softcap,
        reduction="none" if reduction == "none" else "sum",
        impl="cce" if hidden.device.type == "cuda" else "torch_compile",
    )
    return _mean_of(found, labels, options, reduction)


def _mean_of(total: torch.Tensor, labels: torch.Tensor, options: Options, reduction: str) -> torch.Tensor:
    """The mean from a sum: quack and cut_cross_entropy return NaN for a mean over no labels, this 0."""
    return total / (labels != options.ignore_index).sum().clamp(min=1) if reduction == "mean" else total


PEERS = {
    "liger": Peer(
        package="liger-kernel",
        module="liger_kernel.transformers.functional",
        function="liger_fused_linear_cross_entropy",
        call=_liger,
        dtypes=lambda device: (torch.float32, *HALF) if triton_runs_on(device) else (),
        takes=("bias", "softcap", "z_loss", "label_smoothing"),
    ),
    "quack": Peer(
        package="quack-kernels",
        module="quack.linear_cross_entropy",
        function="chunked_linear_cross_entropy",
        call=_quack,
        dtypes=lambda device: HALF if device.type == "cuda" else (),
        multiple=8,
    ),
    "cut_cross_entropy": Peer(
        package="cut-cross-entropy",
        module="cut_cross_entropy",
        function="linear_cross_entropy",
        call=_cut,
        dtypes=lambda device: {"cuda": HALF, "cpu": (torch.float64, torch.float32, *HALF)}.get(device.type, ()),
        takes=("softcap", "reduction"),
    ),
}


def peer_loss(
    name: str,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    options: Options,
    reduction: Reduction,
    asked: Mapping[str, bool],
) -> torch.Tensor:
    """The loss by one of `PEERS`, in float32 or wider: hidden (..., D) and labels (...), at least one.

    `asked`: by name, whether further results or options were asked for, which no peer supports.

    Raises:
        UsageError: it is not installed, or does not take the device, a dtype, an option or a size.
    """
    peer = PEERS[name]
    dtypes = peer.dtypes(hidden.device)
    if not dtypes:
        raise _refusal(name, f"on {hidden.device.type}: expected a GPU")
    for end, tensor in (("hidden", hidden), ("weight", weight)):
        if tensor.dtype not in dtypes:
            raise _refusal(name, f"with {end} of {tensor.dtype}: expected {' or '.join(map(str, dtypes))}")
    given = {"bias": bias is not None, "reduction": reduction == "none", **asked}
    given |= {field.name: getattr(options, field.name) != field.default for field in fields(Options)}
    for option, there in given.items():
        if there and option not in (*peer.takes, "ignore_index"):
            said = "reduction='none'" if option == "reduction" else option
            raise _refusal(name, f"with {said}: {peer.package} has no such option")
    sizes = labels.numel(), *weight.shape
    if any(size % peer.multiple for size in sizes):
        raise _refusal(name, f"for N, V, D = {sizes}: expected multiples of {peer.multiple}")
    if importlib.util.find_spec(peer.module.partition(".")[0]) is None:
        raise _refusal(name, f"needs {peer.package}, which is not installed", f"pip install {peer.package}, or ")
    function = getattr(importlib.import_module(peer.module), peer.function)
    flat = hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels.reshape(-1)
    loss = peer.call(function, *flat, options, reduction)
    loss = loss.to(torch.promote_types(loss.dtype, torch.float32))
    return loss.view(labels.shape) if reduction == "none" else loss


def _refusal(name: str, why: str, first: str = "") -> UsageError:
    return UsageError(f"backend={name!r} {why}", help=f'{first}backend="auto"')
