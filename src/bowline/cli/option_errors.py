"""Errors of the library in the words of the command line: what is `top_k=0` there is `--top-k 0` here."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from bowline.errors import BowlineError

__all__ = ["LOADING", "in_options"]

LOADING = {
    "add a good one, or give config=": "add a good one",
    "build from the checkpoint's own config; ignore_mismatched_sizes=True draws them anew": (
        "put the config.json beside the weights that was saved with them"
    ),
    'on_conflict="untie" keeps both; "source" keeps the embedding, "target" the head': (
        "`bowline audit --fix` makes the config say that there are two"
    ),
}
"""What a verb that loads a model says in place of arguments that it does not have."""

Verb = TypeVar("Verb", bound=Callable[..., None])


def in_options(phrases: Mapping[str, str] | None = None) -> Callable[[Verb], Verb]:
    """A verb whose errors name the options that were given, as they were given.

    A name that was not given stays as the library has it: its value is from a file. `phrases` are what else is said
    otherwise here.
    """

    def wrap(verb: Verb) -> Verb:
        signature = inspect.signature(verb)

        @functools.wraps(verb)
        def run(*arguments: Any, **options: Any) -> None:
            try:
                verb(*arguments, **options)
            except BowlineError as error:
                values = signature.bind(*arguments, **options).arguments
                given = [name for name, value in values.items() if value != signature.parameters[name].default]
                told = functools.partial(_told, given=given, phrases=phrases or {})
                raise type(error)(told(error.message), help=error.help and told(error.help)) from None

        return run  # type: ignore[return-value]

    return wrap


def _told(text: str, given: list[str], phrases: Mapping[str, str]) -> str:
    if not given:
        return text
    for phrase, option in phrases.items():
        text = text.replace(phrase, option)
    names = "|".join(name.removesuffix("_") for name in given)
    text = re.sub(rf"(?<![\w.-])({names})=('[^']*'|[^\s:;,)]+)", lambda at: f"{_option(at[1])} {at[2]}", text)
    for one in (rf"^({names})(?= and [\w-]+[: ])", rf"(?<= and )({names})(?=: )"):  # "tokenizer and vocab_size: ..."
        text = re.sub(one, lambda at: _option(at[1]), text, count=1)
    return text


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
