"""The options of the loss, as one record, and the checks of its arguments, which all backends share."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from bowline.errors import UsageError
from bowline.functional.kernels.function_transforms import in_torch_func

__all__ = [
    "BACKENDS",
    "Options",
    "Reduction",
    "check_arguments",
    "check_backend",
    "check_ends",
    "check_labels",
    "check_numbers",
    "masked_ids",
]

Reduction = Literal["mean", "sum", "none"]
BACKENDS = ("auto", "reference", "logits", "chunked", "torch", "liger", "quack", "cut_cross_entropy")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the loss of one position; `linear_cross_entropy` explains each of them."""

    logit_scale: float = 1.0
    softcap: float | None = None
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    mask_ids: tuple[int, ...] = ()

    def share(self, size: int) -> float:
        """The target probability that label smoothing gives each unmasked token, in a vocabulary of `size`."""
        return self.label_smoothing / max(1, size - len(self.mask_ids))


def check_ends(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, logit_scale: float, softcap: float | None
) -> None:
    """Raises unless hidden (..., D), weight (V, D) and bias (V,) fit each other and have floating-point dtypes."""
    check_numbers(logit_scale=logit_scale, softcap=softcap)
    if hidden.ndim < 1 or weight.ndim != 2 or hidden.shape[-1] != weight.shape[1]:
        raise UsageError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}: do not fit, expected (..., D) and (V, D)"
        )
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        if tensor.is_quantized or not tensor.is_floating_point():
            raise UsageError(f"{name} of {tensor.dtype}: expected floating point", help="dequantise it first")
    kind = weight.device.type
    casts = kind != "meta" and torch.is_autocast_enabled(kind)
    if hidden.dtype != weight.dtype and not casts:
        raise UsageError(
            f"hidden of {hidden.dtype} and weight of {weight.dtype}: expected one dtype for both",
            help="cast one of them, or use autocast",
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise UsageError(
            f"bias {tuple(bias.shape)} for weight {tuple(weight.shape)}: expected {tuple(weight.shape[:1])}"
        )
    if bias is not None and bias.dtype != weight.dtype and not (bias.is_floating_point() and casts):
        raise UsageError(
            f"bias of {bias.dtype} and weight of {weight.dtype}: expected one dtype for both", help="cast the bias"
        )
    if softcap is not None and not 0 < softcap < math.inf:
        raise UsageError(f"softcap={softcap!r}: expected a number above 0, or None")


def check_numbers(**options: Any) -> None:
    """Raises if an option is a tensor, because the gradient of that tensor would be lost."""
    for name, value in options.items():
        if isinstance(value, torch.Tensor):
            raise UsageError(
                f"{name} is a tensor: expected a number, which has no gradient",
                help=f"pass float({name}); multiply a trained scale into hidden and bias",
            )


def masked_ids(mask_ids: Any, size: int) -> tuple[int, ...]:
    """The masked ids, each once; raises unless all are tokens and some token stays unmasked."""
    given = mask_ids.tolist() if hasattr(mask_ids, "tolist") else mask_ids
    if isinstance(given, list) and any(isinstance(one, bool) for one in given):
        raise UsageError("mask_ids of bool: expected ids of tokens, such as [0, 1]", help="pass mask.nonzero()[:, 0]")
    try:
        found = tuple(dict.fromkeys(operator.index(token) for token in (() if given is None else given)))
    except TypeError:
        raise UsageError(f"mask_ids={mask_ids!r}: expected ids of tokens, such as [0, 1]") from None
    for token in found:
        if not 0 <= token < size:
            raise UsageError(f"mask_ids has {token}, and the head has {size} rows: expected 0 to {size - 1}")
    if size and len(found) == size:
        raise UsageError(f"mask_ids has all {size} tokens: expected to leave at least one that can be predicted")
    return found


def check_backend(backend: str) -> None:
    """Raises unless a backend of that name exists."""
    if backend not in BACKENDS:
        raise UsageError(f"backend={backend!r}: expected one of {', '.join(BACKENDS)}")


def check_arguments(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    class_weight: torch.Tensor | None,
    label_smoothing: float,
    reduction: str,
    backend: str,
) -> None:
    """Checks the arguments that `check_ends`, which runs first, does not look at."""
    check_backend(backend)
    if reduction not in ("mean", "sum", "none"):
        raise UsageError(f"reduction={reduction!r}: expected 'mean', 'sum' or 'none'")
    if labels.shape != hidden.shape[:-1]:
        raise UsageError(
            f"labels {tuple(labels.shape)} for hidden {tuple(hidden.shape)}: expected {tuple(hidden.shape[:-1])}"
        )
    if labels.dtype != torch.int64:
        raise UsageError(f"labels of {labels.dtype}: expected torch.int64", help="pass labels.long()")
    if class_weight is not None and class_weight.shape != weight.shape[:1]:
        raise UsageError(
            f"class_weight {tuple(class_weight.shape)}: expected {tuple(weight.shape[:1])}, one number for each token"
        )
    if not 0 <= label_smoothing <= 1:
        raise UsageError(f"label_smoothing={label_smoothing!r}: expected a number from 0 to 1")


def check_labels(labels: torch.Tensor, size: int, options: Options) -> None:
    """Raises on a label that is not a token or is masked; checks on the CPU only.

    On a GPU, reading labels would stall the queue: there a wrong label gives a loss of NaN, or torch's own assertion
    fails. A label of another class, such as a FakeTensor, has no value to read, nor has one under `torch.func.vmap`.
    """
    if torch.compiler.is_compiling() or labels.device.type != "cpu" or labels.numel() == 0 or in_torch_func():
        return
    if type(labels) is not torch.Tensor:
        return
    ignored = options.ignore_index
    wrong = (labels != ignored) & ((labels < 0) | (labels >= size))
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        raise UsageError(
            f"label {int(labels[wrong][0])}: expected 0 to {size - 1}, or {ignored} for a position without a label; "
            f"at position {tuple(at)}"
        )
    for token in options.mask_ids:
        found = labels == token
        if token != ignored and found.any():
            at = found.nonzero()[0].tolist()
            raise UsageError(
                f"label {token}: is masked, so its loss would be infinite; at position {tuple(at)}",
                help=f"set such labels to {ignored}, or do not mask the token",
            )
