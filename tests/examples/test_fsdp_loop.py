"""The plain training loop: two processes train the model that one process trains, and save it for everybody."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from bowline.auditing import audit
from bowline.nn import find_ties, load_checkpoint
from tests.examples.runs import TOKENS, alone, largest_difference, losses, together, write_model, write_text
from tests.torchrun import ROOT

pytest.importorskip("transformers")
WITH_GLOO = torch.distributed.is_available() and torch.distributed.is_gloo_available()
pytestmark = [
    pytest.mark.skipif(not WITH_GLOO, reason="this torch has no gloo"),
    pytest.mark.usefixtures("quiet_transformers"),
]
STEPS = 10
NEAR = 1e-5
SIZES = {"even": TOKENS, "odd": TOKENS + 1}
CASES = [
    ("odd", "fsdp"),
    ("odd", "tp"),
    pytest.param("even", "fsdp", marks=pytest.mark.thorough),
    pytest.param("even", "tp", marks=pytest.mark.thorough),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, the text, and what every run saved."""
    place = tmp_path_factory.mktemp("loop")
    write_model(place / "model")
    write_text(place / "text")
    return place


def options(place: Path, size: str, out: str) -> list[str]:
    given = ["--model", str(place / "model"), "--text", str(place / "text"), "--out", str(place / out)]
    return [*given, "--vocab-size", str(SIZES[size]), "--length", "16", "--learning-rate", "1e-3"]


@pytest.fixture(scope="module")
def ran(place: Path) -> Callable[[str, str], list[float]]:
    """Gives the losses of a run with a vocabulary: on one process ("one"), or on two; each runs once."""

    @cache
    def losses_of(size: str, parallel: str) -> list[float]:
        given = options(place, size, f"{size} {parallel}")
        one = parallel == "one"
        return losses(alone("fsdp_loop", *given) if one else together("fsdp_loop", *given, "--parallel", parallel))

    return losses_of


@pytest.mark.parametrize(("size", "parallel"), CASES)
def test_two_processes_train_as_one(
    size: str, parallel: str, place: Path, ran: Callable[[str, str], list[float]]
) -> None:
    expected = ran(size, "one")
    assert len(expected) == STEPS
    assert expected[-1] < expected[0] - 0.01, "it learned"
    assert ran(size, parallel) == pytest.approx(expected, abs=NEAR)
    assert largest_difference(place / f"{size} {parallel}", place / f"{size} one") < NEAR


@pytest.mark.parametrize(("size", "parallel"), CASES)
def test_transformers_loads_what_was_saved(
    size: str, parallel: str, place: Path, ran: Callable[[str, str], list[float]]
) -> None:
    import transformers

    ran(size, parallel)
    saved = place / f"{size} {parallel}"
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(saved)
    ours: Any = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(saved)).eval()
    load_checkpoint(ours, saved)
    assert find_ties(theirs).ties
    tokens = transformers.AutoTokenizer.from_pretrained(saved)("a knot", return_tensors="pt")["input_ids"]
    logits = theirs(tokens).logits
    assert logits.shape[-1] == SIZES[size]
    assert torch.equal(logits, ours(tokens).logits)
    assert not [finding for finding in audit(saved).findings if finding.severity != "info"]


def test_it_is_short() -> None:
    assert len((ROOT / "examples" / "fsdp_loop.py").read_text().splitlines()) < 100


@pytest.mark.distributed
def test_without_a_text_token_ids_are_drawn(place: Path) -> None:
    given = ["--model", str(place / "model"), "--out", str(place / "drawn"), "--steps", "2"]
    first, second = (losses(alone("fsdp_loop", *given)) for _ in range(2))
    assert len(first) == 2 and first == second


@pytest.mark.distributed
def test_unusable_options_are_refused(place: Path) -> None:
    given = ["--model", str(place / "model"), "--out", str(place / "refused")]
    uneven = together("fsdp_loop", *given, "--rows", "3", fails=True)
    assert "--rows 3: expected a multiple of 2, the number of processes" in uneven.stderr
    unknown = alone("fsdp_loop", *given, "--parallel", "pp", fails=True)
    assert "invalid choice: 'pp'" in unknown.stderr
    few = alone("fsdp_loop", *given, "--text", str(place / "text"), "--vocab-size", "300", fails=True)
    assert "expected one token at least, and token ids below 300" in few.stderr
    small = alone("fsdp_loop", *given, "--vocab-size", "1", fails=True)
    assert "config.bos_token_id is token 1, which would be dropped" in small.stderr
    assert not (place / "refused").exists()
