"""transformers' Trainer with accelerate's FSDP2: two processes train the tied model that one process trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bowline.auditing import audit
from bowline.nn import find_ties, load_checkpoint
from tests.examples.runs import TOKENS, alone, largest_difference, losses, together, write_model

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
WITH_GLOO = torch.distributed.is_available() and torch.distributed.is_gloo_available()
pytestmark = [
    pytest.mark.skipif(not WITH_GLOO, reason="this torch has no gloo"),
    pytest.mark.usefixtures("quiet_transformers"),
]
NEAR = 1e-5
SIZES = {"even": TOKENS, "odd": TOKENS + 1}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("trainer")
    write_model(place / "model")
    return place


def options(place: Path, size: str, out: str) -> list[str]:
    given = ["--model", str(place / "model"), "--out", str(place / out)]
    return [*given, "--vocab-size", str(SIZES[size]), "--length", "16", "--learning-rate", "1e-3"]


@pytest.mark.parametrize("size", ["odd", pytest.param("even", marks=pytest.mark.thorough)])
def test_two_processes_train_as_one(size: str, place: Path) -> None:
    import transformers

    expected = losses(alone("accelerate_trainer", *options(place, size, f"{size} one")))
    done = together("accelerate_trainer", *options(place, size, f"{size} two"))
    assert len(expected) == 10
    assert losses(done) == pytest.approx(expected, abs=NEAR)
    assert "FSDPLlamaForCausalLM after 10 guarded steps" in done.stdout
    assert "lm_head.weight <- model.embed_tokens.weight SHARED\n  note: both ends are Shard(dim=0)" in done.stdout
    assert largest_difference(place / f"{size} one", place / f"{size} two") < NEAR

    saved = place / f"{size} two"
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(saved)
    ours: Any = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(saved)).eval()
    load_checkpoint(ours, saved)
    assert find_ties(theirs).ties
    tokens = torch.arange(16)[None]
    assert torch.equal(theirs(tokens).logits, ours(tokens).logits)
    assert not [finding for finding in audit(saved).findings if finding.severity != "info"]


@pytest.mark.distributed
def test_rows_that_the_processes_cannot_share_are_refused(place: Path) -> None:
    done = together("accelerate_trainer", *options(place, "even", "refused"), "--rows", "3", fails=True)
    assert "--rows 3: expected a multiple of 2, the number of processes" in done.stderr
