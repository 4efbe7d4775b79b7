"""A module's class, swapped for one of the same name that does something more, as FSDP2 swaps classes.

What is put on a module so goes with it: into copies, deep or through a file, and into replicas on other devices.
"""

from __future__ import annotations

from typing import Any

__all__ = ["swapped_class"]


def swapped_class(kind: type[Any], *bases: type[Any]) -> type[Any]:
    """A class that is called as `kind` is, of these bases, of which it is one.

    Example:
        >>> class Loud(int):
        ...     def __str__(self):
        ...         return super().__str__() + "!"
        >>> swapped_class(int, Loud, int).__name__, str(swapped_class(int, Loud, int)(3))
        ('int', '3!')
    """
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__reduce_ex__": _reduced, "swaps": kind}
    return type(kind.__name__, bases, names)


def _reduced(self: Any, _: Any) -> Any:
    """To copy and pickle it: no Python module holds its class."""
    made = type(self)
    return _made, (made.swaps, *made.__bases__), self.__dict__


def _made(kind: type[Any], *bases: type[Any]) -> Any:
    return object.__new__(swapped_class(kind, *bases))
