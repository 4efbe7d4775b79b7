"""Holds the audit's predictions for vLLM, llama.cpp or mlx-lm against real loads.

    python -m tools.loader_sweep LOADER PYTHON [--report FILE] [--record FILE] [CLASS ...]

LOADER is `vllm`, `vllm-0.28`, `llama.cpp` or `mlx-lm`, PYTHON the interpreter of the environment that holds it. Each
class whose head is the target of a tie is built tiny by transformers, saved in every state of `states.py`, audited, and
loaded by LOADER in a process of its own. A class that LOADER refuses in every state is not judged, and after three
states not tried further if that was predicted. The output ends with the counts and every disagreement; `--record` also
writes what was seen as JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from tools.loader_sweep.cases import CannotBuildError, Case, classes_with_head, write_cases
from tools.loader_sweep.states import STATES

RUNNERS = {"vllm": "run_vllm", "vllm-0.28": "run_vllm", "llama.cpp": "run_llama_cpp", "mlx-lm": "run_mlx"}
ROOT = Path(__file__).parents[2]
ENOUGH = 3
"""A class that is refused in so many states, as predicted, is not tried in the others."""
FATES = ("tied", "kept", "random", "dropped", "refused")


@dataclass(frozen=True)
class Load:
    """One load: what was predicted for the head, what happened, and the loader's words."""

    state: str
    predicted: str | None
    actual: str
    why: str

    @property
    def agrees(self) -> bool:
        """Whether the prediction is what happened."""
        return self.predicted == self.actual


@dataclass
class ClassLoads:
    """The loads of one class; `reason` says why it was not run or is not judged."""

    name: str
    loads: list[Load] = field(default_factory=list)
    reason: str | None = None

    @property
    def judged(self) -> bool:
        """Whether the loads say something about ties."""
        return self.reason is None


class Runner:
    """The loader in a process of its own, which is started again after a crash."""

    def __init__(self, loader: str, python: str) -> None:
        self._command = [str(Path(python).absolute()), "-m", f"tools.loader_sweep.{RUNNERS[loader]}"]
        self._process: subprocess.Popen[str] | None = None
        self.version = ""

    def load(self, case: Case) -> tuple[str, str]:
        """The fate of the head and the loader's words."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        request = {"directory": str(case.directory), "head": case.tie.target, "embedding": case.tie.source}
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self.close()
            return "refused", "the process of the loader died"
        said: dict[str, str] = json.loads(answer)
        return said["fate"], said["why"]

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _start(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            self._command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        self.version = json.loads(self._process.stdout.readline())["version"]
        return self._process


def run_class(name: str, loader: str, runner: Runner) -> ClassLoads:
    """Load one class in every state."""
    result = ClassLoads(name)
    with tempfile.TemporaryDirectory() as place:
        try:
            for case in write_cases(name, Path(place)):
                actual, why = runner.load(case)
                predicted = "refused" if case.others_refused.get(loader) else case.predicted.get(loader)
                result.loads.append(Load(case.state, predicted, actual, why))
                if len(result.loads) == ENOUGH and all(
                    one.predicted == one.actual == "refused" for one in result.loads
                ):
                    break
        except CannotBuildError as error:
            result.reason = str(error)
    if result.reason is None and all(load.actual == "refused" for load in result.loads):
        result.reason = f"refused in every state: {result.loads[0].why}"
    return result


def summary(results: list[ClassLoads], loader: str, version: str, seconds: float) -> str:
    """The counts, the disagreements and what was not judged, as Markdown."""
    judged = [result for result in results if result.judged]
    loads = [load for result in judged for load in result.loads]
    wrong = [(result.name, load) for result in judged for load in result.loads if not load.agrees]
    lines = [
        f"# Predicted and actual: {version}",
        "",
        f"{time.strftime('%Y-%m-%d')}. {len(judged)} classes, built tiny by transformers {transformers.__version__} "
        f"(torch {torch.__version__}), in up to {len(STATES)} states: {len(loads)} loads, {len(wrong)} disagree. "
        f"{seconds:.0f} s.",
        "",
        "| state | " + " | ".join(FATES) + " |",
        "|---|" + "---|" * len(FATES),
    ]
    for state in STATES:
        counts = Counter(load.actual for load in loads if load.state == state)
        lines.append(f"| {state} | " + " | ".join(str(counts[fate]) for fate in FATES) + " |")
    lines += ["", "## Disagreements", ""]
    lines += [
        f"- {name}, {load.state}: predicted {load.predicted}, actual {load.actual}"
        + (f" ({load.why})" if load.why else "")
        for name, load in wrong
    ] or ["None."]
    lines += ["", f"## Classes: {len(judged)}", "", ", ".join(result.name for result in judged)]
    lines += ["", f"## Not judged: {len(results) - len(judged)}", ""]
    lines += [f"- {result.name}: {result.reason}" for result in results if not result.judged]
    return "\n".join(lines)


def record(results: list[ClassLoads], version: str) -> Mapping[str, Any]:
    """What the loader did, by class and state."""
    return {
        "version": version,
        "built_by": f"transformers {transformers.__version__}",
        "fates": {
            result.name: {load.state: load.actual for load in result.loads} for result in results if result.judged
        },
    }


def main() -> int:
    """Run the sweep; 1 if a load disagrees."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loader", choices=RUNNERS)
    parser.add_argument("python", help="the interpreter of the loader's environment")
    parser.add_argument("classes", nargs="*", help="only these classes")
    parser.add_argument("--report", type=Path, help="write the results as Markdown")
    parser.add_argument("--record", type=Path, help="write what was seen as JSON")
    arguments = parser.parse_intermixed_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    runner, results, started = Runner(arguments.loader, arguments.python), [], time.monotonic()
    names = arguments.classes or classes_with_head()
    for at, name in enumerate(names, 1):
        result = run_class(name, arguments.loader, runner)
        results.append(result)
        wrong = [load for load in result.loads if not load.agrees]
        if result.judged:
            print(f"[{at}/{len(names)}] {name}: {len(wrong)} of {len(result.loads)} disagree", flush=True)
            for load in wrong:
                print(f"    {load.state}: predicted {load.predicted}, actual {load.actual} {load.why}", flush=True)
        else:
            print(f"[{at}/{len(names)}] {name}: {result.reason}", flush=True)
    runner.close()
    text = summary(results, arguments.loader, runner.version, time.monotonic() - started)
    if arguments.report:
        arguments.report.write_text(text + "\n")
    if arguments.record:
        arguments.record.write_text(json.dumps(record(results, runner.version), indent=1) + "\n")
    print(text)
    return 1 if any(not load.agrees for result in results if result.judged for load in result.loads) else 0


if __name__ == "__main__":
    sys.exit(main())
