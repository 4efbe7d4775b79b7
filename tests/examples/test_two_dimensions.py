"""FSDP2 and tensor parallelism on a mesh: the losses are one process's, also after a resume on another mesh."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from bowline.auditing import audit
from bowline.nn import find_ties, load_checkpoint, resize_vocab, save_checkpoint
from tests.examples.runs import TOKENS, largest_difference, losses, together, write_model

pytest.importorskip("transformers")
WITH_GLOO = torch.distributed.is_available() and torch.distributed.is_gloo_available()
pytestmark = [
    pytest.mark.skipif(not WITH_GLOO, reason="this torch has no gloo"),
    pytest.mark.usefixtures("quiet_transformers"),
]
NEAR = 1e-5
RATE = 1e-3
STEPS = 10
MESHES = ("1x2", "2x1", pytest.param("2x2", marks=pytest.mark.distributed))


def count(mesh: str) -> int:
    return math.prod(int(size) for size in mesh.split("x"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("two dimensions")
    write_model(place / "model")
    return place


def run(place: Path, mesh: str, out: str, *more: str, processes: int = 2, fails: bool = False) -> Any:
    """A run with an odd vocabulary, whose own checkpoints are beside what it saves."""
    given = ["--model", str(place / "model"), "--out", str(place / out), "--checkpoint", str(place / f"{out} steps")]
    given += ["--vocab-size", str(TOKENS + 1), "--mesh", mesh, "--length", "16", "--learning-rate", str(RATE)]
    return together("two_dimensions", *given, *more, processes=processes, fails=fails)


@pytest.fixture(scope="module")
def one_process(place: Path) -> list[float]:
    """The losses of transformers' model and torch's AdamW alone; `one` becomes the checkpoint."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(place / "model").train()
    resize_vocab(model, TOKENS + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    found = []
    for step in range(1, STEPS + 1):
        drawn = torch.Generator().manual_seed(step)
        tokens = torch.randint(TOKENS + 1, (4, 16), generator=drawn)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    save_checkpoint(model, place / "one")
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_trains_as_one_process(mesh: str, place: Path, one_process: list[float]) -> None:
    import transformers

    assert losses(run(place, mesh, mesh, processes=count(mesh))) == pytest.approx(one_process, abs=NEAR)
    assert largest_difference(place / mesh, place / "one") < NEAR
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(place / mesh)
    ours: Any = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(place / mesh))
    load_checkpoint(ours.eval(), place / mesh)
    assert find_ties(theirs).ties
    tokens = torch.arange(16)[None]
    assert torch.equal(theirs(tokens).logits, ours(tokens).logits)
    assert not [finding for finding in audit(place / mesh).findings if finding.severity != "info"]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("before", "after"), [("1x2", "2x1"), pytest.param("2x2", "1x2", marks=pytest.mark.distributed)]
)
def test_a_run_goes_on_on_another_mesh(before: str, after: str, place: Path, one_process: list[float]) -> None:
    name = f"{before} then {after}"
    first = losses(run(place, before, name, "--steps", "5", processes=count(before)))
    second = losses(run(place, after, name, processes=count(after)))
    assert (len(first), len(second)) == (5, 5)
    assert first + second == pytest.approx(one_process, abs=NEAR)
    assert largest_difference(place / name, place / "one") < NEAR


@pytest.mark.distributed
def test_unusable_meshes_are_refused(place: Path) -> None:
    done = run(place, "2x2", "refused", fails=True)
    assert "--mesh 2x2: expected dp x tp, such as 1x2, of all 2 processes" in done.stderr
    done = run(place, "2x1", "refused", "--rows", "3", fails=True)
    assert "--rows 3: expected a multiple of 2, the processes along dp" in done.stderr
