"""Every error that Bowline raises on purpose says what was seen and the way out, in one line."""

from __future__ import annotations

import ast
import copy
import pickle
from pathlib import Path

import pytest

import bowline
from bowline import errors
from bowline.errors import BowlineError, CheckpointError, UsageError

SOURCES = sorted(Path(bowline.__file__).parent.rglob("*.py"))
CLASSES = [getattr(errors, name) for name in errors.__all__]


def test_the_message_is_one_line_with_the_way_out() -> None:
    error = BowlineError("config.json: not JSON", help="fetch it again")
    assert (error.message, error.help) == ("config.json: not JSON", "fetch it again")
    assert str(error) == "config.json: not JSON (help: fetch it again)"


def test_an_error_without_a_way_out_is_its_message() -> None:
    assert str(BowlineError("as it is")) == "as it is"


@pytest.mark.parametrize("error", CLASSES)
def test_every_error_is_a_bowline_error_with_a_sentence_of_its_own(error: type[BowlineError]) -> None:
    assert issubclass(error, BowlineError)
    assert error.__doc__


def test_every_exception_of_the_module_is_public() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert defined == set(errors.__all__)


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn: dict[str, str] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        words = line.replace("├──", "   ").replace("└──", "   ").replace("│", " ").split()
        if words and words[0].endswith("Error"):
            depth = (len(line) - len(line.lstrip(" │├└─")) - 4) // 4
            above[depth:] = [words[0]]
            drawn[words[0]] = above[depth - 1] if depth else "Exception"
    assert drawn == {error.__name__: error.__base__.__name__ for error in CLASSES}


def test_what_cannot_be_read_is_a_checkpoint_error_and_what_cannot_be_changed_is_not() -> None:
    assert {error.__name__ for error in CLASSES if issubclass(error, CheckpointError)} == {
        "CheckpointError", "FormatError", "NoCheckpointError", "RemoteError", "UnsafePickleError"
    }  # fmt: skip


def raised(path: Path) -> list[ast.Call]:
    """Every call of an error's class in a file."""
    return [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in errors.__all__
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_no_message_is_written_over_several_lines(path: Path) -> None:
    for call in raised(path):
        texts = [
            node.value for node in ast.walk(call) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        assert not any("\n" in text for text in texts), f"{path}:{call.lineno}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_nothing_is_printed_and_nothing_bare_is_caught(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        assert not (isinstance(node, ast.ExceptHandler) and node.type is None), f"{path}:{node.lineno}"
        assert not (isinstance(node, ast.Name) and node.id == "print"), f"{path}:{node.lineno}"


def test_errors_survive_a_process_boundary_with_their_help() -> None:
    error = pickle.loads(pickle.dumps(CheckpointError("seen", help="way out")))
    assert (type(error), str(error)) == (CheckpointError, "seen (help: way out)")


def test_errors_keep_the_name_of_their_argument_in_copies() -> None:
    error = UsageError("top_k=0: expected a whole number from 1", argument="top_k")
    for again in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (again.argument, again.arguments) == ("top_k", ("top_k",))


def test_an_error_can_be_about_no_argument_and_about_two() -> None:
    assert UsageError("as it is").arguments == ()
    assert UsageError("one and two: choose", argument=("one", "two")).arguments == ("one", "two")


def test_every_text_that_names_the_indexs_package_also_names_the_checkout() -> None:
    name = f"{errors.DISTRIBUTION}["
    one_way = [path.name for path in SOURCES if name in (text := path.read_text("utf-8")) and "'.[" not in text]
    assert one_way == []
