"""Takes a low-rank adapter out of a tuned model: the difference of one end of the vocabulary from the base's.

The best approximation of rank R in the Frobenius norm is the product with the first R right singular vectors (Eckart
and Young 1936): for D = tuned - base (V, H), D ≈ (D W) Wᵀ with W (H, R). W is found by subspace iteration on DᵀD
(Halko, Martinsson and Tropp 2011, algorithm 4.4), whose every pass reads both tables once, in blocks of rows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from bowline.auditing.adapter_evidence import BaseModel, End, TiedModule
from bowline.auditing.adapter_gathering import known_base
from bowline.checkpoint import Checkpoint, open_checkpoint
from bowline.checkpoint.durable.file_creation import cannot_write, create
from bowline.checkpoint.durable.publication import publishing
from bowline.checkpoint.formats.other_files import ADAPTER_CONFIG, ADAPTER_FILES
from bowline.checkpoint.formats.peft_adapter import PREFIX
from bowline.checkpoint.formats.safetensors_writer import Payload, write_payloads
from bowline.errors import CheckpointError, TieError, UsageError
from bowline.families.quirks import quirks_of
from bowline.wording import listed

__all__ = ["ExtractionReport", "extract_adapter"]

SPARE = 8
"""Directions beyond the rank, which make the first ones converge faster."""
PASSES = 6
BLOCK_BYTES = 8 << 20
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
Rows = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractionReport:
    """The adapter that was written, and how much of the difference it holds."""

    place: Path
    module: str
    rank: int
    energy: float
    """The share of the difference's squared Frobenius norm that the adapter holds."""
    largest_left: float
    """The largest entry of the difference that the adapter does not hold."""
    largest: float
    others: tuple[str, ...]
    """Tensors that differ and are not in the adapter."""

    def lines(self) -> Iterator[str]:
        """The report, a line for each fact."""
        yield f"{self.place}: a LoRA of rank {self.rank} at {self.module}"
        yield (
            f"  it holds {self.energy:.4%} of the squared difference; at most {self.largest_left:.3g} of an entry is "
            f"left, of {self.largest:.3g}"
        )
        if self.others:
            count = len(self.others)
            noun = "tensor differs" if count == 1 else "tensors differ"
            yield f"  {count} other {noun}, which the adapter does not hold: {listed(self.others, 3)}"

    def __str__(self) -> str:
        return "\n".join(self.lines())


def extract_adapter(
    base: str | os.PathLike[str],
    tuned: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    rank: int,
    end: Literal["head", "embedding"] = "head",
) -> ExtractionReport:
    """Write the difference of two models' heads (or embeddings) as a PEFT LoRA, the best one of its rank.

    Memory is about 8 · H · (rank + 8) bytes twice, and blocks of rows.

    Arguments:
        base: the model that the adapter is for.
        tuned: the same architecture, with another head.
        destination: a new directory.
        rank: the adapter's rank, from 1 to the width of the table.
        end: the end of the vocabulary that is compared.

    Raises:
        UsageError: the rank is impossible.
        TieError: the models are not of one shape, an end is not stored as floats, or the ends are equal.
        CheckpointError: a model cannot be read, or the adapter cannot be written.

    Example:
        >>> print(extract_adapter("base", "tuned", "lora", rank=8))  # doctest: +SKIP
        lora: a LoRA of rank 8 at lm_head
          it holds 99.9998% of the squared difference; at most 3.1e-05 of an entry is left, of 0.27
    """
    with ExitStack() as stack:
        ours, theirs = (stack.enter_context(open_checkpoint(place)) for place in (base, tuned))
        model, other = (known_base(one, values=False, given=True) for one in (ours, theirs))
        place, name = _end(model, end)
        difference = _Difference(ours, name, theirs, _end(other, end)[1])
        if quirks_of(_family(model)).scaled_by and model.tied is not other.tied:
            raise TieError(
                f"{name}: one of the two heads carries the logits' scale, since only one model is tied",
                help="untie both (`bowline untie`), or tie both",
            )
        if not 0 < rank <= difference.width:
            raise UsageError(f"rank {rank}: expected 1 to {difference.width}, the table's width", argument="rank")
        directions, energy = difference.directions(rank)
        others = tuple(_others(ours, theirs, {name, difference.tuned_name}))
        return _written(Path(destination), ours.location, model, place, difference, directions, energy, others)


