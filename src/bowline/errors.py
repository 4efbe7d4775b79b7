"""The exceptions that Bowline raises. Every error says what was seen, what was expected, and the way out.

::

    BowlineError
    ├── CheckpointError            a checkpoint cannot be read or written
    │   ├── NoCheckpointError      there is no model at this place
    │   ├── FormatError            the bytes violate their format
    │   ├── UnsafePickleError      a pickle asks for more than tensors
    │   └── RemoteError            the Hub failed, or did not send the requested bytes
    ├── ConfigError                config.json cannot be understood, or must not be rewritten
    ├── TieError                   two tensors cannot share one matrix, or sharing would silently discard values
    ├── TrainingError              training stopped because the loss or a gradient is NaN or infinite
    └── UsageError                 an argument is invalid
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
    """The command that installs an optional part of Bowline, as the `help` of an error.

    Example:
        >>> how_to_install("plot")
        "pip install '.[plot]' in a checkout, or 'bowline-ties[plot]' once it is on the index"
    """
    return f"pip install '.[{extra}]' in a checkout, or '{DISTRIBUTION}[{extra}]' once it is on the index"


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
    """The bytes violate their format."""


class UnsafePickleError(CheckpointError):
    """A pickle asks for more than the rebuilding of tensors; it was not executed."""


class RemoteError(CheckpointError):
    """The Hub failed, or did not send exactly the requested bytes."""


class ConfigError(BowlineError):
    """`config.json` cannot be understood, or must not be rewritten."""


class TieError(BowlineError):
    """Two tensors cannot share one matrix, or sharing would silently discard values; the model is unchanged."""


class TrainingError(BowlineError):
    """The loss or a gradient is NaN or infinite; the last complete checkpoint is kept."""


class UsageError(BowlineError, ValueError):
    """An argument is invalid. It is also a `ValueError`, as Python's own functions raise."""
