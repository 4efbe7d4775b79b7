"""A few of the random GGUF files of `gguf_fuzz`, which is run by hand on many."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.formats import gguf_fuzz

GGUF = Path(__file__).parents[3] / ".peers" / "gguf"


def test_damaged_files_are_read_or_refused_by_a_clear_line() -> None:
    stands = gguf_fuzz.run(1500, seed=1)
    assert stands["refused by Bowline"] > 300
    assert stands.total() - stands["refused by Bowline"] > 300


@pytest.mark.real
def test_nothing_is_read_that_gguf_refuses_or_reads_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    if not GGUF.exists():
        pytest.skip("the package gguf is not here: run `make real`")
    monkeypatch.syspath_prepend(str(GGUF))
    stands = gguf_fuzz.run(2000, seed=2)
    assert stands["both read it"] > 300


def test_a_disagreement_names_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_fuzz, "read_by_gguf", lambda file: {})
    with pytest.raises(gguf_fuzz.DisagreementError, match="of seed 0: DisagreementError: read differently"):
        gguf_fuzz.run(50)
    monkeypatch.setattr(gguf_fuzz, "read_by_gguf", lambda file: None)
    with pytest.raises(gguf_fuzz.DisagreementError, match="Bowline reads what gguf refuses"):
        gguf_fuzz.run(50)
