"""Times a newcomer's way from the front page to a first verdict: `make first-verdict`.

It builds the wheel, makes a fresh environment, and runs the commands that the front page and `docs/start.md` show
first, as they stand there; only `pip install .` installs the wheel instead of the checkout. It fails if a command
fails, or if the verdict takes longer than a minute after the installation.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

__all__ = ["shown_commands"]

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "start.md")
LIMIT = 60.0
"""Seconds after the installation."""
PLACEHOLDER = """
from pathlib import Path
from bowline.demo import layouts
layouts.gpt2().write(Path("path/to/checkpoint"))
"""
"""Writes the checkpoint whose path the pages give as an example."""
FINDINGS = 1
"""The exit code of an audit that found something."""


def shown_commands(page: Path) -> list[str]:
    """The commands up to the first audit, from the first console block that installs Bowline on."""
    blocks = re.findall(r"^```console\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    lines = [line[2:].partition("  #")[0].strip() for line in "".join(blocks).splitlines() if line.startswith("$ ")]
    begin = lines.index("pip install .")
    end = next(at for at, line in enumerate(lines) if at > begin and line.startswith("bowline audit "))
    return lines[begin : end + 1]


def walk(page: Path, wheel: Path) -> float:
    """Run the page's commands in a new environment; returns the seconds after the installation."""
    after = 0.0
    with tempfile.TemporaryDirectory() as place:
        binaries = Path(place, "venv", "bin")
        venv.create(binaries.parent, with_pip=True)
        here = Path(place, "work")
        here.mkdir()
        environment = {**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "PIP_QUIET": "1"}
        for command in shown_commands(page):
            installs = command == "pip install ."
            words = ["pip", "install", str(wheel)] if installs else shlex.split(command)
            started = time.perf_counter()
            program = str(binaries / words[0])
            done = subprocess.run(
                [program, *words[1:]], cwd=here, env=environment, capture_output=True, text=True, check=False
            )
            seconds = time.perf_counter() - started
            if done.returncode not in ((0, FINDINGS) if " audit " in command else (0,)):
                sys.exit(f"{page.name}: {command} ended with {done.returncode}\n{done.stdout}{done.stderr}")
            verdict = f"  {done.stdout.splitlines()[0]}" if " audit " in command else ""
            print(f"{page.name}: {command}  {seconds:.1f} s{verdict}")
            if installs:
                subprocess.run([str(binaries / "python"), "-c", PLACEHOLDER], cwd=here, check=True)
            else:
                after += seconds
    return after


def main() -> None:
    """Walk both pages and print the seconds."""
    with tempfile.TemporaryDirectory() as place:
        build = "pip --quiet --disable-pip-version-check wheel --no-deps --wheel-dir"
        subprocess.run([sys.executable, "-m", *build.split(), place, str(ROOT)], check=True)
        (wheel,) = Path(place).glob("*.whl")
        for page in PAGES:
            after = walk(page, wheel)
            print(f"{page.name}: the first verdict of a checkpoint came {after:.1f} s after the installation")
            if after > LIMIT:
                sys.exit(f"expected at most {LIMIT:.0f} s")


if __name__ == "__main__":
    main()
