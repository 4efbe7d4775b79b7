"""TRL's SFTTrainer: the losses and weights of a plain loop over the completions, and a tie that holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import bowline
from tests.examples.plain_loop import Batch, plainly_trained
from tests.examples.runs import largest_difference, losses_in, write_model
from tests.torchrun import ROOT

TRL = ROOT / ".peers" / "trl"
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.pipelines,
    pytest.mark.usefixtures("quiet_transformers"),
    pytest.mark.skipif(not TRL.exists(), reason="trl is not unpacked in .peers/trl: run `make pipelines`"),
]
NEAR = 1e-5
STEPS, ROWS, LEARNING_RATE = 10, 4, 1e-3
PAIRS = [
    {"prompt": f"Knot {number}: when does the rope", "completion": f" return{' around the rail' * (number % 5)}"}
    for number in range(STEPS * ROWS)
]


def sft(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A run of the script in an environment that has TRL."""
    command = [sys.executable, str(ROOT / "examples" / "fine_tune_sft.py"), *arguments]
    return subprocess.run(
        [*command, "--steps", str(STEPS), "--rows", str(ROWS), "--learning-rate", str(LEARNING_RATE)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(TRL), str(ROOT / "src")]),
            "HF_HOME": str(place / "home"),
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def batches(model: Path) -> list[Batch]:
    """The tokens of prompt, completion and end, padded at the right; the labels are of completion and end."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    found = []
    for start in range(0, len(PAIRS), ROWS):
        ids, labels, mask = [], [], []
        for pair in PAIRS[start : start + ROWS]:
            prompt, completion = (tokenizer(pair[part])["input_ids"] for part in ("prompt", "completion"))
            row = torch.tensor([*prompt, *completion, tokenizer.eos_token_id])
            ids.append(row)
            labels.append(torch.where(torch.arange(len(row)) < len(prompt), -100, row))
            mask.append(torch.ones_like(row))
        padded = [(ids, tokenizer.pad_token_id), (labels, -100), (mask, 0)]
        one, other, third = (torch.nn.utils.rnn.pad_sequence(rows, True, value) for rows, value in padded)
        found.append((one, other, third))
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sft")
    write_model(place / "model")
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "pad_token": "<|end|>"}
    (place / "model" / "tokenizer_config.json").write_text(json.dumps(special))
    (place / "pairs").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    return place


def test_losses_and_weights_are_those_of_a_plain_loop(place: Path) -> None:
    import transformers

    expected = plainly_trained(place / "model", batches(place / "model"), place / "plain", learning_rate=LEARNING_RATE)
    saved = place / "out"
    done = sft(place, "--model", str(place / "model"), "--pairs", str(place / "pairs"), "--out", str(saved))
    assert done.returncode == 0, done.stderr
    assert losses_in(done.stdout) == pytest.approx(expected, abs=NEAR)
    assert f"{STEPS} guarded steps" in done.stdout
    assert largest_difference(place / "plain", saved) < NEAR

    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(saved)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    for checkpoint in (saved, saved / f"checkpoint-{STEPS}"):  # the Trainer's own, to resume from
        assert not [finding for finding in bowline.audit(checkpoint).findings if finding.severity != "info"]


def test_an_untied_model_is_refused_before_a_step(place: Path, tmp_path: Path) -> None:
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(place / "model")
    bowline.untie_weights(model)
    bowline.save_checkpoint(model, tmp_path / "untied")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "untied" / name).write_bytes((place / "model" / name).read_bytes())
    done = sft(
        place, "--model", str(tmp_path / "untied"), "--pairs", str(place / "pairs"), "--out", str(tmp_path / "out")
    )
    assert done.returncode == 1
    assert "bowline.errors.TieError: LlamaForCausalLM declares no ties and shares no parameters" in done.stderr
    assert not (tmp_path / "out" / "config.json").exists()
