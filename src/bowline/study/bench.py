"""Where experiments are run: each unit of work once for each configuration, and kept in a file."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from bowline import __version__
from bowline.errors import UsageError
from bowline.study.experiment_sizes import ExperimentSizes

__all__ = ["Bench", "code_digest", "write_whole"]

ROOMS = ("geometry", "recipes", "functional", "nn", "models", "train")
"""What experiments are made of: another version of it may have other numbers."""
SHARED = (
    "experiment_sizes.py",
    "study_text.py",
    "small_models.py",
    "row_search.py",
    "initial_loss.py",
    "trained_table.py",
)
WORDING = frozenset({"_plot", "_conclusion", "QUESTION"})
"""What is drawn and said about numbers had no part in how they came about."""


class Bench:
    """Runs units of work; what was run before with the same arguments and the same code is read from its file.

    A unit is a function at the top of a module, of keyword arguments that JSON has, which returns what JSON has (a NaN
    or an infinity becomes `None`). One that has a parameter `text` is given the place of the prepared text, which is no
    part of its configuration; the version of Python, whose library the text is from, is. A unit's file is whole or not
    there, so work that was stopped goes on after the last unit that was finished.

    Args:
        directory: of the study; units are in `units/`, prepared text in `text/`.
        setting: the sizes.
        tell: called with a line for each unit that is run.
    """

    def __init__(
        self, directory: Path, setting: ExperimentSizes, *, tell: Callable[[str], None] = lambda line: None
    ) -> None:
        self.directory = directory
        self.setting = setting
        self.seconds = 0.0
        """What the units took when they were run, those included that were kept."""
        self.ran = 0
        self.kept = 0
        self._tell = tell

    @property
    def text(self) -> Path:
        """Where tokenizers and packed text are."""
        return self.directory / "text"

    def unit(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """What `function(**arguments)` returns, from its file if it has one.

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
    """A unit's file, if it is there, whole, and what was asked for."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    asked = json.loads(json.dumps(asked))
    whole = isinstance(found, dict) and {"seconds", "result"} <= found.keys()
    return found if whole and all(found.get(key) == value for key, value in asked.items()) else None


def _plain(value: Any) -> Any:
    """As JSON will give it back, and as strict JSON has it."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _short(arguments: dict[str, Any]) -> str:
    shown = {key: value for key, value in arguments.items() if isinstance(value, str | int | float)}
    return " ".join(f"{key}={value}" for key, value in shown.items() if key != "setting")


def write_whole(path: Path, content: str) -> None:
    """Write a file so that it is the old one or the new one, whenever this stops.

    Raises:
        UsageError: it cannot be written.
    """
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with staged.open("w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path)
    except OSError as error:
        staged.unlink(missing_ok=True)
        raise UsageError(
            f"{path}: cannot be written: {error.strerror or error}", help="name a directory that can be written"
        ) from error


@cache
def code_digest(module: str) -> str:
    """Of what a unit in `module` is computed with: that module, the rooms below, and the versions of what they use.

    Comments, docstrings and formatting are not in it, and neither is what a question says of its numbers.
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
