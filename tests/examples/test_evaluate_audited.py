"""The evaluation that refuses a checkpoint with errors: a right perplexity, and no perplexity of another model."""

from __future__ import annotations

import json
import math
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.examples.runs import write_model
from tests.torchrun import ROOT

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("quiet_transformers")
TEXT = ROOT / "CONTRIBUTING.md"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    return tmp_path / "model"


def evaluate(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> Any:
    """The script as `python examples/evaluate_audited.py` runs it, in this process; gives what it exits with."""
    monkeypatch.setattr(sys, "argv", ["evaluate_audited", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples" / "evaluate_audited.py"), run_name="__main__")
    return ended.value.code


def change_config(model: Path, **values: object) -> None:
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def add_head(model: Path) -> None:
    """A head of its own, trained beside the table, as a merged adapter leaves it."""
    file = model / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"] + torch.randn(16, generator=torch.Generator().manual_seed(0))
    save_file({**tensors, "lm_head.weight": head}, file, {"format": "pt"})


def test_the_perplexity_is_that_of_float64_token_by_token(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    assert evaluate(monkeypatch, model, "--text", TEXT, "--length", 100) == 0
    found = re.fullmatch(r"perplexity (\S+) of (\d+) tokens\n", capsys.readouterr().out)
    assert found is not None

    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    ids = transformers.AutoTokenizer.from_pretrained(model)(TEXT.read_text(encoding="utf-8"))["input_ids"]
    losses = []
    for start in range(0, len(ids), 100):
        window = ids[start : start + 100]
        logits = plain(input_ids=torch.tensor([window])).logits[0].detach().numpy()
        for place, token in enumerate(window[1:]):
            losses.append(np.logaddexp.reduce(logits[place]) - logits[place][token])
    assert int(found[2]) == len(losses)
    assert float(found[1]) == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)


def test_a_head_that_would_be_drawn_at_random_is_refused_before_it_is_loaded(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    change_config(model, tie_word_embeddings=False)
    drawn: Any = transformers.AutoModelForCausalLM.from_pretrained(model)
    assert drawn.lm_head.weight.std() < drawn.model.embed_tokens.weight.std() / 2  # what would have been evaluated

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)
    assert evaluate(monkeypatch, model, "--text", TEXT) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "error BW102: " in printed.err
    assert printed.err.endswith(f"error: {model}: not evaluated, because its audit found an error\n")


def test_a_second_head_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add_head(model)
    assert evaluate(monkeypatch, model, "--text", TEXT) == 1
    printed = capsys.readouterr()
    assert (printed.out, "error BW101: " in printed.err) == ("", True)


def test_a_warning_is_printed_and_the_model_evaluated(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = model / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})
    assert evaluate(monkeypatch, model, "--text", TEXT) == 0
    printed = capsys.readouterr()
    assert "warning BW" in printed.err
    assert printed.out.startswith("perplexity ")


@pytest.mark.parametrize("what", ["no checkpoint", "no text", "not UTF-8", "too short"])
def test_what_cannot_be_read_gives_exit_code_2(
    what: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.write_bytes({"not UTF-8": b"\xff", "too short": b"k"}.get(what, b"knot"))
    place, file = (
        tmp_path / "none" if what == "no checkpoint" else model,
        tmp_path / "none" if what == "no text" else text,
    )
    assert evaluate(monkeypatch, place, "--text", file) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
