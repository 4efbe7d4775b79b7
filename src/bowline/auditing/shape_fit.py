"""Finds the stored tensors that do not fit the model that a loader builds from the config."""

from __future__ import annotations

from collections.abc import Mapping

from bowline.auditing.quantised_names import in_other_form
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.families.declaration import Declaration

__all__ = ["LOADERS_BEFORE", "misfits", "wrong_lengths"]

LOADERS_BEFORE = frozenset({"transformers-4"})
"""Loaders that tie before they load: there a target must have the shape of its source."""


def wrong_lengths(declaration: Declaration, tensors: Mapping[str, StoredTensor], loader: str) -> dict[str, int | None]:
    """{name: length} of the tensors whose vocabulary axis has another length than in the loader's model.

    The length is `None` for a tensor without such an axis.
    """
    expected = dict(declaration.expected_lengths.get(loader, {}))
    if loader in LOADERS_BEFORE:
        for tie in declaration.made.get(loader, ()):
            if tie.source in expected:
                expected[tie.target] = expected[tie.source]
    wrong: dict[str, int | None] = {}
    for name, wanted in expected.items():
        if name in tensors and name in declaration.vocabulary and not in_other_form(name, tensors):
            shape, axis = tensors[name].shape, declaration.vocabulary[name]
            length = shape[axis] if axis < len(shape) else None
            if length != wanted:
                wrong[name] = length
    return wrong


def misfits(declaration: Declaration, tensors: Mapping[str, StoredTensor], loader: str) -> frozenset[str]:
    """Names of the tensors that make a loader refuse: a wrong length, or ends of a tie that differ in another axis."""
    wrong = set(wrong_lengths(declaration, tensors, loader))
    for tie in declaration.made.get(loader, ()):
        target, source = tensors.get(tie.target), tensors.get(tie.source)
        if target is None or source is None or any(in_other_form(end, tensors) for end in (tie.target, tie.source)):
            continue  # codes have shapes of their own
        if _rest(declaration, target) != _rest(declaration, source):
            wrong.add(target.name)
    return frozenset(wrong)


def _rest(declaration: Declaration, tensor: StoredTensor) -> tuple[int, ...]:
    """The shape without the vocabulary axis; the config sets the length of that axis."""
    axis = declaration.vocabulary.get(tensor.name, 0)
    return tensor.shape[:axis] + tensor.shape[axis + 1 :]
