"""`bowline audit --changed` and the pre-commit hook: each checkpoint of the changed files once, and no other."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from typer.testing import CliRunner, Result

from bowline.cli import app
from bowline.cli.changed_files import checkpoints_of
from tests.checkpoints import GPT2, HEAD, OWN, WTE, table, tied_gpt2, write

ROOT = Path(__file__).parents[2]
PRE_COMMIT = ROOT / ".peers" / "pre-commit" / "bin" / "pre-commit"
(HOOK,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())


def diverged(directory: Path) -> Path:
    return write(directory, {WTE: table(), HEAD: OWN}, GPT2)


def touched(directory: Path, *names: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        (directory / name).touch()


# --- the checkpoints of files ---------------------------------------------------------------------------------------


def test_files_of_one_checkpoint_are_one_place(tmp_path: Path) -> None:
    a, b = tied_gpt2(tmp_path / "a"), tied_gpt2(tmp_path / "b")
    files = [b / "config.json", a / "model.safetensors", b / "tokenizer.json", a / "config.json"]
    assert checkpoints_of(map(str, files)) == [str(b), str(a)]


def test_a_file_beside_no_weights_is_left_out(tmp_path: Path) -> None:
    touched(tmp_path, "config.json", "vocab.txt", "training_args.bin")
    assert checkpoints_of([str(tmp_path / "config.json"), str(tmp_path / "gone" / "config.json")]) == []


def test_a_deleted_file_still_names_its_checkpoint(tmp_path: Path) -> None:
    assert checkpoints_of([str(tied_gpt2(tmp_path) / "generation_config.json")]) == [str(tmp_path)]


def test_a_file_of_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tied_gpt2(tmp_path))
    assert checkpoints_of(["config.json", "./model.safetensors"]) == ["."]


def test_gguf_onnx_and_pt2_files_are_checkpoints_of_their_own(tmp_path: Path) -> None:
    touched(tmp_path, "a.gguf", "b.gguf", "c.onnx", "d.pt2")
    files = [str(tmp_path / name) for name in ("b.gguf", "c.onnx", "d.pt2", "gone.onnx", "gone.gguf")]
    assert checkpoints_of(files) == files[:3]
    assert checkpoints_of([str(tmp_path / "config.json")]) == [
        str(tmp_path / name) for name in ("a.gguf", "b.gguf", "c.onnx", "d.pt2")
    ]


def test_a_part_of_a_gguf_model_stands_for_the_whole(tmp_path: Path) -> None:
    touched(tmp_path, "a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "b.gguf")
    assert checkpoints_of([str(tmp_path / "a-00002-of-00002.gguf")]) == [str(tmp_path / "a-00001-of-00002.gguf")]


def test_a_directory_stands_for_itself(tmp_path: Path) -> None:
    assert checkpoints_of([str(tmp_path)]) == [str(tmp_path)]


# --- the option -----------------------------------------------------------------------------------------------------


def bowline(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["audit", *map(str, arguments)])


def paths(result: Result) -> list[str]:
    return [checkpoint["path"] for checkpoint in json.loads(result.stdout)["checkpoints"]]


def test_each_checkpoint_is_audited_once(tmp_path: Path) -> None:
    a, b = tied_gpt2(tmp_path / "a"), diverged(tmp_path / "b")
    touched(tmp_path / "code", "config.json")
    files = [a / "config.json", a / "model.safetensors", tmp_path / "code" / "config.json", b / "config.json"]
    result = bowline("--changed", "--output-format", "json", *files)
    assert result.exit_code == 1
    assert paths(result) == [str(a), str(b)]


def test_without_a_checkpoint_nothing_is_audited_and_the_exit_code_is_0(tmp_path: Path) -> None:
    touched(tmp_path, "config.json")
    result = bowline("--changed", tmp_path / "config.json")
    assert (result.exit_code, result.output) == (0, "Nothing was audited.\n")


def test_the_changed_files_can_be_in_a_list(tmp_path: Path) -> None:
    path = tied_gpt2(tmp_path / "a")
    (tmp_path / "list").write_text(f"{path / 'config.json'}\n{path / 'model.safetensors'}\n")
    assert paths(bowline("--changed", "--from-file", tmp_path / "list", "--output-format", "json")) == [str(path)]


def test_changed_and_recursive_are_refused(tmp_path: Path) -> None:
    result = bowline("--changed", "--recursive", tied_gpt2(tmp_path))
    assert "--changed with --recursive" in str(result.exception)


# --- the hook -------------------------------------------------------------------------------------------------------


def matches(name: str) -> bool:
    return re.search(HOOK["files"], name) is not None


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "m/config.json",
        "m/generation_config.json",
        "m/tokenizer.json",
        "m/tokenizer_config.json",
        "m/adapter_config.json",
        "m/model.safetensors",
        "m/model-00001-of-00002.safetensors",
        "m/model.safetensors.index.json",
        "m/pytorch_model.bin",
        "m/pytorch_model.bin.index.json",
        "m/adapter_model.bin",
        "m/consolidated.00.pth",
        "m/tokenizer.model",
        "m/vocab.txt",
        "m/model-Q4_K_M.gguf",
        "m/model.onnx",
        "m/model.pt2",
    ],
)
def test_the_hook_runs_for_a_file_of_a_checkpoint(name: str) -> None:
    assert matches(name)


@pytest.mark.parametrize(
    "name", ["README.md", "package.json", "m/myconfig.json", "config.json.bak", "m/training_args.bin", "a.py"]
)
def test_the_hook_does_not_run_for_other_files(name: str) -> None:
    assert not matches(name)


def git(repository: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=repository, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


def run_hook(repository: Path, *args: str) -> subprocess.CompletedProcess[str] | None:
    """The hook on the staged files, as pre-commit runs it: `entry`, `args`, then the files that match `files`."""
    staged = git(repository, "diff", "--cached", "--name-only", "--diff-filter=ACMRTUXB", "-z").split("\0")
    files = [name for name in staged if name and matches(name)]
    if not files:
        return None
    environment = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    return subprocess.run(
        [*shlex.split(HOOK["entry"]), *args, *files],
        cwd=repository,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    tied_gpt2(tmp_path / "models" / "good one")
    diverged(tmp_path / "models" / "bad")
    write(tmp_path / "src", {}, {"a": 1})
    (tmp_path / "src" / "model.safetensors").unlink()
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "a")
    return tmp_path


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_commit_that_touches_a_broken_checkpoint_fails(repository: Path) -> None:
    change(repository / "models" / "bad" / "config.json", note=1)
    git(repository, "add", "-A")
    done = run_hook(repository)
    assert done is not None
    assert done.returncode == 1
    assert "BW101 error" in done.stdout
    assert "in 1 checkpoint" in done.stdout


def test_a_commit_that_touches_a_good_checkpoint_passes(repository: Path) -> None:
    change(repository / "models" / "good one" / "config.json", note=1)
    write(repository / "models" / "good one", {WTE: table(seed=3)})
    git(repository, "add", "-A")
    done = run_hook(repository, "--headers-only")
    assert done is not None
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("Nothing found in 1 checkpoint.\n")


def test_a_commit_that_breaks_a_good_checkpoint_fails(repository: Path) -> None:
    diverged(repository / "models" / "good one")
    git(repository, "add", "-A")
    done = run_hook(repository)
    assert done is not None
    assert done.returncode == 1


def test_a_config_that_is_of_no_checkpoint_passes(repository: Path) -> None:
    change(repository / "src" / "config.json", note=1)
    git(repository, "add", "-A")
    done = run_hook(repository)
    assert done is not None
    assert (done.returncode, done.stdout) == (0, "Nothing was audited.\n")


def test_a_commit_of_code_alone_runs_nothing(repository: Path) -> None:
    touched(repository, "a.py")
    git(repository, "add", "-A")
    assert run_hook(repository) is None


@pytest.mark.pipelines
@pytest.mark.skipif(not PRE_COMMIT.exists(), reason="pre-commit is not in .peers/pre-commit: run `make pipelines`")
def test_pre_commit_installs_the_hook_and_stops_a_commit(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("pre-commit")
    git(place, "clone", "-q", str(ROOT), "hooks")
    repo = {"repo": str(place / "hooks"), "rev": git(place / "hooks", "rev-parse", "HEAD").strip()}
    config = {"repos": [{**repo, "hooks": [{"id": "bowline-audit"}]}]}
    (repository / ".pre-commit-config.yaml").write_text(yaml.safe_dump(config))
    environment = {**os.environ, "PRE_COMMIT_HOME": str(place / "home"), "HOME": str(place)}
    identity = {f"GIT_{who}_{what}": "a@example.com" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=repository,
            env=environment | identity,
            capture_output=True,
            text=True,
            check=False,
            timeout=480,
        )

    installed = run(str(PRE_COMMIT), "install")
    assert installed.returncode == 0, installed.stderr
    git(repository, "add", "-A")
    fine = run("git", "commit", "-q", "-m", "code alone")
    assert "no files to check" in fine.stderr
    assert fine.returncode == 0

    diverged(repository / "models" / "good one")
    git(repository, "add", "-A")
    stopped = run("git", "commit", "-q", "-m", "break it")
    assert stopped.returncode == 1
    assert "BW101 error" in stopped.stderr
    assert "in 1 checkpoint" in stopped.stderr

    tied_gpt2(repository / "models" / "good one", note=1)
    git(repository, "add", "-A")
    passed = run("git", "commit", "-q", "-m", "mend it")
    assert passed.returncode == 0, passed.stderr
    assert re.search(r"bowline audit\.+Passed", passed.stderr)


def test_the_hook_is_installed_from_the_package_and_runs_in_one_process() -> None:
    assert HOOK["id"] == "bowline-audit"
    assert HOOK["language"] == "python"
    assert HOOK["require_serial"] is True
