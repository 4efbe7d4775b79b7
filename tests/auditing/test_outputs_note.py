"""The note on other tools' outputs has the row of each output that `make real` audits."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.outputs import OUTPUTS, Output

PAGE = Path(__file__).parents[2] / "docs" / "notes" / "outputs.md"


@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)
def test_the_page_says_what_the_real_test_asserts(output: Output) -> None:
    says = output.says + (f" ({', '.join(output.codes)})" if output.codes else "")
    row = f" | {output.what} | {output.wrote} | {output.truth} | {says} | {output.right} |\n"
    assert row in PAGE.read_text(encoding="utf-8")
