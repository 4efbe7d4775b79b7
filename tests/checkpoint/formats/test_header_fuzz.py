"""Bowline's header reader and safetensors agree on random files."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .header_fuzz import (
    GENERATORS,
    REASONS_TO_BE_STRICTER,
    compare,
    main,
    mutated_bytes,
    mutated_file,
    safetensors_file,
    valid_file,
)

randoms = st.randoms(use_true_random=False)  # hypothesis makes the generators' choices, so that it can shrink them
ALLOWED = {"both read it", "both reject it", *REASONS_TO_BE_STRICTER}


def fuzz(examples: int) -> settings:
    """The same examples in every run, however slow the machine."""
    return settings(
        max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )


@fuzz(600)
@given(randoms)
def test_a_valid_file_is_read_alike(random: Random) -> None:
    assert compare(valid_file(random)) == "both read it"


@fuzz(1400)
@given(randoms)
def test_a_mutated_structure_is_read_alike_or_refused_for_a_reason(random: Random) -> None:
    assert compare(mutated_file(random)) in ALLOWED


@fuzz(1000)
@given(randoms)
def test_mutated_bytes_are_read_alike_or_refused_for_a_reason(random: Random) -> None:
    assert compare(mutated_bytes(random)) in ALLOWED


@fuzz(300)
@given(st.binary(max_size=40), st.binary(max_size=8))
def test_arbitrary_bytes_are_read_alike_or_refused_for_a_reason(header: bytes, data: bytes) -> None:
    assert compare(safetensors_file(header, data)) in ALLOWED


def test_the_generators_reach_every_reason_and_both_answers() -> None:
    generators = list(GENERATORS.values())
    outcomes = {compare(generators[index % len(generators)](Random(index))) for index in range(3000)}
    assert outcomes == ALLOWED


def test_the_long_run_reports_and_exits_with_zero(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--count", "50"]) == 0
    assert "50 headers, seed 0" in capsys.readouterr().out


def test_the_long_run_exits_with_one_on_a_disagreement(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tests.checkpoint.formats.header_fuzz.reasons_to_be_stricter", lambda file: ["a reason that is none"]
    )
    assert main(["--count", "50"]) == 1
    assert "not refused in spite of a reason that is none" in capsys.readouterr().out
