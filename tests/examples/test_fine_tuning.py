"""The recipes for Trainer, accelerate and Lightning: the losses and weights of a plain loop, and a tie that holds."""

from __future__ import annotations

import functools
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import bowline
from bowline.errors import TieError
from tests.examples.plain_loop import plainly_trained, rows_of
from tests.examples.runs import largest_difference, losses_in, write_model
from tests.torchrun import ROOT, under_torchrun

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.usefixtures("quiet_transformers")
NEAR = 1e-5
STEPS, ROWS, LENGTH, LEARNING_RATE = 10, 4, 16, 1e-3
RECIPES = ("trainer", "accelerate", "lightning")
TEXT = ROOT / "CONTRIBUTING.md"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("fine-tuning")
    write_model(place / "model")
    return place


@pytest.fixture(scope="module")
def expected(place: Path) -> list[float]:
    batches = rows_of(place / "model", TEXT, length=LENGTH, rows=ROWS, steps=STEPS)
    return plainly_trained(place / "model", batches, place / "plain", learning_rate=LEARNING_RATE)


def options(model: Path, out: Path, text: Path = TEXT, rows: int = ROWS) -> list[str]:
    given = ["--model", str(model), "--text", str(text), "--out", str(out), "--length", str(LENGTH)]
    return [*given, "--rows", str(rows), "--steps", str(STEPS), "--learning-rate", str(LEARNING_RATE)]


def run(recipe: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as `python examples/NAME.py` runs it, in this process; gives what it exits with."""
    monkeypatch.setattr(sys, "argv", [recipe, *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples" / f"fine_tune_{recipe}.py"), run_name="__main__")
    return ended.value.code


def clean(checkpoint: Path) -> bool:
    return not [finding for finding in bowline.audit(checkpoint).findings if finding.severity != "info"]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("backend", ["auto", "chunked"])
def test_losses_and_weights_are_those_of_a_plain_loop(
    recipe: str,
    backend: Any,
    place: Path,
    expected: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import transformers

    # a table as small as this one's would take the backend that makes all logits
    monkeypatch.setattr(bowline, "use_tied_loss", functools.partial(bowline.use_tied_loss, backend=backend))
    saved = place / f"{recipe} {backend}"
    assert run(recipe, options(place / "model", saved), monkeypatch) == 0
    printed = capsys.readouterr().out
    assert losses_in(printed) == pytest.approx(expected, abs=NEAR)
    assert f"{STEPS} guarded steps; backend '{backend}'" in printed
    ran = "chunked" if backend == "chunked" else "logits"
    assert f"losses without full logits: {STEPS} by '{ran}'; full logits: 0" in printed
    assert largest_difference(place / "plain", saved) < NEAR

    assert clean(saved)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(saved)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert transformers.AutoTokenizer.from_pretrained(saved)("knot")["input_ids"]
    own = list(saved.glob("checkpoint-*"))  # the Trainer's, to resume from
    assert len(own) == (recipe == "trainer")
    assert all(clean(one) for one in own)


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_untied_model_is_refused_before_a_step(
    recipe: str, place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(place / "model")
    bowline.untie_weights(model)
    bowline.save_checkpoint(model, tmp_path / "untied")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "untied" / name).write_bytes((place / "model" / name).read_bytes())
    with pytest.raises(TieError, match="so there is nothing to guard"):
        run(recipe, options(tmp_path / "untied", tmp_path / "out"), monkeypatch)
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_text_that_is_too_short_is_refused(
    recipe: str, place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("knot")
    refused = run(recipe, options(place / "model", tmp_path / "out", tmp_path / "text"), monkeypatch)
    assert f"--text {tmp_path / 'text'}: expected {ROWS * LENGTH} tokens, got " in refused


def test_a_head_that_a_save_adds_gives_exit_code_1(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import transformers

    save = transformers.Trainer.save_model

    def adds_a_head(self: Any, *arguments: Any, **more: Any) -> None:
        save(self, *arguments, **more)
        if not arguments:  # not the Trainer's own call
            file = tmp_path / "out" / "model.safetensors"
            tensors = load_file(file)
            head = tensors["model.embed_tokens.weight"] + torch.randn(16, generator=torch.Generator().manual_seed(0))
            save_file({**tensors, "lm_head.weight": head}, file, {"format": "pt"})

    monkeypatch.setattr(transformers.Trainer, "save_model", adds_a_head)
    assert run("trainer", options(place / "model", tmp_path / "out"), monkeypatch) == 1
    assert capsys.readouterr().err.count("error BW101: ") == 1


@pytest.mark.distributed
def test_accelerate_trains_on_two_processes_as_on_one(place: Path, expected: list[float], tmp_path: Path) -> None:
    done = under_torchrun(
        "examples.fine_tune_accelerate", *options(place / "model", tmp_path / "out", rows=ROWS // 2), processes=2
    )
    assert losses_in(done.stdout) == pytest.approx(expected, abs=NEAR)
    assert largest_difference(place / "plain", tmp_path / "out") < NEAR
    assert clean(tmp_path / "out")
