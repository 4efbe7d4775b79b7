"""AOTInductor's packages (`.pt2`): torch.export's program, compiled for this machine's processor with its weights."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bowline.errors import UsageError
from bowline.export.plain_call import Inputs
from bowline.export.program import first_line, make_program, quietly
from bowline.tie import Tie

__all__ = ["doubled", "load_compiled", "write_compiled"]


def write_compiled(model: nn.Module, inputs: Inputs, file: Path) -> None:
    """Export the model, compile it with the weights in the code, and write the package.

    Raises:
        UsageError: torch.export or AOTInductor cannot take the model, or there is no C++ compiler.
    """
    program = make_program(model, inputs)
    try:
        with quietly():
            torch._inductor.aoti_compile_and_package(program, package_path=str(file))
    except OSError:
        raise
    except Exception as error:
        missing = "InvalidCxxCompiler" in str(error)
        why = "finds no C++ compiler" if missing else f"cannot compile it: {first_line(error)}"
        raise UsageError(
            f"{type(model).__name__}: AOTInductor {why}",
            help="install g++, or set CXX to a compiler" if missing else "leave aot_inductor out",
            argument="aot_inductor",
        ) from error


def load_compiled(file: Path) -> Any:
    """The compiled model, which takes the inputs as they were exported."""
    return torch._inductor.aoti_load_package(str(file))


def doubled(compiled: Any, ties: Collection[Tie]) -> list[Tie]:
    """The ties of which the package has both ends as constants of their own."""
    names = set(compiled.get_constant_fqns())
    return [tie for tie in ties if {tie.target, tie.source} <= names]
