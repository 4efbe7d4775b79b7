"""Half-precision matrix products on a processor without instructions for them: computed in float32 and rounded.

torch computes them too, but it widens both factors whole and multiplies slowly: on an Intel Xeon without bf16
instructions, a product of a GPT-2 takes three times as long in bfloat16 as in float32. Widening itself costs little.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

__all__ = ["WideProducts", "emulated", "wide_products"]

LOG = logging.getLogger(__name__)
FLASH = "_scaled_dot_product_flash_attention_for_cpu"
"""A private operator of torch; if it disappears, attention runs as torch runs it."""
ROUNDED = {
    getattr(torch.ops.aten, name).default: rounded
    for name, rounded in {
        "mm": 1, "addmm": 1, "bmm": 1, "baddbmm": 1, FLASH: 1, f"{FLASH}_backward": 3,
    }.items()
    if hasattr(torch.ops.aten, name)
}  # fmt: skip
"""By operator: how many of its results, from the first on, have the dtype of its factors."""


@cache
def emulated(dtype: torch.dtype) -> bool:
    """Whether this processor lacks instructions that multiply numbers of that dtype, bfloat16 or float16.

    Detected on x86 only; elsewhere, and if this torch cannot tell, the instructions are assumed to exist.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    names: tuple[str, ...] = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    if dtype == torch.float16:
        names = ("_is_amx_fp16_supported",)
    asks = [getattr(torch.cpu, name, None) for name in names]
    return all(ask is not None and not ask() for ask in asks)


class WideProducts(TorchDispatchMode):
    """Inside, products of `dtype` tensors on the CPU are computed in float32, and their results rounded to `dtype`.

    This covers matrix products and attention, forward and backward (a backward pass has to start inside). Sums are in
    float32, as torch's own are, so results differ from torch's by the order of sums; attention also omits torch's
    inner rounding. Under a mode of this kind, autograd adds gradients out of place and copies each once.

    Example:
        >>> a = torch.ones(2, 3, dtype=torch.bfloat16)
        >>> with WideProducts(torch.bfloat16):
        ...     a @ a.T
        tensor([[3., 3.],
                [3., 3.]], dtype=torch.bfloat16)
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rounded = ROUNDED.get(func)
        if rounded is None or not all(self._is_ours(one) for one in args[:3]):  # torch has an error for mixed dtypes
            return func(*args, **kwargs)
        found = func(*tree_map_only(torch.Tensor, self._wide, args), **tree_map_only(torch.Tensor, self._wide, kwargs))
        if isinstance(found, torch.Tensor):
            return found.to(self.dtype)
        return (*(one.to(self.dtype) for one in found[:rounded]), *found[rounded:])

    def _is_ours(self, tensor: torch.Tensor) -> bool:
        return tensor.dtype == self.dtype and tensor.device.type == "cpu"

    def _wide(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if self._is_ours(tensor) else tensor


def wide_products(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[object]:
    """`WideProducts` on a CPU without products of `dtype`; elsewhere, a context that does nothing."""
    if device.type != "cpu" or not emulated(dtype):
        return nullcontext()
    _say(dtype)
    return WideProducts(dtype)


@cache
def _say(dtype: torch.dtype) -> None:
    LOG.info("this processor has no products of %s: they are made in float32, and rounded", dtype)
