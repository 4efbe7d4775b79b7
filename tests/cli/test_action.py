"""The GitHub Action: its steps, run as a runner would, write a valid SARIF file and fail on what `fail-on` says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.auditing.test_render import SARIF
from tests.checkpoints import GPT2, HEAD, OWN, WTE, table, tied_gpt2, write

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"]}


def diverged(directory: Path, **config: object) -> Path:
    return write(directory, {WTE: table(), HEAD: OWN}, {**GPT2, **config})


@dataclass(frozen=True)
class Done:
    """What a job saw: whether it failed, the outputs of the action, the SARIF that would be uploaded, and the log."""

    failed: bool
    outputs: dict[str, str]
    uploaded: Any
    log: str


def git(repository: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=repository, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def run_action(workspace: Path, runner: Path, base: str = "", installed_from: str = "", **inputs: str) -> Done:
    """Every step, with the values that GitHub puts for the expressions; the installation only if it has a tree."""
    if not installed_from:
        python = runner / "bowline" / "bin" / "python"  # stands for the environment of the installation
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
    output = runner / "output"
    output.touch()
    given = {name.replace("_", "-"): value for name, value in inputs.items()}
    assert set(given) <= set(ACTION["inputs"])
    values = {f"inputs.{name}": given.get(name, stated["default"]) for name, stated in ACTION["inputs"].items()}
    values["github.event.pull_request.base.sha"] = base
    uploaded, log, failed = None, "", False
    for step in (step for name, step in STEPS.items() if installed_from or name != "Install Bowline"):
        outputs = dict(line.split("=", 1) for line in output.read_text().splitlines())
        values |= {f"steps.audit.outputs.{name}": value for name, value in outputs.items()}
        if "if" in step:
            left, right = step["if"].split(" == ")
            if values[left] != right.strip("'"):
                continue
        if "uses" in step:
            uploaded = json.loads((workspace / replaced(step["with"]["sarif_file"], values)).read_text())
            continue
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=workspace,
            env={
                **os.environ,
                **{name: replaced(value, values) for name, value in step.get("env", {}).items()},
                "GITHUB_ACTION_PATH": installed_from or str(ROOT),
                "GITHUB_OUTPUT": str(output),
                "RUNNER_TEMP": str(runner),
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=480,
        )
        log += done.stdout + done.stderr
        if done.returncode:
            failed = True
            break
    outputs = dict(line.split("=", 1) for line in output.read_text().splitlines())
    return Done(failed=failed, outputs=outputs, uploaded=uploaded, log=log)


def replaced(text: str, values: dict[str, str]) -> str:
    return re.sub(r"\$\{\{ (\S+) \}\}", lambda match: values[match[1]], text)


def results(done: Done) -> list[tuple[str, str]]:
    SARIF.validate(done.uploaded)
    (run,) = done.uploaded["runs"]
    return [
        (result["ruleId"], result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"])
        for result in run["results"]
    ]


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A repository of two checkpoints, one of them broken, and code."""
    path = tmp_path / "workspace"
    tied_gpt2(path / "models" / "good one")
    diverged(path / "models" / "bad")
    (path / "code.py").write_text("")
    git(path, "init", "-q")
    git(path, "add", "-A")
    git(path, "commit", "-q", "-m", "a")
    return path


@pytest.fixture
def runner(tmp_path: Path) -> Path:
    return tmp_path / "runner"


def commit(repository: Path) -> str:
    """Commit everything; returns the commit before."""
    git(repository, "add", "-A")
    before = git(repository, "rev-parse", "HEAD")
    git(repository, "commit", "-q", "-m", "b")
    return before


# --- which checkpoints ----------------------------------------------------------------------------------------------


def test_without_a_pull_request_every_checkpoint_is_audited(workspace: Path, runner: Path) -> None:
    done = run_action(workspace, runner)
    assert results(done) == [("BW101", "models/bad/config.json")]
    assert done.outputs == {
        "sarif-file": "bowline.sarif",
        "errors": "1",
        "warnings": "0",
        "unread": "0",
        "failed": "true",
    }
    assert done.failed
    assert "error BW101 models/bad/config.json: " in done.log


def test_a_pull_request_that_touches_a_good_checkpoint_passes(workspace: Path, runner: Path) -> None:
    (workspace / "models" / "good one" / "generation_config.json").write_text("{}")
    done = run_action(workspace, runner, base=commit(workspace))
    assert results(done) == []
    assert not done.failed


def test_a_pull_request_that_breaks_a_checkpoint_fails(workspace: Path, runner: Path) -> None:
    diverged(workspace / "models" / "good one")
    done = run_action(workspace, runner, base=commit(workspace))
    assert results(done) == [("BW101", "models/good%20one/config.json")]
    assert done.failed


def test_a_pull_request_of_code_uploads_an_empty_report(workspace: Path, runner: Path) -> None:
    (workspace / "code.py").write_text("1")
    done = run_action(workspace, runner, base=commit(workspace))
    assert results(done) == []
    assert not done.failed
    assert "No file of a checkpoint changed." in done.log


def test_a_pull_request_that_deletes_a_checkpoint_passes(workspace: Path, runner: Path) -> None:
    git(workspace, "rm", "-q", "-r", "models/bad")
    done = run_action(workspace, runner, base=commit(workspace))
    assert results(done) == []
    assert not done.failed


