"""Errors of the library that name the command line's options."""

from __future__ import annotations

import pytest

from bowline.cli.option_errors import in_options
from bowline.errors import UsageError


def said(error: UsageError, **options: object) -> str:
    @in_options()
    def verb(top_k: int | None = None, num_beams: int = 1, compile_: bool = False) -> None:
        raise error

    with pytest.raises(UsageError) as caught:
        verb(**options)  # type: ignore[arg-type]
    assert caught.value.argument == error.argument
    return str(caught.value)


def test_an_argument_becomes_the_option_that_was_given() -> None:
    error = UsageError("top_k=0: expected more than top_k=0", help="top_k=1 at least", argument="top_k")
    assert said(error, top_k=0) == "--top-k 0: expected more than top_k=0 (help: --top-k 1 at least)"


def test_an_argument_that_was_not_given_keeps_its_name() -> None:
    error = UsageError("top_k=0: expected more", argument="top_k")
    assert said(error, num_beams=3) == said(error) == "top_k=0: expected more"


def test_another_given_option_is_not_taken_for_the_argument() -> None:
    error = UsageError("num_beams=3: too many", argument="top_k")
    assert said(error, top_k=1, num_beams=3) == "num_beams=3: too many"


def test_of_two_arguments_those_that_were_given_become_options() -> None:
    error = UsageError("top_k and num_beams=3: choose one, top_k or num_beams", argument=("top_k", "num_beams"))
    assert said(error, top_k=1, num_beams=3) == "--top-k and --num-beams 3: choose one, top_k or num_beams"
    assert said(error, num_beams=3) == "top_k and --num-beams 3: choose one, top_k or num_beams"


def test_a_value_may_hold_the_words_that_join_arguments() -> None:
    error = UsageError("top_k='a: b and num_beams': expected a number", argument="top_k")
    assert said(error, top_k=2, num_beams=3) == "--top-k 'a: b and num_beams': expected a number"


def test_an_argument_whose_name_is_a_builtin_function_is_an_option_without_the_underscore() -> None:
    assert said(UsageError("compile=3: expected True", argument="compile"), compile_=True).startswith("--compile 3:")


def test_an_argument_that_the_command_spells_otherwise_is_named_as_its_option() -> None:
    @in_options(renamed={"num_layers": "layers"})
    def verb(layers: int = 2, draws: int = 1) -> None:
        raise UsageError("num_layers=0: expected at least 1", help="num_layers=1 at least", argument="num_layers")

    with pytest.raises(UsageError) as caught:
        verb(layers=0)
    assert str(caught.value) == "--layers 0: expected at least 1 (help: --layers 1 at least)"
    assert caught.value.argument == "num_layers"
    with pytest.raises(UsageError, match=r"^num_layers=0: "):
        verb(draws=3)
