"""`bowline doctor` says what is installed, without importing it; completion is there for shells."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bowline.cli import app

COMMAND = importlib.import_module("bowline.cli.doctor")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_installed_packages_are_named_with_their_versions() -> None:
    done = run("doctor")
    assert done.exit_code == 0
    for name in ("torch", "transformers"):
        (line,) = (line for line in done.output.splitlines() if line.split()[:1] == [name] and len(line.split()) > 2)
        assert line.split()[1] == importlib.metadata.version(name)
    assert "checked by running transformers 4.57.1" in done.output


def test_what_is_missing_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(COMMAND, "_installed", lambda package: None)
    done = run("doctor")
    assert done.exit_code == 0
    assert "pip install '.[torch]'" in done.output
    assert "none: bowline audit predicts what they do" in done.output


def test_a_package_that_is_too_old_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(COMMAND, "_installed", lambda package: "2.10.1+cu130" if package == "torch" else None)
    done = run("doctor")
    assert done.exit_code == 1
    assert "2.10.1+cu130" in done.output
    assert "too old, expected 2.11 or newer" in done.output


def test_nothing_heavy_is_imported() -> None:
    code = "import sys; from bowline.cli import app\ntry: app(['doctor'])\nexcept SystemExit: pass\n"
    code += "print({'torch', 'transformers', 'numpy', 'onnxruntime'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize(
    ("typed", "offered"), [("bowline au", "audit"), ("bowline doc", "doctor"), ("bowline train --par", "--parallel")]
)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_offered_commands_and_options(shell: str, typed: str, offered: str) -> None:
    """As the shell asks: by variables, which typer names after the program."""
    program = Path(sys.executable).with_name("bowline")
    asked = {"_BOWLINE_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": typed}
    asked |= {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1), "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    done = subprocess.run([program], env=os.environ | asked, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert offered in done.stdout
