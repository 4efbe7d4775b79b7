"""The file of results: a run that was killed leaves at most part of a line, which the next one removes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bowline.auditing.queue.results_file import ResultsFile
from bowline.errors import UsageError


def line(path: str) -> str:
    return json.dumps({"path": path, "version": 1})


def test_lines_are_added_to_those_that_are_there(tmp_path: Path) -> None:
    for paths in (["a", "b"], ["c"]):
        with ResultsFile(tmp_path / "r.jsonl") as results:
            for path in paths:
                results.add(line(path))
    assert [json.loads(each)["path"] for each in (tmp_path / "r.jsonl").read_text().splitlines()] == ["a", "b", "c"]
    with ResultsFile(tmp_path / "r.jsonl") as results:
        assert results.done == {"a": 0, "b": 0, "c": 0}


@settings(deadline=None, max_examples=60)
@given(cut=st.integers(0, 60), names=st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=4, unique=True))
def test_wherever_it_is_cut_no_result_is_lost_or_doubled(cut: int, names: list[str], tmp_path_factory: object) -> None:
    file = Path(tmp_path_factory.mktemp("cut")) / "r.jsonl"  # type: ignore[attr-defined]
    with ResultsFile(file) as results:
        for name in names:
            results.add(line(name))
    whole = file.read_bytes()
    file.write_bytes(whole[: max(0, len(whole) - cut)])
    with ResultsFile(file) as results:
        for name in names:
            if name not in results.done:
                results.add(line(name))
    assert sorted(json.loads(each)["path"] for each in file.read_bytes().splitlines()) == sorted(names)


@pytest.mark.parametrize(
    ("record", "code"),
    [
        ({"checkpoints": [{"findings": [{"severity": "info"}]}]}, 0),
        ({"checkpoints": [{"findings": [{"severity": "warning"}]}]}, 1),
        ({"adapters": [{"findings": [{"severity": "error"}]}]}, 1),
        ({"failures": [{"path": "a"}]}, 2),
    ],
)
def test_a_line_has_the_exit_code_of_its_audit(record: dict[str, object], code: int, tmp_path: Path) -> None:
    with ResultsFile(tmp_path / "r.jsonl") as results:
        results.add(json.dumps({"path": "a", **record}))
    with ResultsFile(tmp_path / "r.jsonl") as results:
        assert results.done == {"a": code}


def test_another_run_and_another_file_are_refused(tmp_path: Path) -> None:
    with ResultsFile(tmp_path / "r.jsonl"), pytest.raises(UsageError, match="another run is writing to it"):
        ResultsFile(tmp_path / "r.jsonl")
    (tmp_path / "config.json").write_text('{"vocab_size": 9}\n')
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(UsageError, match="line 1 is not the result of an audit"):
        ResultsFile(tmp_path / "config.json")
    assert (tmp_path / "config.json").read_bytes() == before
    with pytest.raises(UsageError, match="cannot be written"):
        ResultsFile(tmp_path)
