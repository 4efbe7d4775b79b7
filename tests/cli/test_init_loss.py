"""`bowline init-loss`: the table, the sentences, the JSON, the plot, and what is said of what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bowline.cli import app
from bowline.errors import UsageError

SMALL = ["--vocab-size", "300", "--hidden-size", "64", "--layers", "1", "--draws", "2"]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["init-loss", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_line_and_a_sentence_for_each_recipe_and_tie() -> None:
    lines = run("--family", "t5", "--recipe", "t5x", "--recipe", "torch", *SMALL).splitlines()
    assert lines[0].split()[:4] == ["recipe", "head", "V", "d"]
    assert [line.split()[:4] for line in lines[1:5]] == [
        [recipe, tied, "300", "64"] for recipe in ("t5x", "torch") for tied in ("tied", "untied")
    ]
    assert lines[5] == ""
    assert [line.split(":")[0] for line in lines[6:]] == ["t5x, tied", "t5x, untied", "torch, tied", "torch, untied"]
    assert "explodes" in lines[8]


def test_of_several_sizes_a_sentence_says_which_it_is_about() -> None:
    lines = run("--family", "t5", "--recipe", "t5x", "--tied", *SMALL, "--vocab-size", "500").splitlines()
    assert [line.split()[2] for line in lines[1:3]] == ["300", "500"]
    assert [line.split(":")[0] for line in lines[4:]] == ["t5x, tied, V 500, d 64"]


def test_json_has_every_number() -> None:
    content = json.loads(run("--family", "gpt2", "--recipe", "vaswani", "--tied", "--output-format", "json", *SMALL))
    assert content["version"] == 1
    (row,) = content["rows"]
    assert (row["family"], row["recipe"], row["tied"], row["vocab_size"]) == ("gpt2", "vaswani", True, 300)
    assert row["measured"] == pytest.approx(row["predicted"], rel=0.2)
    assert row["standard_error"] > 0


def test_the_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "loss.svg"
    run("--family", "gpt2", "--recipe", "torch", "--plot", str(path), *SMALL)
    assert path.read_text().startswith("<?xml")
    with pytest.raises(UsageError, match=r"loss\.txt: expected a file name that ends in \.svg"):
        run("--family", "gpt2", "--recipe", "torch", "--plot", str(tmp_path / "loss.txt"), *SMALL)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--recipe", "none"], "--recipe 'none': expected one of"),
        (
            ["--recipe", "transformers-t5-forced-tie", "--untied"],
            "--recipe transformers-t5-forced-tie: not for an untied head",
        ),
        (["--vocab-size", "0"], "--vocab-size 0: expected at least 2"),
        (["--vocab-size", "100000000000"], "--vocab-size 100000000000: expected at most 2147483647"),
        (["--layers", "0"], "--layers 0: expected at least 1"),
        (["--layers", "20000"], "--layers 20000: expected at most 10000"),
        (["--draws", "-1"], "--draws -1: expected at least 0"),
    ],
)
def test_what_cannot_be_is_an_error_of_ours(arguments: list[str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        run("--family", "t5", *arguments)


def test_a_model_that_does_not_fit_into_memory_is_refused_with_the_option_that_helps() -> None:
    size = ["--vocab-size", "2147483647", "--hidden-size", "1048576"]
    with pytest.raises(UsageError, match="cannot be built") as caught:
        run("--family", "gpt2", "--recipe", "torch", "--tied", *size)
    assert caught.value.help == "use smaller sizes, or --draws 0 to predict only"
