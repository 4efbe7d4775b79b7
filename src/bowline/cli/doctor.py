"""`bowline doctor`"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator

import typer

from bowline import __version__
from bowline.errors import DISTRIBUTION, how_to_install

__all__ = ["doctor"]

USES = {
    "torch": ("torch", "live ties, training, exports"),
    "safetensors": ("torch", "loading and saving live models"),
    "tokenizers": ("edit", "prune, resize --add-tokens, train, generate"),
    "matplotlib": ("plot", "plots"),
    "onnx": ("onnx", "export --to onnx"),
    "onnxruntime": ("onnx", "export --to onnx, which runs it"),
    "onnxscript": ("onnx", "export --to onnx"),
    "transformers": (None, "exports and guards of its models"),
    "peft": (None, "merge_lora of its models"),
    "accelerate": (None, "ties of the models that it prepares"),
    "torchao": (None, "int8 tables in transformers"),
}
"""By package: the extra that brings it, and what it is for."""
LOADERS = {
    "transformers": ("package", "transformers"),
    "vLLM": ("package", "vllm"),
    "mlx-lm": ("package", "mlx_lm"),
    "llama.cpp": ("program", "llama-cli"),
    "onnxruntime": ("package", "onnxruntime"),
}
"""By loader: how its presence is seen."""


def doctor() -> None:
    """Show what is installed, what it is for, and which loaders could be run here.

    Nothing is imported and nothing is run. The exit code is 1 if a package is older than Bowline needs.
    """
    import platform

    from bowline.auditing.loaders import loaders_run

    oldest = _oldest()
    typer.echo(f"bowline {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    typer.echo(f"predictions were checked by running {', '.join(dict.fromkeys(loaders_run().values()))}")
    typer.echo("\npackages")
    old = False
    for name, (extra, use) in USES.items():
        found = _installed(name)
        least = oldest.get(name)
        if found is None:
            missing = f"; {how_to_install(extra)}" if extra is not None else ""
            typer.echo(f"  {name:<14}{'-':<16}{use}{missing}")
        elif least is not None and _numbers(found) < _numbers(least):
            old = True
            typer.echo(f"  {name:<14}{found:<16}{use}; too old, expected {least} or newer")
        else:
            typer.echo(f"  {name:<14}{found:<16}{use}")
    typer.echo("\nloaders that could be run here")
    there = list(_loaders())
    for line in there or ["  none: bowline audit predicts what they do, and needs none of them"]:
        typer.echo(line)
    raise typer.Exit(1 if old else 0)


def _loaders() -> Iterator[str]:
    for name, (kind, found) in LOADERS.items():
        seen = _installed(found) if kind == "package" else shutil.which(found)
        if seen is not None:
            yield f"  {name:<14}{seen}"


def _installed(package: str) -> str | None:
    """The version of a package for this Python, by its metadata alone."""
    from importlib.metadata import PackageNotFoundError, version  # slow, and every command imports this file

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _oldest() -> dict[str, str]:
    """The oldest version that Bowline needs of each package, by its own metadata."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:  # it runs from a source tree
        return {}
    found = (re.match(r"([A-Za-z0-9_.-]+)\s*>=\s*([0-9.]+)", line) for line in lines)
    return {match[1].lower(): match[2] for match in found if match}


def _numbers(text: str) -> tuple[int, ...]:
    """The numbers of a version, in order.

    Example:
        >>> _numbers("2.13.0+cpu"), _numbers("2.11")
        ((2, 13, 0), (2, 11))
    """
    return tuple(int(number) for number in re.match(r"[0-9.]*", text)[0].split(".") if number)  # type: ignore[index]
