"""What was multiplied, and in which precision."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bowline.functional.kernels.half_precision_emulation import ROUNDED

__all__ = ["Multiplied"]


class Multiplied(TorchDispatchMode):
    """The dtypes of what was multiplied within it, below every mode that was entered later."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ROUNDED:
            self.dtypes.add(args[0].dtype)
        return func(*args, **(kwargs or {}))
