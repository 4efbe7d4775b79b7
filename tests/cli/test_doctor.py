"""`bowline doctor` says what is installed, without importing it; completion is there for shells."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
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


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_its_completion(shell: str) -> None:
    done = run("--show-completion", shell)
    assert done.exit_code == 0
    assert "_BOWLINE_COMPLETE" in done.output
