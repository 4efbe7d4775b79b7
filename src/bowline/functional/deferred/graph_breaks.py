"""What torch.compile makes of logits that are not computed: nothing. Its graph ends before them, if it may."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["in_one_graph", "uncompiled"]

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """The function, never traced: where torch.compile meets it, its graph ends."""
    found: Function = torch.compiler.disable(function)
    return found


def _in_one_graph() -> bool:
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        tracer: Any = InstructionTranslator.current_tx()
        return bool(tracer.one_graph or getattr(tracer, "error_on_graph_break", False))
    except (ImportError, AttributeError):  # an export that runs the model; or a torch whose tracer is another
        return True


in_one_graph: Callable[[], bool] = torch.compiler.assume_constant_result(_in_one_graph)
"""Whether what is traced has to stay whole, with `fullgraph=True` or for an export. It is run while that is traced."""