class _Difference:
    """tuned - base, in blocks of rows."""

    def __init__(self, base: Checkpoint, name: str, tuned: Checkpoint, tuned_name: str) -> None:
        self.base, self.name, self.tuned, self.tuned_name = base, name, tuned, tuned_name
        ours, theirs = base.tensors[name], tuned.tensors[tuned_name]
        if ours.shape != theirs.shape or len(ours.shape) != 2:
            raise TieError(
                f"{name} is {list(ours.shape)}, and the tuned {tuned_name} is {list(theirs.shape)}: they have no "
                "difference",
                help="resize one of them first: `bowline resize`",
            )
        for one in (ours, theirs):
            if one.dtype not in FLOATS:
                raise TieError(
                    f"{one.name}: is stored as {one.dtype}, expected a plain float tensor",
                    help="give the checkpoints before they were quantised",
                )
        self.shape = ours.shape
        self.width = ours.shape[1]

    def blocks(self) -> Iterator[tuple[int, Rows]]:
        """The first row of each block, and the block in float64."""
        step = max(1, BLOCK_BYTES // (8 * self.width))
        for start in range(0, self.shape[0], step):
            stop = min(start + step, self.shape[0])
            rows = self.tuned.rows(self.tuned_name, start, stop).astype(np.float64)
            yield start, rows - self.base.rows(self.name, start, stop)

    def directions(self, rank: int) -> tuple[Rows, float]:
        """The first `rank` right singular vectors (H, rank), and the squared norm of the difference.

        Raises:
            TieError: the ends are equal, or not finite.
        """
        count = min(self.width, rank + SPARE)
        basis = np.linalg.qr(np.random.default_rng(0).standard_normal((self.width, count)))[0]
        total = 0.0
        for number in range(PASSES):
            image, total = np.zeros_like(basis), 0.0
            for _, block in self.blocks():
                total += float(np.square(block).sum())
                image += block.T @ (block @ basis)
            if not np.isfinite(total):
                raise TieError(f"{self.name}: the difference is not finite", help="`bowline audit` names the rows")
            if total == 0:
                raise TieError(f"{self.name}: the two are equal, so there is no adapter", help="compare another end")
            if number < PASSES - 1:
                basis = np.linalg.qr(image)[0]
        values, vectors = np.linalg.eigh(basis.T @ image)  # the squared singular values within the subspace
        return basis @ vectors[:, np.argsort(-values)[:rank]], total


def _written(
    destination: Path,
    base: str,
    model: BaseModel,
    place: TiedModule,
    difference: _Difference,
    directions: Rows,
    energy: float,
    others: tuple[str, ...],
) -> ExtractionReport:
    rank = directions.shape[1]
    stem = f"{PREFIX}{place.module}."
    held, largest_left, largest = 0.0, 0.0, 0.0
    left = np.empty((difference.shape[0], rank), np.float32)
    for start, block in difference.blocks():
        rows = block @ directions
        left[start : start + len(block)] = rows
        rest = np.abs(block - rows @ directions.T)
        held += float(np.square(rows).sum())
        largest_left, largest = max(largest_left, float(rest.max())), max(largest, float(np.abs(block).max()))
    right = np.ascontiguousarray(directions.T, np.float32)
    if place.end is End.HEAD:
        tensors = {f"{stem}lora_A.weight": right, f"{stem}lora_B.weight": left}
    else:
        tensors = {
            f"{stem}lora_embedding_A": np.ascontiguousarray(left.T),
            f"{stem}lora_embedding_B": np.ascontiguousarray(right.T),
        }
    architecture = model.architecture or ""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if architecture.endswith(("ForCausalLM", "LMHeadModel")) else None,
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": [place.module],
    }
    payloads = [
        Payload(name=name, dtype="F32", shape=array.shape, data=lambda array=array: iter([array]))  # type: ignore[misc]
        for name, array in tensors.items()
    ]
    with publishing(destination, lambda _: False, new=True) as stage:
        path = stage / ADAPTER_FILES[0]
        try:
            with os.fdopen(create(path), "wb") as file:
                write_payloads(file, payloads, {"format": "pt"})
            (stage / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        except OSError as error:
            raise cannot_write(path, error) from error
    return ExtractionReport(
        place=destination,
        module=place.module,
        rank=rank,
        energy=min(1.0, held / energy),
        largest_left=largest_left,
        largest=largest,
        others=others,
    )


def _end(model: BaseModel, end: str) -> tuple[TiedModule, str]:
    """The end of the vocabulary, and the tensor that holds it: the shared one, if the end is not stored."""
    wanted = End(end)
    places = [place for place in model.places if place.end is wanted and place.module not in model.unused]
    if not places:
        raise TieError(f"{model.location}: has no {end}", help="`bowline audit` shows the model's ends")
    for place in (places[0], *model.places):
        name = model.stored(place.stored)
        if name is not None:
            return places[0], name
    raise TieError(
        f"{model.location}: stores no float table for its {end}", help="`bowline audit` shows what it stores"
    )


def _family(model: BaseModel) -> str | None:
    return model.evidence.declaration.family if model.evidence is not None else None


def _others(base: Checkpoint, tuned: Checkpoint, ends: set[str]) -> Iterator[str]:
    """The tensors beside the ends that are missing on one side, or differ."""
    for name in sorted({*base.tensors, *tuned.tensors} - ends):
        one, other = base.tensors.get(name), tuned.tensors.get(name)
        if one is None or other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
            yield name
            continue
        try:
            pairs = zip(base.blocks(name), tuned.blocks(name), strict=True)
            if any(not np.array_equal(mine[1], theirs[1]) for mine, theirs in pairs):
                yield name
        except CheckpointError:
            yield name
