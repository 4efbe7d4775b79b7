"""Converts torch tensors to numpy arrays; recognises them by class, so that torch is never imported here."""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard

import numpy.typing as npt

from bowline.errors import UsageError

__all__ = ["Tensor", "check_holds_values", "is_tensor", "to_numpy"]

NUMPY_FLOATS = ("torch.float16", "torch.float32", "torch.float64")
"""The float dtypes of torch that numpy has too; others are widened to float32, which holds all their values."""


class Tensor(Protocol):
    """The interface of `torch.Tensor` that diagnostics use: any dtype, any device, with or without a gradient."""

    def detach(self) -> Any: ...


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """Whether this is a `torch.Tensor` or an instance of a subclass, such as a `Parameter`.

    Example:
        >>> is_tensor([1.0, 2.0])
        False
    """
    return any((base.__module__, base.__qualname__) == ("torch", "Tensor") for base in type(value).__mro__)


def check_holds_values(tensor: Tensor, name: str = "table") -> None:
    """Raise `UsageError` for a tensor on the meta device, a sparse, a quantised or a nested one."""
    values: Any = tensor
    for odd, kind, way_out in (
        (values.is_meta, "one on the meta device", "load its values first, say with to_empty and load_state_dict"),
        (values.is_quantized, f"a quantised one ({values.dtype})", "pass tensor.dequantize()"),
        (values.is_nested, "a nested one", "pass one embedding matrix"),
        (str(values.layout) != "torch.strided", f"one of layout {values.layout}", "pass tensor.to_dense()"),
    ):
        if odd:
            raise UsageError(f"{name}: expected a tensor that holds its values, got {kind}", help=way_out)


def to_numpy(tensor: Tensor, name: str = "table") -> npt.NDArray[Any]:
    """The tensor's values on the CPU: its own dtype where numpy has it, else float32. Shares memory where it can.

    Raises `UsageError` as `check_holds_values`, and for a class that has no plain values of its own (a `DTensor`, a
    fake tensor).
    """
    check_holds_values(tensor, name)
    try:
        values = tensor.detach().cpu()
        if values.is_floating_point() and str(values.dtype) not in NUMPY_FLOATS:
            values = values.float()
        array: npt.NDArray[Any] = values.numpy(force=True)
    except (RuntimeError, TypeError) as error:
        raise UsageError(
            f"{name}: expected a tensor that holds its values, got a {type(tensor).__name__}: {error}",
            help="pass a plain tensor; for a DTensor, call its full_tensor()",
        ) from error
    return array
