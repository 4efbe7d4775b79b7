"""Running experiments: each unit of work runs once per configuration, and its result is kept in a file."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import math
import platform
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from bowline import __version__
from bowline.checkpoint.durable.whole_file import write_whole
from bowline.study.experiment_sizes import ExperimentSizes

__all__ = ["Experiments", "code_digest"]

ROOMS = ("geometry", "recipes", "functional", "nn", "models", "train")
"""The packages that experiments use. A change in their code can change the numbers."""
SHARED = (
    "experiment_sizes.py",
    "study_text.py",
    "small_models.py",
    "row_search.py",
    "initial_loss.py",
    "trained_table.py",
)
WORDING = frozenset({"_plot", "_conclusion", "QUESTION"})
"""Names of the code that draws or words results. A change in it does not change the numbers."""


class Experiments:
    """Runs units of work, or reads their results from files if the same arguments and code were run before.

    A unit is a function at the top level of a module. Its keyword arguments and its result can be written as JSON (a
    NaN or an infinity becomes `None`). A unit with a parameter `text` gets the directory of the prepared text. That
    directory is not part of its configuration, but the version of Python is, because the text is Python's library. A
    unit's file is complete or absent, so an interrupted study continues after the last finished unit.

    Args:
        directory: the directory of the study, with units in `units/` and prepared text in `text/`.
        setting: the sizes.
        tell: called with a line for each unit that is run.
    """

    def __init__(
        self, directory: Path, setting: ExperimentSizes, *, tell: Callable[[str], None] = lambda line: None
    ) -> None:
        self.directory = directory
        self.setting = setting
        self.seconds = 0.0
        """The time that all units took when they were run, including those read from files."""
        self.ran = 0
        self.kept = 0
        self._tell = tell

    @property
    def text(self) -> Path:
        """The directory of tokenizers and packed text."""
        return self.directory / "text"

    def unit(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """Return the result of `function(**arguments)`, from its file if there is one.

        Raises:
            UsageError: the file cannot be written.
        """
        name = f"{function.__module__.rpartition('.')[2]}.{function.__name__.strip('_')}"
        asked: dict[str, Any] = {"unit": name, "arguments": arguments, "code": code_digest(function.__module__)}
        places: dict[str, Any] = {}
        if "text" in inspect.signature(function).parameters:
            asked["python"] = platform.python_version()
            places["text"] = self.text
        key = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
        path = self.directory / "units" / f"{name}-{key}.json"
        found = _read(path, asked)
        if found is None:
            self._tell(f"{name} {_short(arguments)}")
            start = time.perf_counter()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                result = _plain(function(**arguments, **places))
            found = {**asked, "seconds": round(time.perf_counter() - start, 3), "result": result}
            write_whole(path, json.dumps(found, indent=1))
            self.ran += 1
        else:
            self.kept += 1
        self.seconds += found["seconds"]
        return found["result"]


def _read(path: Path, asked: dict[str, Any]) -> dict[str, Any] | None:
    """Read a unit's file; `None` if it is missing, damaged or of another configuration."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    asked = json.loads(json.dumps(asked))
    whole = isinstance(found, dict) and {"seconds", "result"} <= found.keys()
    return found if whole and all(found.get(key) == value for key, value in asked.items()) else None


def _plain(value: Any) -> Any:
    """Return the value as strict JSON would give it back."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _short(arguments: dict[str, Any]) -> str:
    shown = {key: value for key, value in arguments.items() if isinstance(value, str | int | float)}
    return " ".join(f"{key}={value}" for key, value in shown.items() if key != "setting")


@cache
def code_digest(module: str) -> str:
    """Return a hash of the code that computes a unit in `module`: that module, `ROOMS`, `SHARED`, and versions.

    Comments, docstrings, formatting, and the code that words or draws a question's answer do not change the hash.
    """
    root = Path(__file__).parent.parent
    digest = hashlib.sha256(f"{__version__} {torch.__version__}".encode())
    for path in sorted(path for room in ROOMS for path in (root / room).rglob("*.py")):
        digest.update(_essence(path).encode())
    own = Path(inspect.getfile(sys.modules[module]))
    for path in sorted({own, *(root / "study" / name for name in SHARED)}):
        digest.update(_essence(path).encode())
    return digest.hexdigest()[:16]


@cache
def _essence(path: Path) -> str:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [part for part in tree.body if not _named(part) & WORDING]
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [part for part in body if not _is_text(part)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _named(part: ast.stmt) -> set[str]:
    if isinstance(part, ast.FunctionDef):
        return {part.name}
    if isinstance(part, ast.Assign):
        return {target.id for target in part.targets if isinstance(target, ast.Name)}
    return set()


def _is_text(part: ast.stmt) -> bool:
    return isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant) and isinstance(part.value.value, str)
