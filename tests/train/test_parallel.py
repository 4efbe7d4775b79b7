"""`--parallel` and `--mesh`: by every scheme a run is that of one process, and goes on by any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bowline.auditing import audit
from bowline.errors import UsageError
from bowline.models import GPT2LMHeadModel
from bowline.train.loop.run_checkpoints import MODEL, OPTIMIZER, newest
from bowline.train.parallel.mesh_sizes import mesh_sizes, stated_mesh
from tests.torchrun import under_torchrun
from tests.train.parallel_worker import CHANGES, FAMILIES, FOUR, OPTIONS, REFUSED, TWO, run
from tests.train.texts import library

needs_gloo = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="this torch has no gloo"
)
BOUND = 1e-9
"""The models are in float64."""
SCHEMES = [
    *((2, scheme) for scheme in TWO),
    *(pytest.param(4, scheme, marks=pytest.mark.distributed) for scheme in FOUR),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[int, Path] = {}

    def of(processes: int) -> Path:
        if processes not in made:
            made[processes] = tmp_path_factory.mktemp(f"parallel-{processes}")
            under_torchrun("tests.train.parallel_worker", str(made[processes]), processes=processes)
        return made[processes]

    return of


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[Any]]]:
    out = tmp_path_factory.mktemp("alone")
    return {name: (out / name, list(run(name, out / name).history)) for name in FAMILIES}


def expect_same_state(place: Path, wanted: Path) -> None:
    mine, theirs = newest(place / "checkpoints"), newest(wanted / "checkpoints")
    assert mine is not None
    assert theirs is not None
    assert mine.step == theirs.step == OPTIONS["steps"]
    for file in (MODEL, OPTIMIZER):
        found, expected = mine.tensors(file), theirs.tensors(file)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=BOUND)


@needs_gloo
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("processes", "scheme"), SCHEMES)
def test_every_step_is_that_of_one_process(
    processes: int, scheme: str, name: str, places: Any, alone: dict[str, Any]
) -> None:
    place = places(processes)
    history, wanted = torch.load(place / "0.pt")[f"{scheme} {name}"], alone[name][1]
    for key in ("loss", "gradient_norm", "held_out_loss"):
        seen, expected = ([record[key] for record in each if key in record] for each in (history, wanted))
        assert seen == pytest.approx(expected, abs=BOUND)
    assert {record["tie"] for record in history} == {"untied" if name.endswith("untied") else "tied"}
    expect_same_state(place / f"{scheme} {name}", alone[name][0])


@needs_gloo
@pytest.mark.parametrize("change", CHANGES)
def test_a_stopped_run_goes_on_by_another_scheme(change: str, places: Any, alone: dict[str, Any]) -> None:
    place = places(2)
    for rank in range(2):
        assert "after step 4: the checkpoint of step 4 is complete" in torch.load(place / f"{rank}.pt")[change]
    expect_same_state(place / change, alone["gpt2"][0])


@needs_gloo
def test_it_goes_on_on_one_process(places: Any, alone: dict[str, Any], tmp_path: Path) -> None:
    last = places(2) / "pp then tp" / "checkpoints" / "step-00000004"
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / last.name).symlink_to(last)
    run("gpt2", tmp_path)
    expect_same_state(tmp_path, alone["gpt2"][0])


@needs_gloo
@pytest.mark.parametrize(
    ("case", "seen"),
    [
        ("places", "mesh='fsdp=3': has 3 places for 2 processes, expected one for each"),
        ("shares", "accumulation=3 on 2 processes with batches of their own: expected a multiple of 2"),
        ("untie", "untie_at_step with fsdp"),
        ("compile", "compile with tp"),
    ],
)
def test_what_does_not_fit_is_refused_on_every_process(case: str, seen: str, places: Any) -> None:
    assert case in REFUSED
    for rank in range(2):
        assert seen in torch.load(places(2) / f"{rank}.pt")["refused"][case]


@needs_gloo
@pytest.mark.parametrize("scheme", ["fsdp", "tp", "pp"])
def test_the_command_leaves_a_model_for_everybody(scheme: str, tmp_path: Path) -> None:
    text, out = library(tmp_path / "text"), tmp_path / "run"
    small = ["--vocab-size", "301", "--length", "16", "--batch-size", "2", "--accumulation", "2", "--steps", "3"]
    command = ["train", "--family", "gpt2", "--data", str(text), "--out", str(out), "--parallel", scheme, *small]
    done = under_torchrun("bowline", *command)
    assert done.stdout.count("the model is in") == 1
    assert audit(out).clean
    config = json.loads((out / "config.json").read_text())
    assert (config["architectures"], config["tie_word_embeddings"]) == (["GPT2LMHeadModel"], True)
    ids = torch.arange(12)[None] + 30
    ours, theirs = (
        kind.from_pretrained(out).eval()(input_ids=ids).logits
        for kind in (GPT2LMHeadModel, transformers.GPT2LMHeadModel)
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("", "'' is no dimension, expected ddp, fsdp, tp, pp"),
        ("fsd=2", "perhaps fsdp"),
        ("fsdp", "fsdp='', expected a whole number from 1"),
        ("fsdp=0", "expected a whole number from 1"),
        ("fsdp=-2", "expected a whole number from 1"),
        ("fsdp=²", "expected a whole number from 1"),
        ("fsdp=99999999999", "expected a whole number from 1"),
        ("tp=2,tp=2", "states tp twice"),
        ("ddp=2,tp=2", "ddp and tp are not combined (help: combine tp with fsdp)"),
        ("pp=2,tp=2", "pp and tp are not combined (help: combine pp with fsdp)"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(text: str, seen: str) -> None:
    with pytest.raises(UsageError) as caught:
        stated_mesh(text)
    assert seen in str(caught.value)
    assert caught.value.argument == "mesh"


def test_a_mesh_is_read_in_any_order() -> None:
    assert list(stated_mesh(" tp=2, fsdp=4 ").items()) == [("fsdp", 4), ("tp", 2)]
    assert mesh_sizes("pp", None, 3) == {"pp": 3}
