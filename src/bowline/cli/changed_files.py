"""`bowline audit --changed`: the checkpoints that changed files belong to."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["checkpoints_of"]


def checkpoints_of(files: Iterable[str]) -> list[str]:
    """The checkpoints on this machine that these files belong to, each once, in the order of the files.

    A file belongs to its directory if that holds weights; a GGUF, ONNX or pt2 file to the model that it holds or is a
    part of. Files of no checkpoint are left out. A file may have been deleted; a directory stands for itself.
    """
    return list(dict.fromkeys(place for file in files for place in _checkpoints(Path(file))))


def _checkpoints(file: Path) -> Iterator[str]:
    from bowline.checkpoint import checkpoints_at
    from bowline.checkpoint.formats.gguf import GGUF_SUFFIX
    from bowline.checkpoint.formats.graphs import GRAPH_SUFFIXES
    from bowline.checkpoint.weights import holds_weights

    if os.path.isdir(file):  # noqa: PTH112 - Path.is_dir can raise
        yield str(file)
        return
    try:
        names = os.listdir(file.parent)  # noqa: PTH208 - only the names are needed
    except OSError:
        return  # the directory was deleted too
    if file.name.endswith(GGUF_SUFFIX):
        from bowline.checkpoint.formats.gguf.split_files import gguf_models

        parts = (name for name in gguf_models(names) if len(gguf_models([name, file.name])) == 1)
        yield from (str(file.parent / name) for name in parts)
    elif file.name.endswith(GRAPH_SUFFIXES):
        if file.name in names:
            yield str(file)
    elif holds_weights(names):
        yield from map(str, checkpoints_at(file.parent))
