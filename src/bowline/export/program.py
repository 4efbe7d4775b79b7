"""torch.export's programs (`.pt2`): the tie's names are recorded in the file, and the loaded module is tied again."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from zipfile import BadZipFile

import torch
from torch import nn

from bowline.errors import CheckpointError, UsageError
from bowline.export.plain_call import Inputs, names_of, plain_view, values_of
from bowline.nn.ties.shared_parameters import find_ties
from bowline.nn.tree.slots import slots

__all__ = ["first_line", "load_program", "make_program", "quietly", "write_program"]

RECORD = "bowline_ties.json"
"""The name in the archive: `{target: source}` for each tie of the exported model."""


def load_program(path: str | os.PathLike[str]) -> nn.Module:
    """Load a program that `bowline.export` wrote, as a module whose ties are one `Parameter` again.

    torch's own `torch.export.load(path).module()` can give two parameters on one memory: an alias, of which an
    optimizer or `.to` makes two tensors. The module takes its inputs by the names that it was exported with.

    Raises:
        CheckpointError: no program, or one without the record of its ties.
    """
    held = {RECORD: ""}
    try:
        with quietly():
            program = torch.export.load(os.fspath(path), extra_files=held)
    except (OSError, RuntimeError, ValueError, AssertionError, BadZipFile) as error:
        raise CheckpointError(
            f"{os.fspath(path)}: is not a program of torch.export: {first_line(error)}",
            help="export the model again with `bowline export --to pt2`",
        ) from error
    try:
        ties = json.loads(held[RECORD])
    except ValueError:
        raise CheckpointError(
            f"{os.fspath(path)}: has no record of its ties ({RECORD})",
            help="export the model again with `bowline export --to pt2`, or load it with torch.export.load",
        ) from None
    module: nn.Module = program.module()
    known = slots(module)
    for target, source in ties.items():
        owner, _, name = target.rpartition(".")
        if source in known and target in known:
            setattr(module.get_submodule(owner), name, known[source].tensor)
    return module


def make_program(model: nn.Module, inputs: Inputs) -> Any:
    """Export the model with free sizes: both axes of integer inputs (B, T), the first axis of others where it can be.

    Raises:
        UsageError: torch.export cannot export the model, or fixes a size.
    """
    sizes = {name: _axes(one) for name, one in zip(names_of(inputs), values_of(inputs), strict=True)}
    given: dict[str, Any] = {"args": (), "kwargs": inputs} if isinstance(inputs, dict) else {"args": inputs}
    view = plain_view(model, inputs)
    failure: Exception | None = None
    for strict in (False, True):  # what one of the two ways of tracing fixes, the other may leave free
        try:
            with quietly():
                return torch.export.export(view, **given, dynamic_shapes=sizes, strict=strict)
        except Exception as error:
            failure = failure or error
    fixed = "fixes a size of the inputs" if "Dim.STATIC" in str(failure) else "fails"
    raise UsageError(
        f"{type(model).__name__}: torch.export {fixed}: {first_line(failure)}",
        help="export it with to='torchscript', which leaves the sizes free",
    ) from failure


def _axes(tensor: torch.Tensor) -> dict[int, Any]:
    if tensor.ndim == 2 and not tensor.is_floating_point():
        return {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    return {0: torch.export.Dim.AUTO} if tensor.ndim else {}


def write_program(model: nn.Module, inputs: Inputs, file: Path) -> None:
    """Export the model and save the program with the names of its ties, without traces of where its code lies."""
    program = make_program(model, inputs)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    ties = {tie.target: tie.source for tie in find_ties(model).ties}
    with file.open("wb") as opened:
        sink = _Sink(opened)
        with quietly():
            torch.export.save(program, sink, extra_files={RECORD: json.dumps(ties)})  # type: ignore[arg-type]
        sink.check()


class _Sink:
    """A file for torch's writer, which ends the process if a write fails: the error is kept, and raised after it."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write the bytes, unless a write has failed before."""
        if self.error is None:
            try:
                self.file.write(data)
            except OSError as error:
                self.error = error
        return len(data)

    def check(self) -> None:
        """Raise the first error, if there was one."""
        if self.error is not None:
            raise self.error
        self.file.flush()


@contextmanager
def quietly() -> Iterator[None]:
    """Without torch's warnings and log lines: the exporters tell of their own fallbacks."""
    loggers = {logging.getLogger(name) for name in ("torch", "onnxscript", "onnx_ir")}
    before = {logger: logger.level for logger in loggers}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger in loggers:
                logger.setLevel(before[logger])


def first_line(error: Exception | None) -> str:
    """The first line of an error's text, at most 200 characters.

    Example:
        >>> first_line(ValueError("one\\ntwo")), first_line(KeyError())
        ('one', 'KeyError')
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{lines[0]:.200}" if lines else type(error).__name__
