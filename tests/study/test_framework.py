"""Units are run once and kept whole; a study that was killed goes on; what cannot work is said before any work."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from bowline.checkpoint.durable.whole_file import write_whole
from bowline.errors import UsageError
from bowline.plots.panels import Bar, Bars, Curve, Curves, Group, Sheet, draw_sheet
from bowline.study import experiments
from bowline.study.experiment_sizes import FULL, QUICK, ExperimentSizes
from bowline.study.experiments import Experiments, code_digest
from bowline.study.question import Numbers, Question
from bowline.study.questions.question_list import QUESTIONS, chosen
from bowline.study.statistics import difference, with_error
from bowline.study.study_run import study

CALLS: list[int] = []


def double(value: int) -> dict[str, Any]:
    """A unit of work."""
    CALLS.append(value)
    return {"double": 2 * value, "pair": (1, 2), "none": float("nan")}


def place(text: Path) -> str:
    """A unit that is given the place of the text."""
    return text.name


def _run(experiments: Experiments) -> Numbers:
    return {"values": [experiments.unit(double, value=value)["double"] for value in (1, 2)]}


def _plot(numbers: Numbers) -> Sheet:
    bars = [Bar(label="value", value=value, error=0.1, note=str(value)) for value in numbers["values"]]
    return Sheet(title="How much?", panels=[Bars(title="values", x_label="value", groups=[Group(name="a", bars=bars)])])


def _conclusion(numbers: Numbers) -> str:
    return f"They are {numbers['values']}. That is all."


TOY = Question(name="toy", asks="How much?", thread="none", run=_run, plot=_plot, conclusion=_conclusion)


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    CALLS.clear()


@pytest.fixture
def drawing() -> Any:
    return pytest.importorskip("matplotlib", reason="pip install 'bowline-ties[plot]'")


# --- units ----------------------------------------------------------------------------------------------------------


def test_a_unit_is_run_once_for_its_arguments(tmp_path: Path) -> None:
    first, second = Experiments(tmp_path, QUICK), Experiments(tmp_path, QUICK)
    assert first.unit(double, value=1) == second.unit(double, value=1) == {"double": 2, "pair": [1, 2], "none": None}
    second.unit(double, value=2)
    assert CALLS == [1, 2]
    assert (first.ran, first.kept, second.ran, second.kept) == (1, 0, 1, 1)


def test_other_code_is_another_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Experiments(tmp_path, QUICK).unit(double, value=1)
    monkeypatch.setattr(experiments, "code_digest", lambda module: "another")
    Experiments(tmp_path, QUICK).unit(double, value=1)
    assert CALLS == [1, 1]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"unit": "test_framework.double"}'])
def test_a_file_that_is_no_whole_unit_is_made_anew(tmp_path: Path, content: str) -> None:
    Experiments(tmp_path, QUICK).unit(double, value=1)
    (path,) = (tmp_path / "units").iterdir()
    path.write_text(content)
    assert Experiments(tmp_path, QUICK).unit(double, value=1)["double"] == 2
    assert CALLS == [1, 1]


def test_the_place_of_the_text_is_given_and_is_no_part_of_the_configuration(tmp_path: Path) -> None:
    assert Experiments(tmp_path, QUICK).unit(place) == "text"
    (path,) = (tmp_path / "units").iterdir()
    assert str(tmp_path) not in path.read_text() and "python" in json.loads(path.read_text())


def test_comments_docstrings_and_what_is_said_are_not_in_the_fingerprint(tmp_path: Path) -> None:
    one = tmp_path / "one.py"
    one.write_text('"""What."""\ndef run():\n    """Does."""\n    return 1\ndef _plot(n):\n    return 1\n')
    other = tmp_path / "other.py"
    other.write_text("def run():\n    # quickly\n    return (1)\ndef _conclusion(n):\n    return 'other'\n")
    another = tmp_path / "another.py"
    another.write_text("def run():\n    return 2\n")
    assert experiments._essence(one) == experiments._essence(other) != experiments._essence(another)


def test_every_question_has_a_fingerprint_of_its_own() -> None:
    digests = {code_digest(question.run.__module__) for question in QUESTIONS.values()}
    assert len(digests) == len(QUESTIONS)


def test_a_file_is_the_old_one_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.json"
    write_whole(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match="cannot be written: No space left on device"):
        write_whole(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


# --- studies --------------------------------------------------------------------------------------------------------


def test_a_study_is_a_report_a_record_and_a_figure(tmp_path: Path, drawing: Any) -> None:
    answers = study([TOY], out=tmp_path / "out")
    record = json.loads((tmp_path / "out" / "study.json").read_text())
    assert record["version"] == 1 and record["setting"] == QUICK.as_dict()
    assert [each["numbers"] for each in record["answers"]] == [{"values": [2, 4]}] == [answers[0].numbers]
    report = (tmp_path / "out" / "study.md").read_text()
    assert "## How much?" in report and "They are [2, 4]. That is all." in report and "![toy](toy.svg)" in report
    assert (tmp_path / "out" / "toy.svg").read_text().startswith("<?xml")


def test_a_second_study_only_writes(tmp_path: Path, drawing: Any) -> None:
    study([TOY], out=tmp_path)
    figure = (tmp_path / "toy.svg").read_bytes()
    study([TOY], out=tmp_path)
    assert CALLS == [1, 2]
    assert (tmp_path / "toy.svg").read_bytes() == figure


def test_answers_of_another_call_stay_in_the_report_and_those_of_another_setting_do_not(
    tmp_path: Path, drawing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Question(name="other", asks="And?", thread="none", run=_run, plot=_plot, conclusion=_conclusion)
    monkeypatch.setitem(QUESTIONS, "toy", TOY)
    monkeypatch.setitem(QUESTIONS, "other", other)
    study(["toy"], out=tmp_path)
    study(["other"], out=tmp_path)
    assert [each["name"] for each in json.loads((tmp_path / "study.json").read_text())["answers"]] == ["toy", "other"]
    study(["other"], out=tmp_path, setting=ExperimentSizes(seeds=2))
    assert [each["name"] for each in json.loads((tmp_path / "study.json").read_text())["answers"]] == ["other"]


KILLED = """
    import sys, time
    from pathlib import Path
    from bowline.study.experiments import Experiments
    from bowline.study.experiment_sizes import QUICK

    def slow(value):
        time.sleep(0.02)
        return value

    experiments = Experiments(Path(sys.argv[1]), QUICK)
    print(sum(experiments.unit(slow, value=value) for value in range(int(sys.argv[2]))), experiments.ran, flush=True)
