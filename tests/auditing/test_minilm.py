"""The audit of a real trained checkpoint, compared with known facts about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bowline.auditing import AuditReport, audit
from bowline.auditing.row_statistics import PaddingClass


@pytest.fixture(scope="module")
def report(minilm: Path) -> AuditReport:
    return audit(minilm)


def test_it_is_clean_and_known(report: AuditReport) -> None:
    declaration = report.evidence.declaration
    assert report.clean
    assert (declaration.architecture, declaration.family, declaration.inferred) == ("BertModel", "bert", False)
    assert report.evidence.ties == ()


def test_its_padding_row_was_trained_although_padding_is_never_a_label(report: AuditReport) -> None:
    assert report.evidence.padding is not None
    assert (report.evidence.padding.id, report.evidence.padding.row_class) == (0, PaddingClass.TRAINED)


def test_rows_that_look_never_trained_are_the_unused_ones_and_rare_characters(
    report: AuditReport, minilm: Path
) -> None:
    tokens = (minilm / "vocab.txt").read_text(encoding="utf-8").split("\n")
    found = {tokens[row] for row in report.evidence.tables[0].never_trained}
    unused = {token for token in tokens if token.startswith("[unused")}
    assert len(unused) == 994
    assert len(found & unused) >= 990
    others = found - unused
    assert sum(len(token.removeprefix("##")) == 1 for token in others) > 0.98 * len(others)


def test_its_embedding_is_no_identity_but_nearly_every_row_decodes_to_itself(report: AuditReport) -> None:
    geometry = report.evidence.geometry
    assert geometry is not None
    assert geometry.sampled_rows is None
    assert geometry.identity_distance == pytest.approx(0.9968, abs=1e-4)
    assert geometry.isotropy == pytest.approx(0.843, abs=1e-3)
    assert geometry.self_decoding_rate is not None
    assert geometry.self_decoding_rate > 0.99
