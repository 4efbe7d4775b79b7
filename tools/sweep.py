"""Compares the audit's predictions with the behaviour of transformers, for every class that can be built.

    python -m tools.sweep [--report FILE] [CLASS ...]

Each class of the families' table that declares a tie in the version of transformers that runs this is built tiny and
saved in five states. Each state is audited and then loaded; for every target the predicted fate must be the actual
one. The output ends with the counts, every disagreement, and the classes that could not be run, with the reason.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from bowline.auditing.evidence import Evidence
from bowline.auditing.evidence_gathering import gather
from bowline.checkpoint import open_checkpoint
from bowline.families.resolver import FLAG
from bowline.families.transformers_table import Declared, load_table
from tools.tiny import build, load_class, tiny_config

__all__ = [
    "LARGEST",
    "LOADER",
    "STATES",
    "Case",
    "ClassResult",
    "arguments_of",
    "one_line",
    "run_class",
    "tied_classes",
]

LOADER = f"transformers-{transformers.__version__.split('.')[0]}"

LARGEST = 50_000_000

Json = dict[str, Any]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One state of one class: the predicted and the actual fate of each target."""

    state: str
    predicted: dict[str, str | None]
    actual: dict[str, str]

    @property
    def agrees(self) -> bool:
        return self.predicted == self.actual


@dataclass
class ClassResult:
    """The result of one class; `reason` says why it could not be run."""

    name: str
    cases: list[Case] = field(default_factory=list)
    reason: str | None = None


def tied_classes() -> list[str]:
    """The classes of the table that declare a tie in this version of transformers."""
    table = load_table()
    names = []
    for name in table:
        architecture = table.architecture(name)
        declared = architecture.declared.get(LOADER) if architecture else None
        if declared and declared.ties:
            names.append(name)
    return names


# --- the five states: each takes the saved tensors and config, and changes them in place -----------------------------


def as_saved(tensors: Tensors, config: Json, evidence: Evidence) -> None:
    """Leave the files as saved."""


def equal_copy(tensors: Tensors, config: Json, evidence: Evidence) -> None:
    """Store both ends with equal values, and set the flag to true."""
    for target, source in _pairs(evidence):
        one = tensors.get(source, tensors.get(target))
        if one is not None:
            tensors[source], tensors[target] = one.clone(), one.clone()
    _set_flags(config, evidence, True)


def diverged(tensors: Tensors, config: Json, evidence: Evidence) -> None:
    """Store both ends with different values, and set the flag to true."""
    for at, (target, source) in enumerate(_pairs(evidence)):
        one = tensors.get(source, tensors.get(target))
        if one is not None:
            tensors[source] = one.clone()
            tensors[target] = one + 0.25 + at
    _set_flags(config, evidence, True)


def head_missing(tensors: Tensors, config: Json, evidence: Evidence) -> None:
    """Store the source alone, and set the flag to false."""
    for target, source in _pairs(evidence):
        one = tensors.pop(target, None)
        if one is not None and source not in tensors:
            tensors[source] = one
    _set_flags(config, evidence, False)


def flag_flipped(tensors: Tensors, config: Json, evidence: Evidence) -> None:
    """Leave the tensors as saved, and negate the flag."""
    _set_flags(config, evidence, not evidence.declaration.flag.value)


STATES: dict[str, Callable[[Tensors, Json, Evidence], None]] = {
    "as saved": as_saved,
    "equal copy kept": equal_copy,
    "diverged": diverged,
    "head missing, flag false": head_missing,
    "flag flipped": flag_flipped,
}


def _pairs(evidence: Evidence) -> Iterator[tuple[str, str]]:
    for tie in evidence.ties:
        if LOADER in tie.declared.asked:
            yield tie.tie.target, tie.tie.source


def _set_flags(config: Json, evidence: Evidence, value: bool) -> None:
    asked = (path for tie in evidence.ties for path in tie.declared.paths if path.endswith(FLAG))
    for path in dict.fromkeys([FLAG, *asked]):
        *parents, key = path.split(".")
        level: Any = config
        for parent in parents:
            level = level.get(parent) if isinstance(level, dict) else None
        if isinstance(level, dict):
            level[key] = value


# --- running --------------------------------------------------------------------------------------------------------


def run_class(name: str, workspace: Path) -> ClassResult:
    """Build, save, change, audit and load one class in every state."""
    result = ClassResult(name)
    saved = workspace / "saved"
    try:
        cls = load_class(name)
        config = tiny_config(cls)
        if LOADER == "transformers-4":
            _restore_top_k(config)
        model = build(cls, config)
        size = sum(parameter.numel() for parameter in model.parameters())
        if size > LARGEST:
            result.reason = f"not tiny: {size:,} parameters however its config is shrunk"
            return result
        model.save_pretrained(saved)
        del model
    except Exception as error:  # any error of a model class is recorded as the reason
        result.reason = f"cannot be built and saved: {one_line(error)}"
        return result
    try:
        cls.from_pretrained(saved)
    except Exception as error:  # a class that cannot load its own save shows nothing about ties
        result.reason = f"transformers cannot load what it saved: {one_line(error)}"
        return result
    declared = _declared(name)
    for state, change in STATES.items():
        directory = workspace / "state"
        shutil.copytree(saved, directory)
        try:
            files = sorted(directory.glob("*.safetensors"))
            if len(files) != 1:
                result.reason = f"saved {len(files)} files of tensors"
                return result
            tensors, config = load_file(files[0]), json.loads((directory / "config.json").read_text())
            with open_checkpoint(directory) as checkpoint:
                change(tensors, config, gather(checkpoint))
            save_file({key: value.contiguous() for key, value in tensors.items()}, files[0], {"format": "pt"})
            (directory / "config.json").write_text(json.dumps(config))
            with open_checkpoint(directory) as checkpoint:
                evidence = gather(checkpoint)
            outcomes = evidence.outcomes[LOADER]
            ties = list(_pairs(evidence))
            actual = _load(cls, directory, ties, tensors, declared)
            predicted = {target: fate.fate.value if (fate := outcomes[target]) else None for target in actual}
            result.cases.append(Case(state, predicted, actual))
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    return result