def test_the_base_of_a_shallow_checkout_is_fetched(workspace: Path, runner: Path, tmp_path: Path) -> None:
    diverged(workspace / "models" / "good one")
    base = commit(workspace)
    git(workspace, "config", "uploadpack.allowAnySHA1InWant", "true")
    git(tmp_path, "clone", "-q", "--depth=1", f"file://{workspace}", "shallow")
    done = run_action(tmp_path / "shallow", runner, base=base)
    assert results(done) == [("BW101", "models/good%20one/config.json")]


def test_an_unknown_base_is_an_error_and_uploads_nothing(workspace: Path, runner: Path) -> None:
    done = run_action(workspace, runner, base="0" * 40)
    assert done.failed
    assert done.uploaded is None
    assert "error: git fetch" in done.log


def test_given_paths_are_audited_whatever_changed(workspace: Path, runner: Path) -> None:
    base = git(workspace, "rev-parse", "HEAD")
    done = run_action(workspace, runner, base=base, paths="models/good one\n\n  models\n", fail_on="never")
    assert results(done) == [("BW101", "models/bad/config.json")]


@pytest.mark.pipelines
def test_with_the_installation_of_the_last_commit_every_step_runs(
    workspace: Path, runner: Path, tmp_path: Path
) -> None:
    tree = tmp_path / "action"
    tree.mkdir()
    packed = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True, timeout=60).stdout
    subprocess.run(["tar", "--extract", "--directory", str(tree)], input=packed, check=True, timeout=60)
    runner.mkdir()
    diverged(workspace / "models" / "good one")
    done = run_action(workspace, runner, base=commit(workspace), installed_from=str(tree))
    assert results(done) == [("BW101", "models/good%20one/config.json")], done.log
    assert done.failed
    python = runner / "bowline" / "bin" / "python"
    where = [str(python), "-c", "import bowline; print(bowline.__file__)"]
    assert Path(subprocess.check_output(where, text=True, timeout=60)).is_relative_to(runner)


# --- what fails -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fail_on", "errors", "warnings"), [("error", True, False), ("warning", True, True), ("never", False, False)]
)
@pytest.mark.parametrize("kind", ["errors", "warnings"])
def test_fail_on_is_the_least_severity_that_fails(
    tmp_path: Path, runner: Path, kind: str, fail_on: str, errors: bool, warnings: bool
) -> None:
    workspace = tmp_path / "workspace"
    if kind == "errors":
        diverged(workspace)
    else:
        tied_gpt2(workspace, eos_token_id=99)
    done = run_action(workspace, runner, fail_on=fail_on)
    assert done.outputs[kind] == "1"
    assert len(results(done)) == 1  # uploaded in any case
    assert done.failed is (errors if kind == "errors" else warnings)


@pytest.mark.parametrize(("fail_on", "failed"), [("error", True), ("never", False)])
def test_a_checkpoint_that_cannot_be_read_fails(tmp_path: Path, runner: Path, fail_on: str, failed: bool) -> None:
    workspace = tied_gpt2(tmp_path / "workspace")
    (workspace / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    done = run_action(workspace, runner, fail_on=fail_on)
    assert results(done) == []
    assert done.uploaded["runs"][0]["invocations"][0]["executionSuccessful"] is False
    assert done.outputs["unread"] == "1"
    assert done.failed is failed
    assert "git lfs pull" in done.log


def test_ignore_headers_only_upload_and_sarif_file(workspace: Path, runner: Path) -> None:
    done = run_action(workspace, runner, ignore="BW101", headers_only="true", upload="false", sarif_file="out.sarif")
    assert not done.failed
    assert done.uploaded is None
    assert json.loads((workspace / "out.sarif").read_text())["runs"][0]["results"] == []
    assert done.outputs["sarif-file"] == "out.sarif"


@pytest.mark.parametrize(
    ("name", "value"),
    [("fail_on", "info"), ("headers_only", "yes"), ("sarif_file", "a\nfailed=false"), ("ignore", "BW999")],
)
def test_a_wrong_input_is_an_error_and_uploads_nothing(workspace: Path, runner: Path, name: str, value: str) -> None:
    done = run_action(workspace, runner, **{name: value})
    assert done.failed
    assert done.uploaded is None
    assert done.outputs == {}
    assert "error: " in done.log


# --- what an attacker controls --------------------------------------------------------------------------------------


def test_no_input_is_put_into_a_script() -> None:
    for step in STEPS.values():
        assert "${{" not in step.get("run", "")


def test_names_cannot_give_the_runner_commands(tmp_path: Path, runner: Path) -> None:
    workspace = tmp_path / "workspace"
    names = ["$(touch pwned)", "::error::x", "a\n::set-output name=failed::false", "--fix", "`touch pwned`"]
    for name in names:
        diverged(workspace / name.replace("/", "%"))
    git(workspace, "init", "-q")
    git(workspace, "commit", "-q", "--allow-empty", "-m", "a")
    done = run_action(workspace, runner, base=commit(workspace))
    assert len(results(done)) == len(names)
    assert not list(tmp_path.rglob("pwned"))
    assert done.outputs["failed"] == "true"
    stop = re.compile(r"^::stop-commands::([0-9a-f]{32})\n(.*?)^::\1::\n", re.DOTALL | re.MULTILINE)
    assert stop.search(done.log)
    assert not [line for line in stop.sub("", done.log).splitlines() if line.lstrip().startswith("::")]


def test_the_installation_takes_the_actions_own_files() -> None:
    step = STEPS["Install Bowline"]["run"]
    assert '"$RUNNER_TEMP/bowline"' in step
    assert step.rstrip().endswith('"$GITHUB_ACTION_PATH"')
