"""The perplexity of a trained model with a quantised tied table, beside its own in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.perplexity import perplexities


@pytest.mark.real
def test_int8_keeps_the_perplexity_and_int4_raises_it_by_some_percent(smollm2: Path) -> None:
    """int8 within 0.5%. int4's rise was 6.1% when it was measured (the goal is 3%): held to 8%."""
    found = perplexities({"float": {}, "int8": {"dtype": "int8"}, "int4": {"dtype": "int4"}}, windows=4)
    assert found["int8"] / found["float"] == pytest.approx(1, abs=0.005)
    assert found["int4"] / found["float"] < 1.08
