"""The tensors that follow the size of a vocabulary, and the key that sets the width of the embedding."""

from __future__ import annotations

from typing import Any

from tools.inspection.configurations import changed, integer_paths, is_vocabulary_key
from tools.inspection.models import on_meta, tensors
from tools.tiny import Json

STEP = 128
"""How far a vocabulary is moved to see which axes follow it."""
WIDTH_NAMES = ("embedding_size", "hidden_size", "d_model", "n_embd", "emb_dim", "d_embed", "dim", "embed_dim")

Axes = dict[str, tuple[int, int]]
"""{tensor name: (axis, change of its length)}."""


def axes_by_key(cls: type[Any], content: Json, model: Any) -> dict[str, Axes]:
    """The axes that follow each vocabulary key of `content`, by the key's path; `model` is what `content` builds."""
    by_path = {}
    for path, size in integer_paths(content).items():
        if is_vocabulary_key(path):
            try:
                axes = vocabulary_axes(model, on_meta(cls, changed(content, path, size + STEP)))
            except Exception:
                continue
            if axes:
                by_path[path] = axes
    return by_path


def vocabulary_axes(before: Any, after: Any) -> Axes:
    """{name: (axis, change)} of the tensors whose shape differs in one axis."""
    old, new = tensors(before), tensors(after)
    axes: Axes = {}
    for name, tensor in old.items():
        if name in new and new[name].ndim == tensor.ndim:
            steps = [wide - narrow for narrow, wide in zip(tensor.shape, new[name].shape, strict=True)]
            moved = [axis for axis, step in enumerate(steps) if step]
            if len(moved) == 1:
                axes[name] = moved[0], steps[moved[0]]
    return axes


def width_path(cls: type[Any], content: Json, embedding: str, vocabulary_path: str) -> str | None:
    """Path of the key that sets the width of the input embedding: the one whose doubling doubles it.

    If the family refuses a change of any one of them alone, the key with the likeliest name is taken.
    """
    width = tensors(on_meta(cls, content))[embedding].shape[1]
    home = vocabulary_path.rpartition(".")[0]

    def likelihood(path: str) -> tuple[bool, int]:
        level, _, key = path.rpartition(".")
        return level != home, WIDTH_NAMES.index(key) if key in WIDTH_NAMES else len(WIDTH_NAMES)

    candidates = [path for path, value in integer_paths(content).items() if value == width and "vocab" not in path]
    candidates.sort(key=likelihood)
    for path in candidates:
        try:
            wider = tensors(on_meta(cls, changed(content, path, 2 * width)))
        except Exception:
            continue
        if embedding in wider and wider[embedding].shape[1] == 2 * width:
            return path
    return next((path for path in candidates if likelihood(path) < (False, len(WIDTH_NAMES))), None)
