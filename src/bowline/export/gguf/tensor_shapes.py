"""The tensors that llama.cpp reads for a config, and their shapes; it refuses files with others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bowline.checkpoint.formats.strict_json import shown
from bowline.errors import UsageError
from bowline.wording import joined

__all__ = ["Shape", "TensorShapes", "check_shapes"]

Shape = tuple[int, ...]
OTHER_MODEL = "config.json and the tensors belong to different models: fetch both again, or save the model again"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShapes:
    """The shapes of all tensors, by llama.cpp's names: those outside of layers, and those of each stack of layers."""

    outside: Mapping[str, Shape]
    stacks: Mapping[str, tuple[int, Mapping[str, Shape]]]
    """By what stands before a layer's number: the number of layers, and the shapes in each."""

    def __iter__(self) -> Iterator[tuple[str, Shape]]:
        """Each tensor's name and shape."""
        yield from self.outside.items()
        for stack, (layers, shapes) in self.stacks.items():
            for layer in range(layers):
                for name, shape in shapes.items():
                    yield f"{stack}.{layer}.{name}", shape


def check_shapes(found: Mapping[str, Shape], wanted: TensorShapes, origins: Mapping[str, str]) -> None:
    """Compare a checkpoint's tensors with those that llama.cpp reads; `origins` are their stored names.

    Raises:
        UsageError: one is missing, is not wanted, or has another shape.
    """
    known = set()
    for name, shape in wanted:
        if name not in found:
            sizes = joined([f"{count} in {stack}" for stack, (count, _) in wanted.stacks.items()])
            raise UsageError(
                f"no tensor becomes {name} of shape {shape}, which llama.cpp needs by config.json (layers: {sizes})",
                help=OTHER_MODEL,
            )
        if found[name] != shape:
            raise UsageError(
                f"{shown(origins[name])} becomes {name} with the shape {found[name]}, by config.json it has {shape}",
                help=OTHER_MODEL,
            )
        known.add(name)
    for name in found:
        if name not in known:
            raise UsageError(
                f"{shown(origins[name])} would become {name}, which llama.cpp does not read by this config.json",
                help=OTHER_MODEL,
            )
