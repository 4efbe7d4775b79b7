"""Loads checkpoints in mlx-lm and says what became of the head. Runs in mlx-lm's own environment.

The stored tensors are compared with those of the module that `load_model(strict=True)` returns; a head that it holds
counts as kept if the logits follow it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import load_model

from tools.loader_sweep.request_loop import serve


def fate_of(directory: Path, head: str, embedding: str) -> tuple[str, str]:
    """The fate of the head, and the loader's words where it refuses."""
    try:
        model, _ = load_model(directory, strict=True)
    except (Exception, SystemExit) as error:  # a refusal is an outcome
        return "refused", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    stored: dict[str, Any] = {}
    for file in directory.glob("model*.safetensors"):
        stored.update(mx.load(str(file)))
    held = dict(tree_flatten(model.parameters()))
    own, table = stored.get(head), stored.get(embedding)
    width = next(one.shape[1] for one in (own, table) if one is not None)
    wide = [value for value in held.values() if value.ndim == 2 and value.shape[1] == width and len(value) > 256]
    has_head = any(_equal(value, own) for value in wide)
    has_table = any(_equal(value, table) for value in wide)
    if own is not None and table is not None and _equal(own, table):
        two = sum(_equal(value, table) for value in wide) > 1
        return ("kept" if two and _is_used(model, own) else "tied"), ""
    if own is None:
        return ("tied" if has_table else "random"), ""
    return ("kept" if has_head and _is_used(model, own) else "dropped"), ""


def _is_used(model: Any, head: Any) -> bool:
    """Whether the logits follow the parameter that holds this head; a model that cannot run is taken to use it."""
    held = {name: value for name, value in tree_flatten(model.parameters()) if _equal(value, head)}
    heads = {name: value for name, value in held.items() if not re.search(r"embed(?!_out)|wte", name)}
    tokens = mx.array([[1, 2, 3]])
    try:
        before = model(tokens)
        model.update(tree_unflatten([(name, mx.zeros_like(value)) for name, value in heads.items()]))
        return not mx.array_equal(before, model(tokens), equal_nan=True)
    except Exception:  # nothing was seen
        return True


def _equal(one: Any, other: Any) -> bool:
    return other is not None and one.shape == other.shape and bool(mx.array_equal(one, other.astype(one.dtype)))


if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    serve(f"mlx-lm {mlx_lm.__version__}", fate_of)