def _restore_top_k(config: Any) -> None:
    """Restore `top_k`: in version 4 every config has this generation setting, and a save refuses a changed one."""
    config.top_k = 50
    for value in vars(config).values():
        if isinstance(value, transformers.PretrainedConfig):
            _restore_top_k(value)


def _declared(name: str) -> Declared:
    architecture = load_table().architecture(name)
    assert architecture is not None
    return architecture.declared[LOADER]


def _load(
    cls: type[Any], directory: Path, ties: list[tuple[str, str]], tensors: Tensors, declared: Declared
) -> dict[str, str]:
    """The fate of each target when the class loads the directory."""
    try:
        model = cls.from_pretrained(directory)
    except Exception:  # a refusal is an outcome
        return {target: "refused" for target, _ in ties}
    held = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    ends = {name: held.get(declared.module_names.get(name, name)) for tie in ties for name in tie}
    stored = [tensors[name] for name in ends if name in tensors]
    fates = {}
    for target, source in ties:
        target_held, source_held = ends[target], ends[source]
        if target_held is not None and source_held is not None:  # another version's name, or a module not built now
            fates[target] = _fate(target_held, source_held, tensors.get(target), stored)
    return fates


def _fate(target: torch.Tensor, source: torch.Tensor, stored: torch.Tensor | None, group: list[torch.Tensor]) -> str:
    if target.device.type == "meta":
        return "random"  # never filled: uninitialised memory
    if stored is not None and torch.equal(target, stored):
        return "tied" if target is source else "kept"
    if target is source and any(torch.equal(target, one) for one in group if one.shape == target.shape):
        return "tied" if stored is None else "dropped"
    return "random"


def one_line(error: Exception) -> str:
    """The class of an error and the start of its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def arguments_of(description: str | None, *switches: str) -> argparse.Namespace:
    """Parse a sweep's arguments; also silences the libraries and limits torch to one thread."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="*", help="only these classes")
    parser.add_argument("--report", type=Path, help="write the results as Markdown")
    for switch in switches:
        parser.add_argument(switch, action="store_true")
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    return parser.parse_args()


def main() -> int:
    arguments = arguments_of(__doc__)
    names = arguments.classes or tied_classes()
    results, started = [], time.monotonic()
    for at, name in enumerate(names, 1):
        with tempfile.TemporaryDirectory() as workspace:
            try:
                result = run_class(name, Path(workspace))
            except Exception as error:  # one class must not end the sweep
                result = ClassResult(name, reason=f"could not be run: {one_line(error)}")
        results.append(result)
        wrong = [case for case in result.cases if not case.agrees]
        word = result.reason or (f"{len(wrong)} of {len(result.cases)} states disagree" if wrong else "agrees")
        if wrong or result.reason or at % 50 == 0:
            print(f"[{at}/{len(names)}] {name}: {word}", flush=True)
        for case in wrong:
            print(f"    {case.state}: predicted {case.predicted}, actual {case.actual}", flush=True)
    text = summary(results, time.monotonic() - started)
    print(text)
    if arguments.report:
        arguments.report.write_text(text + "\n")
    return 1 if any(not case.agrees for result in results for case in result.cases) else 0


def summary(results: list[ClassResult], seconds: float) -> str:
    """The counts, the disagreements and what was not run, as Markdown."""
    run = [result for result in results if result.reason is None]
    cases = [case for result in run for case in result.cases]
    version = load_table().versions[LOADER]
    lines = [
        f"# Predicted and actual: transformers {transformers.__version__} (table: {version})",
        "",
        f"{len(run)} classes in {len(STATES)} states, {len(cases)} loads, "
        f"{sum(len(case.actual) for case in cases)} ties; "
        f"{sum(not case.agrees for case in cases)} loads disagree. {seconds:.0f} s, torch {torch.__version__}.",
        "",
        "| state | " + " | ".join(("tied", "kept", "random", "dropped", "refused")) + " |",
        "|---|---|---|---|---|---|",
    ]
    for state in STATES:
        counts = Counter(fate for case in cases if case.state == state for fate in case.actual.values())
        lines.append(
            f"| {state} | "
            + " | ".join(str(counts[f]) for f in ("tied", "kept", "random", "dropped", "refused"))
            + " |"
        )
    lines += ["", f"## Not run: {len(results) - len(run)}", ""]
    lines += [f"- {result.name}: {result.reason}" for result in results if result.reason]
    lines += ["", "## Disagreements", ""]
    wrong = [(result.name, case) for result in run for case in result.cases if not case.agrees]
    lines += [f"- {name}, {case.state}: predicted {case.predicted}, actual {case.actual}" for name, case in wrong]
    return "\n".join(lines) if wrong else "\n".join([*lines, "None."])


if __name__ == "__main__":
    sys.exit(main())