"""


def test_a_study_that_is_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(textwrap.dedent(KILLED))
    out, units = tmp_path / "out", tmp_path / "out" / "units"
    process = subprocess.Popen([sys.executable, str(script), str(out), "100000"], stdout=subprocess.DEVNULL)
    limit = time.monotonic() + 60
    while not (units.is_dir() and len(list(units.glob("*.json"))) >= 5):
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = list(units.glob("[!.]*.json"))
    assert all("result" in json.loads(path.read_text()) for path in done)  # whole, each of them
    count = len(done) + 3
    again = subprocess.run(
        [sys.executable, str(script), str(out), str(count)], capture_output=True, text=True, check=True, timeout=60
    )
    assert again.stdout.split() == [str(sum(range(count))), "3"]


# --- what cannot work -----------------------------------------------------------------------------------------------


def test_an_unknown_question_is_told_with_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'flags': no such question, expected one of flag, t5-init"):
        study(["flags", "gradient"], out=tmp_path)


def test_questions_come_in_the_order_of_the_catalogue_and_all_where_none_is_named() -> None:
    assert [each.name for each in chosen(["gradient", "flag", "flag"])] == ["flag", "gradient"]
    assert [each.name for each in chosen([])] == list(QUESTIONS)


def test_without_matplotlib_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match="a plot needs matplotlib") as raised:
        study([TOY], out=tmp_path / "out")
    assert raised.value.help == "pip install '.[plot]' in a checkout, or 'bowline-ties[plot]' once it is on the index"
    assert CALLS == [] and not (tmp_path / "out").exists()


def test_a_directory_of_something_else_is_refused(tmp_path: Path, drawing: Any) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UsageError, match=r"holds thesis.tex and no earlier study"):
        study([TOY], out=tmp_path)
    assert CALLS == []


def test_a_place_that_is_a_file_is_refused(tmp_path: Path, drawing: Any) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="File exists"):
        study([TOY], out=tmp_path / "file")


def test_a_record_of_another_version_is_not_overwritten(tmp_path: Path, drawing: Any) -> None:
    (tmp_path / "study.json").write_text('{"version": 99}')
    with pytest.raises(UsageError, match="expected a study's record of version 1"):
        study([TOY], out=tmp_path)
    assert (tmp_path / "study.json").read_text() == '{"version": 99}'


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"seeds": 1}, "seeds=1: expected at least 2"),
        ({"steps": 0}, "steps=0: expected more than 0"),
        ({"hidden_size": 97}, "hidden_size=97: expected a multiple of heads=4"),
    ],
)
def test_sizes_that_mean_nothing_are_refused(values: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        ExperimentSizes(**values)


def test_the_two_settings_survive_json() -> None:
    for setting in (QUICK, FULL):
        assert ExperimentSizes(**json.loads(json.dumps(setting.as_dict()))) == setting


# --- numbers and figures --------------------------------------------------------------------------------------------


def test_a_difference_is_clear_as_a_t_test_has_it() -> None:
    """Differences of 1, 2 and 3 have t = 2 / (1 / sqrt 3) = 3.46, and 4.303 is the quantile for two."""
    found = difference([2.0, 12.0, 23.0], [1.0, 10.0, 20.0])
    assert not found.clear and found.value / found.margin == pytest.approx(2 * math.sqrt(3) / 4.303)
    assert difference([2.5, 12.0, 22.5], [1.0, 10.0, 20.0]).clear  # t = 6.9
    assert not difference([9.0], [1.0]).clear  # one value has no error


def test_an_error_is_never_written_as_nothing() -> None:
    assert with_error([24.30, 24.31]) == "24.3 ± 0.005"
    assert with_error([0.0, 0.0]) == "0 ± 0"


def test_figures_are_the_same_bytes_and_panels_of_both_kinds_are_drawn(tmp_path: Path, drawing: Any) -> None:
    from bowline.plots.figure_style import save

    curve = Curve(label="a", x=[0, 1, 10], y=[3.0, 2.0, float("inf")], error=[0.1, 0.1, 0.1])
    panels = [
        Curves(title="curves", y_label="y", curves=[curve], references=[(1.0, "one")], log_x=True, log_y=True),
        _plot({"values": [1, 2]}).panels[0],
    ]
    first, second = (save(draw_sheet(Sheet(title="?", panels=panels)), tmp_path / f"{name}.svg") for name in "ab")
    assert first.read_bytes() == second.read_bytes()


def test_a_sheet_without_panels_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing to draw"):
        draw_sheet(Sheet(title="?", panels=[]))
