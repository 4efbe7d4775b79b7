"""Builds one class tiny and writes it to disk in every state."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from bowline.auditing.evidence_gathering import gather
from bowline.checkpoint import open_checkpoint
from bowline.families.config_levels import config_levels
from bowline.families.transformers_table import load_table
from bowline.tie import Tie
from tools.loader_sweep.states import BIN, STATES, Ends
from tools.sweep import one_line
from tools.tiny import Sizes, build, load_class, tiny_config

__all__ = ["LARGEST", "SIZES", "Case", "CannotBuildError", "classes_with_head", "write_cases"]

SIZES = Sizes(vocabulary=1024, width=128)
"""A width that every loader's kernels take, and a vocabulary that needs no padding."""
LARGEST = 50_000_000
NEWEST = "transformers-5"
T5 = {"decoder_start_token_id": 0}
UNWRITTEN: dict[str, dict[str, Any]] = {
    "apertus": {"mlp_bias": False, "post_norm": False, "qk_norm": True},
    "cohere2": {"rotary_pct": 1.0},
    "exaone4": {"rope_scaling": None},
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": {"partial_rotary_factor": 0.5, "rope_scaling": None},
    "gpt2": {"n_ctx": 64},
    "gpt_neox": {"rotary_pct": 0.25, "rotary_emb_base": 10000},
    "mt5": T5,
    "t5": T5,
    "umt5": T5,
}
"""Keys that published checkpoints have, other loaders ask for, and transformers 5 no longer writes: by `model_type`."""

HEAD_DIM_WRITTEN = frozenset({"exaone4", "exaone_moe", "glm4_moe", "qwen3", "qwen3_moe"})
"""The model types whose published configs state `head_dim`, which transformers 5 leaves out where it follows."""

EXPERTS_WRITTEN = frozenset({"mellum", "qwen3_moe"})
"""The model types whose published configs state `num_experts`, which transformers 5 calls `num_local_experts`."""


class CannotBuildError(Exception):
    """A class that cannot be built tiny and saved; the message says why."""


@dataclass(frozen=True)
class Case:
    """One state of one class on disk, with the audit's prediction for its head by loader."""

    state: str
    directory: Path
    tie: Tie
    predicted: dict[str, str | None]
    others_refused: dict[str, bool]
    """By loader: whether it is predicted to refuse one of the checkpoint's other ties."""


def classes_with_head() -> list[str]:
    """The classes whose head is the target of a tie, as transformers 5 declares them."""
    table, names = load_table(), []
    for name in table:
        architecture = table.architecture(name)
        declared = architecture.declared.get(NEWEST) if architecture else None
        if declared and declared.head and any(one.tie.target == declared.head for one in declared.ties):
            names.append(name)
    return names


def write_cases(name: str, place: Path, sizes: Sizes = SIZES) -> Iterator[Case]:
    """Each state of the class in a directory of its own below `place`. The tensors are in bfloat16.

    Raises:
        CannotBuildError: transformers cannot build or save the class, or it is not tiny.
    """
    saved = place / "saved"
    ends = _saved(name, saved, sizes)
    for at, (state, change) in enumerate(STATES.items()):
        try:
            tensors, config = change(ends)
        except LookupError:
            continue
        directory = place / f"state-{at}"
        directory.mkdir()
        for file in saved.iterdir():
            if file.suffix != ".safetensors" and file.name != "config.json":
                shutil.copy(file, directory)
        if state in BIN:
            torch.save(tensors, directory / "pytorch_model.bin")
        else:
            save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        (directory / "config.json").write_text(json.dumps(config))
        with open_checkpoint(directory) as checkpoint:
            outcomes = gather(checkpoint).outcomes
        yield Case(
            state=state,
            directory=directory,
            tie=ends.tie,
            predicted={loader: _fate(targets.get(ends.tie.target)) for loader, targets in outcomes.items()},
            others_refused={
                loader: any(_fate(one) == "refused" for target, one in targets.items() if target != ends.tie.target)
                for loader, targets in outcomes.items()
            },
        )


def _write_as_published(config: dict[str, Any]) -> None:
    """Add the keys that published checkpoints have beside those that transformers 5 writes."""
    for _, level in list(config_levels(config)):
        rope = level.get("rope_parameters")
        if isinstance(rope, dict):
            by_kind = [kind for kind in rope.values() if isinstance(kind, dict)]
            for key in ("rope_theta", "partial_rotary_factor"):
                for stated in (rope, *by_kind[:1]):
                    if stated.get(key) is not None:
                        level.setdefault(key, stated[key])
        if level.get("model_type") in HEAD_DIM_WRITTEN:
            level.setdefault("head_dim", level["hidden_size"] // level["num_attention_heads"])
        if level.get("model_type") in EXPERTS_WRITTEN:
            level.setdefault("num_experts", level.get("num_local_experts"))
    for key, value in UNWRITTEN.get(config.get("model_type", ""), {}).items():
        config.setdefault(key, value)


def _fate(outcome: Any) -> str | None:
    return outcome.fate.value if outcome else None


def _saved(name: str, place: Path, sizes: Sizes) -> Ends:
    try:
        cls = load_class(name)
        model = build(cls, tiny_config(cls, sizes)).to(torch.bfloat16)
        size = sum(parameter.numel() for parameter in model.parameters())
        if size > LARGEST:
            raise CannotBuildError(f"not tiny: {size:,} parameters however its config is shrunk")
        model.config.dtype = torch.bfloat16
        model.save_pretrained(place)
    except CannotBuildError:
        raise
    except Exception as error:  # any error of a model class is recorded as the reason
        raise CannotBuildError(f"cannot be built and saved: {one_line(error)}") from error
    files = sorted(place.glob("*.safetensors"))
    if len(files) != 1:
        raise CannotBuildError(f"saved {len(files)} files of tensors")
    tensors = {key: value.contiguous() for key, value in load_file(files[0]).items()}
    config = json.loads((place / "config.json").read_text())
    _write_as_published(config)
    with open_checkpoint(place) as checkpoint:
        declaration = gather(checkpoint, values=False).declaration
    tie = next((one.tie for one in declaration.ties if one.tie.target == declaration.head), None)
    if tie is None or not {tie.source, tie.target} & set(tensors):
        raise CannotBuildError("the saved files hold neither end of the head's tie")
    tensors.setdefault(tie.source, tensors.get(tie.target, torch.empty(0)).clone())
    if tensors[tie.source].ndim != 2:
        raise CannotBuildError(f"{tie.source} has shape {list(tensors[tie.source].shape)}")
    return Ends(tensors, config, tie)
