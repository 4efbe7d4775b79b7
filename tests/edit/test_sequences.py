"""Random sequences of edits and undos end in the bytes that the same edits give in memory."""

from __future__ import annotations

import copy
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bowline.checkpoint.formats.numpy_writer import Bits, save_safetensors
from bowline.edit import open_checkpoint, undo
from bowline.errors import TieError, UsageError

WTE, HEAD, REST, NORM = "transformer.wte.weight", "lm_head.weight", "transformer.h.0.mlp.c_fc.weight", "ln_f.weight"
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


@dataclass
class InMemory:
    """The same checkpoint as torch tensors and a dict, edited plainly."""

    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]
    before: list[InMemory] = field(default_factory=list)

    def apply(self, edit: tuple[Any, ...]) -> bool:
        """Make the edit; False if it must be refused."""
        old = InMemory(dict(self.tensors), copy.deepcopy(self.config))
        verb, *arguments = edit
        if not getattr(self, verb)(*arguments):
            return False
        if (
            any(self.tensors.get(name) is not one for name, one in old.tensors.items())
            or old.config != self.config
            or set(self.tensors) != set(old.tensors)
        ):
            self.before.append(old)
        return True

    def untie(self) -> bool:
        self.config["tie_word_embeddings"] = False
        self.tensors.setdefault(HEAD, self.tensors[WTE])
        return True

    def tie(self) -> bool:
        if HEAD in self.tensors:
            if not torch.equal(*(self.tensors[name].view(torch.uint8) for name in (HEAD, WTE))):
                return False
            del self.tensors[HEAD]
        self.config["tie_word_embeddings"] = True
        return True

    def resize(self, size: int) -> bool:
        old = self.config["vocab_size"]
        if size <= self.config["eos_token_id"]:
            return False
        for name in {WTE, HEAD} & set(self.tensors):
            rows = self.tensors[name]
            if size != old:
                new = rows[7 % old].expand(max(0, size - old), -1)
                self.tensors[name] = torch.cat([rows[:size], new]).contiguous()
        self.config["vocab_size"] = size
        return True

    def cast(self, dtype: str) -> bool:
        for name, one in self.tensors.items():
            if one.dtype is not DTYPES[dtype]:
                self.tensors[name] = one.to(DTYPES[dtype])
        return True


EDITS = st.one_of(
    st.tuples(st.just("untie")),
    st.tuples(st.just("tie")),
    st.tuples(st.just("resize"), st.integers(8, 40)),
    st.tuples(st.just("cast"), st.sampled_from(sorted(DTYPES))),
    st.tuples(st.just("undo")),
)


def write(place: Path, model: InMemory, shards: int) -> None:
    names = sorted(model.tensors)
    homes = {name: f"model-{at % shards + 1:05d}-of-{shards:05d}.safetensors" for at, name in enumerate(names)}
    for file in set(homes.values()):
        mine = {
            name: Bits(NAMES[one.dtype], one.view({2: torch.uint16, 4: torch.uint32}[one.element_size()]).numpy())
            for name, one in model.tensors.items()
            if homes[name] == file
        }
        save_safetensors(place / ("model.safetensors" if shards == 1 else file), mine, {"format": "pt"})
    if shards > 1:
        size = sum(one.nbytes for one in model.tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": homes}
        (place / "model.safetensors.index.json").write_text(json.dumps(index))
    (place / "config.json").write_text(json.dumps(model.config))


def check(place: Path, model: InMemory) -> None:
    with open_checkpoint(place) as checkpoint:
        assert checkpoint.lints == ()
        assert dict(checkpoint.config or {}) == model.config
        assert set(checkpoint.tensors) == set(model.tensors)
        for name, one in model.tensors.items():
            assert checkpoint.tensors[name].dtype == NAMES[one.dtype]
            assert checkpoint.bits(name).tobytes() == one.contiguous().view(torch.uint8).numpy().tobytes()


@settings(max_examples=40, deadline=None)
@given(edits=st.lists(EDITS, max_size=6), shards=st.integers(1, 3), diverged=st.booleans(), seed=st.integers(0, 9))
def test_a_sequence_of_edits_gives_the_bytes_of_the_same_edits_in_memory(
    edits: list[tuple[Any, ...]], shards: int, diverged: bool, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    tensors = {
        WTE: torch.randn(20, 3, generator=draw),
        REST: torch.randn(3, 5, generator=draw).half(),
        NORM: torch.randn(3, generator=draw),
    }
    if diverged:
        tensors[HEAD] = torch.randn(20, 3, generator=draw)
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 20, "eos_token_id": 9}
    model = InMemory(tensors, config | {"tie_word_embeddings": not diverged})
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory) / "model"
        place.mkdir()
        write(place, model, shards)
        for edit in edits:
            if edit == ("undo",):
                if model.before:
                    undo(place)
                    last = model.before.pop()
                    model.tensors, model.config = last.tensors, last.config
            else:
                run(place, model, edit)
            check(place, model)


def run(place: Path, model: InMemory, edit: tuple[Any, ...]) -> None:
    verb, *arguments = edit
    options = {"new_rows": f"copy:{7 % model.config['vocab_size']}"} if verb == "resize" else {}
    trial = InMemory(dict(model.tensors), copy.deepcopy(model.config), list(model.before))
    allowed = trial.apply(edit)
    try:
        with open_checkpoint(place) as checkpoint:
            chain = getattr(checkpoint.edit(), verb)(*arguments, **options)
            if chain.plan().changes:
                chain.commit(in_place=True)
    except (TieError, UsageError):
        assert not allowed
    else:
        assert allowed
        model.tensors, model.config, model.before = trial.tensors, trial.config, trial.before


def test_the_model_in_memory_is_not_trivial() -> None:
    model = InMemory({WTE: torch.zeros(20, 3)}, {"vocab_size": 20, "eos_token_id": 9})
    assert model.apply(("untie",))
    assert not model.apply(("resize", 9))
    assert np.shape(model.tensors[HEAD]) == (20, 3)
