"""The audit of SmolLM2-135M-Instruct, a trained tied model, compared with known facts about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bowline.auditing import AuditReport, audit

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def report(smollm2: Path) -> AuditReport:
    return audit(smollm2)


def test_its_nearly_equal_rows_are_reserved_tokens_and_pieces_of_longer_words(report: AuditReport) -> None:
    """Trained tokens are not among them, not even the two that chats alone are trained on (cosine .993 and .991)."""
    (group,) = report.evidence.tables[0].alike
    assert report.evidence.tokenizer is not None
    found = {token for token, number in report.evidence.tokenizer.ids.items() if number in group}
    assert len(found) == 24
    assert {"<file_sep>", "<jupyter_start>", "swigfaiss", "PeerClass", "ManagementPlaneProtection"} <= found
    assert not {"<|im_start|>", "<|im_end|>", "Ġthe"} & found
