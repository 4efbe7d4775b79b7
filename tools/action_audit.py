"""The step of `action.yml` that audits: writes a SARIF file, lists its findings, and sets the outputs of the step.

Its options are environment variables, which `action.yml` sets: PATHS, HEADERS_ONLY, IGNORE, FAIL_ON, SARIF_FILE and
CHANGED_SINCE, a commit. It fails itself only if the audit could not run; whether findings fail the job is the output
`failed`, since the file is uploaded before.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bowline.auditing.report import FORMATS, Run
from bowline.cli.changed_files import checkpoints_of
from bowline.wording import printable

__all__ = ["main"]

FAIL_ON = {"error": ("error",), "warning": ("error", "warning"), "never": ()}
"""By the input: the levels of SARIF that fail the job."""


def main(environment: Mapping[str, str]) -> int:
    """Run the step with these variables; returns its exit code."""
    fail_on, sarif_file = environment["FAIL_ON"], environment["SARIF_FILE"]
    if fail_on not in FAIL_ON:
        return _refused(f"fail-on is {fail_on!r}, expected {', '.join(FAIL_ON)}")
    if environment["HEADERS_ONLY"] not in ("true", "false"):
        return _refused(f"headers-only is {environment['HEADERS_ONLY']!r}, expected true or false")
    if not sarif_file.isprintable() or not sarif_file:
        return _refused(f"sarif-file is {sarif_file!r}, expected the name of a file")
    try:
        places = _places(environment)
    except subprocess.CalledProcessError as error:
        return _refused(f"{' '.join(error.cmd)}: {error.stderr.decode(errors='replace').strip()}")
    text = _audit(places, environment) if places else FORMATS["sarif"](Run(reports=()))
    if text is None:
        return 2
    Path(sarif_file).write_text(text, encoding="utf-8")
    (run,) = json.loads(text)["runs"]
    levels = Counter(result["level"] for result in run["results"])
    unread = len(run["invocations"][0]["toolExecutionNotifications"])
    failed = any(levels[level] for level in FAIL_ON[fail_on]) or (unread > 0 and fail_on != "never")
    _log(_lines(run, len(places)))
    outputs = {
        "sarif-file": sarif_file,
        "errors": levels["error"],
        "warnings": levels["warning"],
        "unread": unread,
        "failed": str(failed).lower(),
    }
    with Path(environment["GITHUB_OUTPUT"]).open("a", encoding="utf-8") as file:
        file.writelines(f"{name}={value}\n" for name, value in outputs.items())
    return 0


def _places(environment: Mapping[str, str]) -> list[str]:
    """The given paths, the checkpoints that changed since a commit, or everything in the current directory."""
    given = [line.strip() for line in environment["PATHS"].splitlines() if line.strip()]
    since = environment["CHANGED_SINCE"]
    if given or not since:
        return given or ["."]
    if subprocess.run(["git", "cat-file", "-e", f"{since}^{{commit}}"], capture_output=True, check=False).returncode:
        _git("fetch", "--quiet", "--no-tags", "--depth=1", "origin", since)  # a checkout has no other commit by default
    names = _git("diff", "--name-only", "--no-renames", "-z", since, "HEAD").split(b"\0")
    return checkpoints_of(os.fsdecode(name) for name in names if name)


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], capture_output=True, check=True).stdout


def _audit(places: list[str], environment: Mapping[str, str]) -> str | None:
    """The SARIF of `bowline audit`; `None` if it did not run."""
    command = [sys.executable, "-m", "bowline", "audit", "--output-format", "sarif", "--recursive"]
    if environment["HEADERS_ONLY"] == "true":
        command.append("--headers-only")
    if environment["IGNORE"].strip():
        command.append(f"--ignore={environment['IGNORE']}")
    done = subprocess.run([*command, "--", *places], capture_output=True, text=True, check=False, encoding="utf-8")
    _log(done.stderr.splitlines())
    return done.stdout if done.stdout.strip() else None


def _lines(run: Mapping[str, Any], places: int) -> Iterator[str]:
    for result in run["results"]:
        where = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
        yield f"{result['level']} {result['ruleId']} {where}: {result['message']['text']}"
    for notification in run["invocations"][0]["toolExecutionNotifications"]:
        yield f"not audited: {notification['message']['text']}"
    if not places:
        yield "No file of a checkpoint changed."


def _refused(message: str) -> int:
    _log([f"error: {message}"])
    return 2


def _log(lines: Iterator[str] | list[str]) -> None:
    """Print the lines. Names from a checkpoint are in them, so nothing in them is a command to the runner."""
    token = secrets.token_hex(16)
    print(f"::stop-commands::{token}", flush=True)
    for line in lines:
        print(printable(line))
    print(f"::{token}::", flush=True)


if __name__ == "__main__":
    sys.exit(main(os.environ))
