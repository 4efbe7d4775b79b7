"""lm-evaluation-harness behind an audit: a right result, and no result of a checkpoint with errors."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.edit.tokenizer.small_tokenizers import TRAINING
from tests.examples.runs import write_model
from tests.torchrun import ROOT

PEERS = [ROOT / ".peers" / name for name in ("lm-eval", "trl", "sarif")]  # datasets and lxml are in the last two
TASK = """
task: knots
dataset_path: json
dataset_kwargs: {data_files: {test: DOCUMENTS}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
"""
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.pipelines,
    pytest.mark.usefixtures("quiet_transformers"),
    pytest.mark.skipif(not all(map(Path.exists, PEERS)), reason="lm-eval is not in .peers: run `make pipelines`"),
]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A model, and a task of documents that are shorter than its context."""
    write_model(tmp_path / "model")
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(special))
    (tmp_path / "task").mkdir()
    (tmp_path / "documents").write_text("".join(json.dumps({"text": text}) + "\n" for text in TRAINING))
    (tmp_path / "task" / "knots.yaml").write_text(TASK.replace("DOCUMENTS", str(tmp_path / "documents")))
    return tmp_path


def harness(place: Path, model: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / "evaluate_harness.py"), str(place / model)]
    command += ["--tasks", "knots", "--include-path", str(place / "task"), "--dtype", "float32"]
    path = os.pathsep.join([*map(str, PEERS), str(ROOT / "src")])
    return subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path, "HF_HOME": str(place / "home"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_the_perplexity_is_that_of_a_plain_forward(place: Path) -> None:
    import transformers

    done = harness(place, "model")
    assert done.returncode == 0, done.stderr
    shown = re.search(r"\|byte_perplexity\|[^|]*\|\s*([\d.]+)\|", done.stdout)
    assert shown is not None, done.stdout

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float64)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(place / "model")
    total = 0.0
    for text in TRAINING:  # each token predicted from those before, the first from the end of a text
        ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer(text)["input_ids"]]])
        logits = model(input_ids=ids).logits[0, :-1]
        total += float(logits.log_softmax(-1).gather(1, ids[0, 1:, None]).sum())
    size = sum(len(text.encode()) for text in TRAINING)
    assert float(shown[1]) == pytest.approx(math.exp(-total / size), abs=1e-4)


def test_a_checkpoint_with_an_error_is_refused_before_it_is_loaded(place: Path) -> None:
    config = place / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": False}))
    done = harness(place, "model")
    assert (done.returncode, done.stdout) == (1, "")
    assert "error BW102: " in done.stderr
    assert "because its audit found an error" in done.stderr


def test_a_place_without_a_checkpoint_gives_exit_code_2(place: Path) -> None:
    done = harness(place, "none")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
