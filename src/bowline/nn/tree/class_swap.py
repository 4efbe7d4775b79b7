"""Swaps a module's class for a subclass of the same name that does something more, as FSDP2 does.

The added behaviour then follows the module into copies, deep or through a file, and into replicas on other devices.
"""

from __future__ import annotations

from typing import Any

__all__ = ["is_swapped", "own_class", "swapped_class"]

OWN = "_own_class"


def swapped_class(kind: type[Any], *bases: type[Any], **attributes: Any) -> type[Any]:
    """A class with the name of `kind`, these bases (one is `kind` or derives from it) and these attributes.

    Example:
        >>> class Loud(int):
        ...     mark = "!"
        ...     def __str__(self):
        ...         return super().__str__() + self.mark
        >>> louder = swapped_class(int, Loud, int, mark="!!")
        >>> louder.__name__, str(louder(3))
        ('int', '3!!')
    """

    def reduced(self: Any, _: Any) -> Any:  # to copy and pickle it: no Python module holds its class
        return _made, (kind, bases, attributes), self.__getstate__()

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__reduce_ex__": reduced, OWN: kind}
    return type(kind.__name__, bases, names | attributes)


def own_class(module: Any) -> type[Any]:
    """The class of a module before the swap, or its present class if none was swapped."""
    kind: type[Any] = getattr(type(module), OWN, type(module))
    return kind


def is_swapped(module: Any) -> bool:
    """Whether a module's present class is a swapped one."""
    return OWN in vars(type(module))


def _made(kind: type[Any], bases: tuple[type[Any], ...], attributes: dict[str, Any]) -> Any:
    return object.__new__(swapped_class(kind, *bases, **attributes))
