"""Exports of live models: load, write into a stage, run the file beside the model, publish."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bowline.checkpoint.durable.file_publication import publishing_files
from bowline.checkpoint.formats.strict_json import loads
from bowline.edit.dequantised_table import is_own_table
from bowline.errors import CheckpointError, ConfigError, FormatError, UsageError
from bowline.export.compiled_program import doubled, load_compiled, write_compiled
from bowline.export.export_report import ExportReport
from bowline.export.plain_call import (
    Example,
    Inputs,
    evaluating,
    example_inputs,
    names_of,
    plain_view,
    resized,
    values_of,
)
from bowline.export.program import first_line, load_program, write_program
from bowline.export.torchscript import head_ties, load_torchscript, pointers, with_cloned_heads, write_torchscript
from bowline.models import load
from bowline.nn.ties.shared_parameters import find_ties
from bowline.nn.tree.table_slots import table_slots
from bowline.tie import Tie
from bowline.wording import byte_count, joined

__all__ = ["export_live"]

TOLERANCE = 1e-4
"""Of the largest output, or absolute where that is below 1: float32's rounding grows with the outputs.

SmolLM2-135M's logits reach 36. torch's float32 logits are off by up to 7.4e-05 from float64, onnxruntime's by up to
7.9e-05, and the two differ by up to 1.1e-04.
"""
HALF = 2e-2
"""The same for models in float16 or bfloat16."""
LARGE = 1_000_000_000
"""Bytes of weights above which ONNX keeps them in a file of their own."""


def export_live(
    model: nn.Module | str | os.PathLike[str],
    place: Path,
    *,
    to: str,
    head: str,
    opset: int | None,
    external_data: bool | None,
    aot_inductor: bool,
    example: Example | None,
    verify: bool,
) -> ExportReport:
    """Export as `bowline.export` describes it."""
    _check_options(to, head, opset, external_data, aot_inductor)
    if to == "onnx":
        from bowline.export.onnx_model import check_packages

        check_packages(verify=verify)
    loaded = model if isinstance(model, nn.Module) else _loaded(model)
    _check_model(loaded)
    inputs = example_inputs(loaded, example)
    one_copy = _one_copy(loaded)
    with evaluating(loaded):
        _check_runs(loaded, inputs)
    with evaluating(loaded), publishing_files(place) as stage:
        exported = with_cloned_heads(loaded) if head == "cloned" else loaded
        optimised = _one_copy(exported) if to == "onnx" and verify else 0  # onnxruntime's own copy, for the count
        _check_room(place, _one_copy(exported) + optimised)
        file = stage / place.name
        if external_data is None:
            external_data = one_copy > LARGE
        run, outcome, copies, notes = _write(
            exported, loaded, inputs, file, to, opset, external_data, aot_inductor, verify
        )
        difference, sizes = _verified(loaded, inputs, run, file, place) if verify else (None, ())
        written = sorted(stage.iterdir(), key=lambda path: (path.name != place.name, path.name))
        nbytes = sum(path.stat().st_size for path in written)
        names = tuple(place.with_name(path.name) for path in written)
    return ExportReport(
        destination=place,
        to=to,
        files=names,
        ties=find_ties(loaded).ties,
        outcome=outcome,
        copies=copies,
        nbytes=nbytes,
        one_copy_nbytes=one_copy,
        inputs=names_of(inputs),
        sizes=sizes,
        largest_difference=difference,
        notes=notes,
    )


Run = Callable[[Inputs], tuple[torch.Tensor, ...]]


def _write(
    exported: nn.Module,
    original: nn.Module,
    inputs: Inputs,
    file: Path,
    to: str,
    opset: int | None,
    external_data: bool,
    aot_inductor: bool,
    verify: bool,
) -> tuple[Run, str, int, tuple[str, ...]]:
    """Write the file; returns how to run it, what became of the tie, the added copies and notes."""
    ties = head_ties(original)
    try:
        if to == "torchscript":
            write_torchscript(exported, inputs, file)
            module = load_torchscript(file)
            outcome, copies = _outcome(ties, pointers(module), cloned=exported is not original)
            note = () if exported is original else (CLONED,)
            return lambda given: _tensors(module(*values_of(given))), outcome, copies, note
        if to == "pt2" and aot_inductor:
            write_compiled(exported, inputs, file)
            compiled = load_compiled(file)
            apart = doubled(compiled, ties)
            outcome = _in_one(ties, apart, "one constant in the package")
            return lambda given: _tensors(_call(compiled, given)), outcome, len(apart), (COMPILED,)
        if to == "pt2":
            write_program(exported, inputs, file)
            module = load_program(file)
            outcome, copies = _outcome(ties, pointers(module), cloned=False)
            return lambda given: _tensors(_call(module, given)), outcome, copies, (LOADING,) if ties else ()
        from bowline.export.onnx_model import OnnxRun, write_onnx

        write_onnx(exported, inputs, file, opset=opset, external_data=external_data)
        session = OnnxRun(file, exported, ties=ties, run=verify)
        return session.run, session.outcome, session.copies, ()
    except OSError as error:
        place = file.parent.parent / file.name
        raise CheckpointError(
            f"{place}: cannot be written: {error.strerror or error}",
            help="free space, or choose a place that may be written to; nothing was left there",
        ) from error
    except RuntimeError as error:
        raise UsageError(
            f"{type(original).__name__}: cannot be exported to {to}: {first_line(error)}",
            help="export it to another format, or give example= with inputs that the model takes",
        ) from error


CLONED = (
    "the clone is a snapshot: training the loaded module changes the head and the embedding apart; head='shared' keeps "
    "one matrix"
)
LOADING = (
    "load it with bowline.export.program.load_program, which makes the ends one parameter; torch.export.load alone may "
    "give two on one memory"
)


COMPILED = (
    "it is code for this machine's kind of processor and this torch; load it with torch._inductor.aoti_load_package"
)


def _in_one(ties: tuple[Tie, ...], apart: list[Tie], where: str) -> str:
    if not ties:
        return "the model has no tied head"
    if apart:
        return f"{joined([str(tie) for tie in apart])}: two matrices: the file holds the matrix twice"
    return f"{joined([str(tie) for tie in ties])}: {where}"


def _outcome(ties: tuple[Tie, ...], places: dict[str, int], *, cloned: bool) -> tuple[str, int]:
    """What became of the ties by the addresses of the loaded tensors, and how many have two matrices now."""
    apart = [tie for tie in ties if len({places[end] for end in (tie.target, tie.source) if end in places}) != 1]
    if not ties:
        return "the model has no tied head", 0
    if not apart:
        return f"{joined([str(tie) for tie in ties])}: one matrix in the file, shared when loaded", 0
    why = "cloned, as asked" if cloned else "two matrices"
    return f"{joined([str(tie) for tie in apart])}: {why}: the file holds the matrix twice", len(apart)


def _verified(
    model: nn.Module, inputs: Inputs, run: Run, file: Path, place: Path
) -> tuple[float, tuple[tuple[int, ...], ...]]:
    """Run both on inputs of one or two sizes; returns the largest difference, and the shapes of the first input.

    Raises:
        CheckpointError: the outputs differ, or the export does not run.
    """
    view = plain_view(model, inputs)
    largest, sizes = 0.0, []
    for given in (inputs, resized(inputs)):
        if given is None:
            continue
        expected = _tensors(_call(view, given))
        try:
            got = run(given)
        except Exception as error:
            shape = tuple(values_of(given)[0].shape)
            raise CheckpointError(
                f"{place}: the export does not run on inputs of {shape}: {first_line(error)}",
                help="--no-verify (verify=False) writes it all the same",
            ) from error
        if len(got) != len(expected):
            raise CheckpointError(
                f"{place}: it has {len(got)} outputs, and the model {len(expected)}", help="nothing was written"
            )
        sizes.append(tuple(values_of(given)[0].shape))
        for one, other in zip(expected, got, strict=True):
            difference, allowed = _difference(one, other)
            if not difference <= allowed:
                raise CheckpointError(
                    f"{place}: its outputs differ from the model's by {difference:.3g}, expected at most {allowed:.3g}",
                    help="nothing was written; --no-verify (verify=False) writes it all the same",
                )
            largest = max(largest, difference)
    return largest, tuple(sizes)


def _difference(one: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """The largest difference of two outputs, and the largest that is allowed."""
    if one.shape != other.shape:
        return float("inf"), 0.0
    share = HALF if one.dtype in (torch.float16, torch.bfloat16) else TOLERANCE
    first, second = one.double(), other.double()
    if not one.numel():
        return 0.0, share
    apart = torch.where(first == second, 0.0, (first - second).abs())  # equal infinities do not differ
    finite = first[first.isfinite()]
    size = float(finite.abs().max()) if finite.numel() else 1.0
    return float(apart.max()), share * max(1.0, size)


def _call(module: Any, given: Inputs) -> Any:
    return module(**given) if isinstance(given, dict) else module(*given)


def _tensors(given: Any) -> tuple[torch.Tensor, ...]:
    return (given,) if isinstance(given, torch.Tensor) else tuple(given)


def _one_copy(model: nn.Module) -> int:
    """Bytes of the parameters and buffers, each storage once."""
    held = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in model.state_dict().values()}
    return sum(held.values())


def _check_room(place: Path, nbytes: int) -> None:
    free = shutil.disk_usage(place.parent).free
    if free < nbytes:
        raise CheckpointError(
            f"{place}: needs {byte_count(nbytes)}, and the disk has {byte_count(free)} free", help="free space"
        )


def _check_model(model: nn.Module) -> None:
    if table_slots(model):
        raise UsageError(
            f"{type(model).__name__}: its table is quantised, expected floating point",
            help="export the model before quantize_tied, or call bowline.untie_weights first",
        )
    devices = sorted(
        {one.device.type for one in model.state_dict().values() if isinstance(one, torch.Tensor)} - {"cpu"}
    )
    if devices:
        raise UsageError(
            f"{type(model).__name__}: has tensors on {joined(devices)}, expected all on the CPU",
            help="call model.cpu() first, or load the values of a model on meta",
        )


def _check_runs(model: nn.Module, inputs: Inputs) -> None:
    """Check that the model takes the inputs and gives tensors."""
    try:
        given = _tensors(_call(plain_view(model, inputs), inputs))
    except Exception as error:  # the model's own
        raise UsageError(
            f"example: {type(model).__name__} does not run on {joined(names_of(inputs))}: {first_line(error)}",
            help="give example= with inputs that the model takes, or install what it needs",
            argument="example",
        ) from error
    if not given:
        raise UsageError(f"{type(model).__name__}: its output has no tensor", help="wrap it in a module that gives one")


def _check_options(to: str, head: str, opset: int | None, external_data: bool | None, aot_inductor: bool) -> None:
    if head not in ("shared", "cloned"):
        raise UsageError(f"head={head!r:.60}: expected 'shared' or 'cloned'", argument="head")
    if head == "cloned" and to != "torchscript":
        raise UsageError(f"head={head}: to={to!r} keeps the head shared", help="leave it out", argument="head")
    if aot_inductor and to != "pt2":
        raise UsageError(
            f"aot_inductor=True: has no meaning for to={to!r}", help="leave it out", argument="aot_inductor"
        )
    for name, value in (("opset", opset), ("external_data", external_data)):
        if value is not None and to != "onnx":
            raise UsageError(f"{name}={value}: has no meaning for to={to!r}", help="leave it out", argument=name)


def _loaded(path: Any) -> nn.Module:
    """The model of a checkpoint's directory: a family of Bowline, or else transformers' causal language model."""
    _check_floats(Path(path))
    try:
        model: nn.Module = load(path)
    except ConfigError as unknown:
        if not (Path(path) / "config.json").is_file():
            raise
        return _from_transformers(Path(path), unknown)
    return model


def _check_floats(path: Path) -> None:
    """Raise `UsageError` if the checkpoint has the table of `bowline quantize`, which no exporter traces."""
    config = path / "config.json"
    if config.is_file():
        try:
            content = loads(config.read_bytes(), str(config), allow_nonfinite=True)
        except FormatError:  # the loader says what is wrong
            return
        if is_own_table(content):
            raise UsageError(
                f"{path}: its table is quantised (by `bowline quantize`), expected floats",
                help="write it in floats with `bowline export DIR FLOATS --to hf`, and export FLOATS",
            )


def _from_transformers(path: Path, unknown: ConfigError) -> nn.Module:
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ModuleNotFoundError:
        raise UsageError(
            f"{path}: {unknown.message}; and transformers, which may have it, is not installed",
            help="pip install transformers",
        ) from None
    bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers has no class of its own for them
        raise UsageError(
            f"{path}: neither Bowline nor transformers' AutoModelForCausalLM loads it: {first_line(error)}",
            help="load the model yourself and pass it to bowline.export with example=",
        ) from error
    finally:
        if bar:
            logging.enable_progress_bar()
    return model
