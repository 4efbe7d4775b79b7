"""What Bowline raises. Every error says what was seen, what was expected, and the way out.

::

    BowlineError
    ├── CheckpointError            a checkpoint cannot be read or written
    │   ├── NoCheckpointError      there is no model at this place
    │   ├── FormatError            the bytes are not what their format demands
    │   ├── UnsafePickleError      a pickle asks for more than tensors
    │   └── RemoteError            the Hub did not answer as a range server must
    ├── ConfigError                config.json cannot be understood, or must not be rewritten
    ├── TieError                   two tensors that cannot be one matrix, or must not be made one silently
    ├── TrainingError              a run cannot go on: its loss or a gradient is no number any more
    └── UsageError                 an argument that means nothing
"""

from __future__ import annotations

__all__ = [
    "BowlineError",
    "CheckpointError",
    "ConfigError",
    "FormatError",
    "NoCheckpointError",
    "RemoteError",
    "TieError",
    "TrainingError",
    "UnsafePickleError",
    "UsageError",
]

DISTRIBUTION = "bowline-ties"
"""The name on the package index, where `bowline` is another author's."""


def how_to_install(extra: str) -> str:
    """The commands that install an optional part of Bowline, as the `help` of an error.

    Example:
        >>> how_to_install("plot")
        "pip install 'bowline-ties[plot]', or pip install '.[plot]' in a checkout"
    """
    return f"pip install '{DISTRIBUTION}[{extra}]', or pip install '.[{extra}]' in a checkout"


class BowlineError(Exception):
    """The root of every error that Bowline raises on purpose.

    `message` is one line: the place, what was seen, what was expected. `help` is the way out, also one line.
    `argument` names the function's argument that the error is about, or several as a tuple; the message or the help
    begins with it. The command line puts its own option in that place.

    Example:
        >>> error = BowlineError("config.json: expected an object, got a list", help="restore config.json")
        >>> print(error)
        config.json: expected an object, got a list (help: restore config.json)
    """

    def __init__(self, message: str, *, help: str | None = None, argument: str | tuple[str, ...] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.help = help
        self.argument = argument

    @property
    def arguments(self) -> tuple[str, ...]:
        """`argument` as a tuple, which is empty if the error names none."""
        if self.argument is None:
            return ()
        return (self.argument,) if isinstance(self.argument, str) else self.argument

    def __str__(self) -> str:
        return f"{self.message} (help: {self.help})" if self.help else self.message


class CheckpointError(BowlineError):
    """A checkpoint cannot be read or written."""


class NoCheckpointError(CheckpointError):
    """There is no model at this place."""


class FormatError(CheckpointError):
    """The bytes are not what their format demands."""


class UnsafePickleError(CheckpointError):
    """A pickle asks for more than the rebuilding of tensors; it was not executed."""


class RemoteError(CheckpointError):
    """The Hub did not answer as a server of exact byte ranges must."""


class ConfigError(BowlineError):
    """`config.json` cannot be understood, or must not be rewritten."""


class TieError(BowlineError):
    """Two tensors that cannot be one matrix, or must not be made one silently; the model is as it was."""


class TrainingError(BowlineError):
    """The loss or a gradient is no number any more; the last whole checkpoint is kept."""


class UsageError(BowlineError, ValueError):
    """An argument that means nothing: a `ValueError` too, as Python's own functions raise."""
