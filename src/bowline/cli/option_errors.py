"""Rewrites the library's errors for the command line: `top_k=0` becomes `--top-k 0`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from bowline.errors import BowlineError

__all__ = ["LOADING", "in_options"]

LOADING = {
    "add a good one, or give config=": "add a valid config.json",
    "build from the checkpoint's own config; ignore_mismatched_sizes=True draws them anew": (
        "use the config.json that was saved with these weights"
    ),
    'on_conflict="untie" keeps both; "source" keeps the embedding, "target" the head': (
        "`bowline audit --fix` sets the config's flag to false, which keeps both"
    ),
}
"""For commands that load a model: the library's advice on arguments that the command lacks, and its replacement."""

Verb = TypeVar("Verb", bound=Callable[..., None])


def in_options(
    phrases: Mapping[str, str] | None = None, *, renamed: Mapping[str, str] | None = None
) -> Callable[[Verb], Verb]:
    """Returns a decorator for a command, after which its errors name options as the user gave them.

    The error names its arguments in `BowlineError.arguments`. An argument that was not given as an option keeps the
    library's name, because its value is from a file. `phrases` maps other texts of the library to the command's own,
    and `renamed` an argument of the library to the command's parameter for it, where the two names differ.
    """
    renamed = renamed or {}

    def wrap(verb: Verb) -> Verb:
        signature = inspect.signature(verb)

        @functools.wraps(verb)
        def run(*arguments: Any, **options: Any) -> None:
            try:
                verb(*arguments, **options)
            except BowlineError as error:
                values = signature.bind(*arguments, **options).arguments
                given = {
                    name.removesuffix("_")
                    for name, value in values.items()
                    if value != signature.parameters[name].default
                }
                if not given:
                    raise
                parameters = {name: renamed.get(name, name) for name in error.arguments}
                options_of = {name: own for name, own in parameters.items() if own in given}
                say = functools.partial(_with_options, options_of=options_of, phrases=phrases or {})
                raise type(error)(
                    say(error.message), help=error.help and say(error.help), argument=error.argument
                ) from None

        return run  # type: ignore[return-value]

    return wrap


def _with_options(text: str, options_of: Mapping[str, str], phrases: Mapping[str, str]) -> str:
    """Puts options in place of the arguments that a text begins with: `one=1: ...`, `one and two: ...`."""
    for phrase, option in phrases.items():
        text = text.replace(phrase, option)
    subject, colon, rest = text.partition(": ")
    parts = [part.partition("=") for part in subject.split(" and ")]
    options = [
        f"--{options_of[name].replace('_', '-')}{' ' if equals else ''}{value}"
        if name in options_of
        else f"{name}{equals}{value}"
        for name, equals, value in parts
    ]
    return " and ".join(options) + colon + rest
