"""Adapters merged on disk: every kind that PEFT saves, at every end of a tie, against the adapter model itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from bowline.edit import EditReport, open_checkpoint
from tests.parity.adapter_cases import CASES, Base, Case, loaded, logits, make_base, saved_adapter

pytestmark = [
    pytest.mark.usefixtures("quiet_transformers"),
    pytest.mark.filterwarnings("ignore"),  # PEFT warns of ties, of saved tables and of configs that it mends
]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Base]:
    """The base models, each written and loaded once."""
    root = tmp_path_factory.mktemp("bases")
    return cache(lambda family, tied: make_base(family, tied, root / f"{family}-{tied}"))


def merge(base: Path, adapter: Path, out: Path, **options: Any) -> EditReport:
    with open_checkpoint(base) as checkpoint:
        return checkpoint.edit().merge(adapter, **options).commit(out)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_merged_checkpoint_computes_what_the_adapter_model_computed(
    case: Case, bases: Callable[[str, bool], Base], tmp_path: Path
) -> None:
    base = bases(case.family, case.tied)
    saved_adapter(case, base, place := tmp_path / "adapter")
    before = logits(loaded(base, place))
    report = merge(base.place, place, tmp_path / "merged")
    again = type(base.model).from_pretrained(tmp_path / "merged", dtype=torch.float64).eval()
    off = float((logits(again) - before).abs().max())
    if case.codes == "BW506":  # PEFT leaves the head's bias out while trained rows are on
        assert off > 1e-3 and "the head's bias, which PEFT leaves out" in str(report)
    else:
        assert off < 1e-9, report
    assert " tensors of the adapter are accounted for" in str(report)
    assert report.clean, report.findings
