"""Ends graphs of torch.compile before deferred logits, unless the caller demands a single graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["in_one_graph", "uncompiled"]

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """The function, excluded from tracing: torch.compile ends its graph there."""
    found: Function = torch.compiler.disable(function)
    return found


def _in_one_graph() -> bool:
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        tracer: Any = InstructionTranslator.current_tx()
        return bool(tracer.one_graph or getattr(tracer, "error_on_graph_break", False))
    except (ImportError, AttributeError):  # an export that runs the model, or a torch with another tracer
        return True


in_one_graph: Callable[[], bool] = torch.compiler.assume_constant_result(_in_one_graph)
"""Whether the traced code has to be one graph (`fullgraph=True`, or an export); evaluated during tracing."""
