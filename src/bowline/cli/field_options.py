"""Makes command-line options from the fields of a dataclass: name, type and help are written once, at the field."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

__all__ = ["with_field_options"]


def with_field_options(verb: Callable[..., None], record: type[Any]) -> Callable[..., None]:
    """Returns a command that has its own options and one for each field of `record` with a `help` in its metadata.

    The command takes the fields as `**options`; one that was not given is `None`. The metadata may also have a
    `metavar`, `choices`, and a `flag`: the spelling of a switch, if it is not just the field's name.
    """
    own = inspect.signature(verb, eval_str=True).parameters.values()
    hints = get_type_hints(record)

    @functools.wraps(verb)
    def run(**options: Any) -> None:
        verb(**options)

    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            *(parameter for parameter in own if parameter.kind is not inspect.Parameter.VAR_KEYWORD),
            *(_parameter(field, hints[field.name]) for field in dataclasses.fields(record) if "help" in field.metadata),
        ]
    )
    return run


def _parameter(field: dataclasses.Field[Any], hint: Any) -> inspect.Parameter:
    metadata = field.metadata
    if "choices" in metadata:
        kind: Any = Literal[metadata["choices"]]
    elif get_origin(hint) is tuple:
        kind = list[get_args(hint)[0]]  # type: ignore[misc]
    else:
        kind = next((one for one in get_args(hint) if one is not NoneType), hint)
    names = (metadata.get("flag", f"--{field.name.replace('_', '-')}"),) if kind is bool else ()
    option = typer.Option(*names, metavar=metadata.get("metavar"), help=metadata["help"])
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )
