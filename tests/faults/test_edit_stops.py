"""An edit in place, stopped at any system call that writes: what is there is the old checkpoint or the new one."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bowline.checkpoint.formats.numpy_writer import save_safetensors
from bowline.edit import CheckpointEdit, history, open_checkpoint, undo
from bowline.errors import CheckpointError
from tests.faults.system_calls import can_trace, run_until

pytestmark = pytest.mark.skipif(not can_trace(), reason="needs ptrace of a child, on Linux and x86-64")

EVERY = int(os.environ.get("BOWLINE_EDIT_STOPS_EVERY", "4"))
"""Of the points at which an edit can be stopped, one in so many is tried; 1 tries all."""
TOKENS = ["<s>", "</s>", *"abcdefghij", "ab", "abc", "de"]
EDITS: dict[str, Callable[[CheckpointEdit], CheckpointEdit]] = {
    "untie": lambda edit: edit.untie(),
    "resize": lambda edit: edit.resize(24),
    "prune": lambda edit: edit.prune(keep_tokens=edit.source.files.location + "/../keep.txt"),
}


def make(place: Path, *, sharded: bool) -> Path:
    """A tied GPT-2 of one file or of three, with a tokenizer."""
    place.mkdir()
    draw = np.random.default_rng(0)
    size = len(TOKENS)
    tensors = {
        "wte.weight": draw.standard_normal((size, 4)).astype(np.float32),
        "h.0.mlp.c_fc.weight": draw.standard_normal((4, 16)).astype(np.float32),
        "ln_f.weight": draw.standard_normal(4).astype(np.float32),
    }
    if sharded:
        names = {name: f"model-{at:05d}-of-00003.safetensors" for at, name in enumerate(tensors, 1)}
        for name, file in names.items():
            save_safetensors(place / file, {name: tensors[name]}, {"format": "pt"})
        index = {"metadata": {"total_size": sum(one.nbytes for one in tensors.values())}, "weight_map": names}
        (place / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        save_safetensors(place / "model.safetensors", tensors, {"format": "pt"})
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": size, "n_embd": 4}
    (place / "config.json").write_text(json.dumps(config | {"bos_token_id": 0, "eos_token_id": 1}))
    merges = [["a", "b"], ["ab", "c"], ["d", "e"]]
    model = {"type": "BPE", "vocab": {text: at for at, text in enumerate(TOKENS)}, "merges": merges}
    added = [
        {"id": at, "content": TOKENS[at], "special": True, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False}
        for at in (0, 1)
    ]
    (place / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": added, "model": model}))
    (place.parent / "keep.txt").write_text("abc\n")
    return place


def content(place: Path) -> dict[str, bytes]:
    """The files of the checkpoint, without the record of its edits."""
    files = (path for path in place.rglob("*") if path.is_file() and ".bowline" not in path.parts)
    return {str(path.relative_to(place)): path.read_bytes() for path in files}


def run(place: Path, edit: str) -> None:
    with open_checkpoint(place) as checkpoint:
        EDITS[edit](checkpoint.edit()).commit(in_place=True)


@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
@pytest.mark.parametrize("edit", EDITS)
def test_a_stop_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path: Path, edit: str, sharded: bool, record_property: Any
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    place = make(root / "model", sharded=sharded)
    old = content(place)
    kept = tmp_path / "kept"
    shutil.copytree(root, kept)
    run(place, edit)
    new = content(place)
    assert new != old
    undo(place)
    assert content(place) == old

    def again() -> None:
        shutil.rmtree(root)
        shutil.copytree(kept, root)

    again()
    points = run_until(lambda: run(place, edit), None)
    assert points > 30
    tried, seen = 0, set()
    for stop in range(1, points + 1, EVERY):
        again()
        if run_until(lambda: run(place, edit), stop) != stop:
            continue  # another name for the stage, and one call less
        tried += 1
        found = content(place)
        assert found in (old, new), f"stopped at write-type call {stop} of {points}: a mixture"
        seen.add(found == new)
        assert len(list(root.iterdir())) <= 3
        if found == old:
            run(place, edit)  # the next command cleans up, and works
        else:
            undo(place)
        assert content(place) == (new if found == old else old)
        assert sorted(path.name for path in root.iterdir()) == ["keep.txt", "model"]
        assert len(history(place)) == (found == old)
    assert seen == {False, True}
    record_property("points", points)
    where = f"{edit}, {'sharded' if sharded else 'single'}"
    sys.stdout.write(f"{where}: stopped at {tried} of {points} points, no mixture\n")


def _race(place: str, edit: str, barrier: Any, results: Any) -> None:
    barrier.wait()
    try:
        run(Path(place), edit)
        results.put("won")
    except CheckpointError as error:
        results.put(error.message)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_of_two_edits_at_once_one_wins_and_the_other_says_so(tmp_path: Path) -> None:
    context = get_context("fork")
    rounds = 200 // (10 if EVERY > 1 else 1)
    words = set()
    for _ in range(rounds):
        place = make(tmp_path / "model", sharded=True)
        old = content(place)
        barrier, results = context.Barrier(2), context.Queue()
        racers = [
            context.Process(target=_race, args=(str(place), edit, barrier, results)) for edit in ("untie", "resize")
        ]
        for racer in racers:
            racer.start()
        outcomes = sorted(results.get(timeout=60) for _ in racers)
        for racer in racers:
            racer.join(60)
        wins = outcomes.count("won")
        assert wins in (1, 2), outcomes  # two, if one had ended before the other began
        words |= {outcome.rpartition(": ")[2] for outcome in outcomes if outcome != "won"}
        assert len(history(place)) == wins
        for _ in range(wins):
            undo(place)
        assert content(place) == old
        shutil.rmtree(place)
    assert words <= {
        "another process is editing it",
        "changed while the edit was prepared; nothing was changed",
    }, words
