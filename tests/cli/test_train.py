"""`bowline train`, from options to a directory and back to text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from bowline.cli.generate import generate
from bowline.cli.train import TRY, TrainCommand, train
from bowline.errors import ConfigError, UsageError
from bowline.train.loop.run_log import read_log
from bowline.train.presets import FAMILIES
from tests.checkpoints import config as checkpoint_config
from tests.checkpoints import table, write
from tests.train.texts import library

TINY = {"model": {"n_embd": 16, "n_layer": 1, "n_head": 2}, "held_out_share": 0.2, "held_out_tokens": 256}

app = typer.Typer()
app.command(cls=TrainCommand)(train)
app.command()(generate)


def run(*arguments: str | Path | float, exit_code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["train", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == exit_code, result.output
    return result


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return library(tmp_path_factory.mktemp("text") / "library")


@pytest.fixture
def config(data: Path, tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    options = {"family": "gpt2", "data": [str(data)], "vocab_size": 400, "length": 32, "batch_size": 2, "steps": 4}
    path.write_text(json.dumps({**TINY, **options}))
    return path


def test_a_plan_the_log_where_it_is_and_what_to_try(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    lines = run("--config", config, "--out", out, "--seed", 3).stdout.splitlines()
    begins = [line.partition(" ")[0] for line in lines]
    assert begins[:6] == ["text", "tokens", "model", "weights", "optimizer", "training"]
    assert "6,400 (" in lines[2]
    assert "of them in the tied matrix, lm_head.weight <- transformer.wte.weight" in lines[2]
    assert "transformer.wte.weight (also lm_head.weight) is one parameter, with weight decay" in lines[4]
    assert lines[5].startswith("training  4 steps of 2 x 32 tokens")
    assert "step 4/4" in lines[-4]
    assert lines[-3].startswith("held-out perplexity ")
    assert lines[-3].endswith(f"after 4 steps; the model is in {out}")
    assert lines[-2:] == [
        f'try: bowline generate {out} "def "',
        f"     bowline audit {out}",
    ]
    assert [record["step"] for record in read_log(out / "log.jsonl")] == [1, 4]
    said = CliRunner().invoke(app, ["generate", str(out), "def ", "--max-new-tokens", "4"], catch_exceptions=False)
    assert said.exit_code == 0
    assert said.stdout.startswith("def")


def test_what_is_given_comes_before_the_file(config: Path, tmp_path: Path) -> None:
    run("--config", config, "--out", tmp_path / "out", "--steps", 2, "--untie", "--learning-rate", 0.01)
    content = json.loads((tmp_path / "out" / "run.json").read_text())["config"]
    assert (content["steps"], content["tie"], content["learning_rate"]) == (2, False, 0.01)
    assert (content["length"], content["vocab_size"]) == (32, 400)


def test_a_run_goes_on(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("--config", config, "--out", out)
    with pytest.raises(UsageError, match="already holds a run"):
        run("--config", config, "--out", out)
    assert "after 4 steps" in run("--config", config, "--out", out, "--resume").stdout
    with pytest.raises(UsageError, match="steps was 4 and is 9"):
        run("--config", config, "--out", out, "--resume", "--steps", 9)


def test_wrong_options_are_errors_of_ours(config: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for arguments, said in (
        (["--steps", "3"], "no family: expected one of"),
        ([], "no family: expected one of"),
        (["--family", "gpt2", "--head-bias", "unigram"], "the head of a gpt2 has no bias"),
        (["--family", "gpt2", "--recipe", "t6"], "--recipe 't6'"),
        (["--family", "gpt2", "--data", str(tmp_path / "none")], "none: does not exist"),
        (["--config", str(tmp_path / "none.json")], "none.json: cannot be read"),
        (["--config", str(config), "--device", "abacus"], "--device 'abacus'"),
        (["--config", str(config), "--length", "90000"], "--length 90000: expected a text of at least one window"),
    ):
        with pytest.raises(UsageError) as error:
            run(*arguments, "--out", out)
        assert said in str(error.value)
    strange = tmp_path / "strange.json"
    strange.write_text(json.dumps({"family": "gpt2", "lenght": 3}))
    with pytest.raises(
        UsageError, match=r"strange\.json: 'lenght' is not a setting of a training run .*perhaps length"
    ):
        run("--config", strange, "--out", out)
    assert not (out / "model.safetensors").exists()


def test_an_error_names_what_was_given_as_it_was_given(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for arguments, said in (
        (["--mask-share", "0.3"], "--mask-share 0.3: a gpt2 is trained without masking"),
        (["--tokenizer", "x", "--vocab-size", "500"], "--tokenizer and --vocab-size: a given tokenizer has its own"),
        (["--tokenizer", "x"], "--tokenizer and vocab_size: a given tokenizer has its own"),  # the second by the file
        (["--untie", "--untie-at-step", "2"], "--untie-at-step and --untie: there is no tie to undo"),
        (["--steps", "0"], "--steps 0: expected a whole number from 1"),
    ):
        with pytest.raises(UsageError) as error:
            run("--config", config, *arguments, "--out", out)
        assert str(error.value).startswith(said)
    strange = tmp_path / "strange.json"
    strange.write_text(json.dumps({"family": "gpt2", "steps": 0}))
    with pytest.raises(UsageError, match=r"^steps=0: expected"):
        run("--config", strange, "--out", out)


def test_a_short_model_can_be_tried_as_the_last_line_says(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("--config", config, "--out", out, "--length", 16)
    said = CliRunner().invoke(app, ["generate", str(out), "def "], catch_exceptions=False)
    assert said.exit_code == 0


def test_the_family_of_a_checkpoint_to_fine_tune_is_read_from_it(config: Path, data: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    run("--config", config, "--out", first, "--steps", 2)
    more: list[str | Path | float] = ["--data", data, "--steps", 2, "--length", 32, "--batch-size", 2]
    run("--init-from", first, *more, "--out", tmp_path / "second")
    content = json.loads((tmp_path / "second" / "run.json").read_text())["config"]
    assert (content["family"], content["init_from"]) == ("gpt2", str(first))
    with pytest.raises(
        ConfigError, match=r"expected a checkpoint of the family bert, got .*gpt2 \(help: --family gpt2"
    ):
        run("--family", "bert", "--init-from", first, "--data", tmp_path / "no text", "--out", tmp_path / "third")
    assert not (tmp_path / "third").exists()


@pytest.mark.parametrize("family", [(), ("--family", "gpt2")], ids=["inferred", "given"])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "roberta"])
def test_a_family_without_a_model_here_is_refused_before_text_or_weights_are_read(
    model_type: str, family: tuple[str, ...], data: Path, tmp_path: Path
) -> None:
    place = tmp_path / "llama"
    write(place, {"model.embed_tokens.weight": table()}, checkpoint_config("SomeForCausalLM", model_type))
    with pytest.raises(ConfigError) as error:
        run(*family, "--init-from", place, "--data", tmp_path / "no text", "--out", tmp_path / "out")
    assert f"{place}: config: model_type is {model_type!r}" in error.value.message
    assert "Bowline has no model" in error.value.message
    assert "bowline.use_tied_loss(model)" in str(error.value.help)
    assert "--tokenizer" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_an_option_that_is_none_ends_with_two(tmp_path: Path) -> None:
    run("--family", "gpt3", "--out", tmp_path, exit_code=2)
    run("--family", "gpt2", exit_code=2)


def test_what_was_stopped_says_where_it_can_go_on(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bowline.train.loop.run_log import Shown

    def stop(self: Shown, step: int) -> None:
        raise KeyboardInterrupt("ended by Ctrl-C after step 1: nothing is saved")

    monkeypatch.setattr(Shown, "step", stop)
    result = run("--config", config, "--out", tmp_path / "out", exit_code=130)
    assert "ended by Ctrl-C after step 1" in result.stderr


def test_what_was_stopped_at_once_says_so_too(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bowline.train.loop.run_log import Shown

    def stop(self: Shown, step: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Shown, "step", stop)
    result = run("--config", config, "--out", tmp_path / "out", exit_code=130)
    assert result.stderr.splitlines()[-1].startswith("stopped; --resume continues")


def test_the_command_knows_the_families() -> None:
    assert f"--family <{'|'.join(FAMILIES)}>" in run("--help").stdout
    assert set(TRY) == set(FAMILIES)
