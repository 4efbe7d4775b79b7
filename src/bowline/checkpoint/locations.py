"""Adds the place of a checkpoint to messages that name only a file, without repeating it."""

from __future__ import annotations

from pathlib import PurePath

__all__ = ["located"]


def located(message: str, place: str) -> str:
    """The message with `place` in front, unless it begins with it.

    Example:
        >>> located("model.safetensors: 0 bytes", "models/a")
        'models/a: model.safetensors: 0 bytes'
        >>> located("model.safetensors: 0 bytes", "models/a/model.safetensors")
        'models/a/model.safetensors: 0 bytes'
        >>> located("org/name@main: not found", "org/name")
        'org/name@main: not found'
    """
    path = PurePath(place)
    for said in (place, str(path), str(path.parent)):  # a file's message may name its directory
        if message.startswith((f"{said}:", f"{said}@", f"'{said}'")):
            return message
    if path.name and place.endswith(path.name) and message.startswith(f"{path.name}: "):
        return place.removesuffix(path.name) + message
    return f"{place}: {message}"
