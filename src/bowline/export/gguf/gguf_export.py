"""The export itself: which tensor becomes which, the bytes of the file, and its publication."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bowline.auditing.progress import Progress
from bowline.checkpoint.formats.gguf.gguf_writer import GGUFEntry, first_bytes, padding, tensor_list
from bowline.checkpoint.formats.gguf.header import read_gguf_header
from bowline.checkpoint.formats.safetensors_writer import Extent
from bowline.edit import EditReport, open_checkpoint
from bowline.edit.checkpoint_edit import EditableCheckpoint
from bowline.edit.commit import commit
from bowline.edit.content import Bits, Cast, ChosenRows, Content, Held, Scaled, Stored
from bowline.edit.draft import Draft
from bowline.edit.head_scale import logit_scale
from bowline.edit.plan import Action, EditPlan, FileParts, FilePlan
from bowline.errors import TieError, UsageError
from bowline.export.gguf.gguf_architecture import GGUFArchitecture
from bowline.export.gguf.gguf_classes import architecture_for
from bowline.export.gguf.gguf_tokens import tokenizer_keys
from bowline.export.gguf.key_values import key_bytes, number, text
from bowline.export.gguf.rotary_scaling import rope_factors
from bowline.export.gguf.tensor_shapes import Shape, check_shapes
from bowline.export.settled_ends import settled_ends
from bowline.wording import byte_count

__all__ = ["export_gguf"]

ALIGNMENT = 32
VERSION = 3
TYPES: Mapping[str, tuple[str, int]] = {"F32": ("F32", 0), "F16": ("F16", 1), "BF16": ("BF16", 32)}
"""By safetensors' dtype: ggml's type, and the number of llama.cpp's file type."""
OUTPUT, EMBEDDING = "output.weight", "token_embd.weight"


def export_gguf(
    source: str | os.PathLike[str], destination: str | os.PathLike[str], *, progress: Progress | None = None
) -> EditReport:
    """Write a checkpoint as one GGUF file; a tied model without `output.weight`.

    Matrices keep their dtype (float32, float16 or bfloat16); vectors become float32, as do tables of positions, which
    llama.cpp reads in float32 only. The table of `bowline quantize` is written as a float matrix. The result is read
    again, compared with the source row for row, and audited before it gets its name.

    Arguments:
        source: a checkpoint's directory with `config.json` and `tokenizer.json`.
        destination: a new file, whose name ends in `.gguf`.
        progress: receives the bytes written and compared.

    Raises:
        UsageError: the class, its tokenizer or a setting is not known here, the tensors do not fit the config, or the
            file's name has another end.
        TieError: it is not known whether the two ends are one matrix, or a dtype has no place in GGUF.
        CheckpointError: the source cannot be read, or the result cannot be written. Nothing is left then.

    Example:
        >>> print(export_gguf("SmolLM2-135M", "smollm2.gguf"))  # doctest: +SKIP
    """
    place = Path(destination)
    if not place.name.endswith(".gguf"):
        raise UsageError(f"{place}: expected a file whose name ends in .gguf", help="name the file to write")
    with open_checkpoint(source) as checkpoint:
        draft, tied, seen = settled_ends(checkpoint)
        return commit(_plan(checkpoint, draft, tied, place.name), seen, place, progress=progress)


@dataclass(frozen=True, slots=True)
class _ExportStep:
    """The line of the plan."""

    verb: ClassVar[str] = "export"

    def __str__(self) -> str:
        return "export --to gguf"

    def apply(self, draft: Draft) -> Draft:
        return draft


class _Transposed(Content):
    """A matrix with its axes exchanged; made whole, since its rows are columns of the stored one."""

    def __init__(self, parent: Content) -> None:
        self.parent, self.dtype, self.shape = parent, parent.dtype, parent.shape[::-1]

    def bits(self, start: int, stop: int) -> Bits:
        return np.ascontiguousarray(self.parent.bits(0, self.parent.rows).T[start:stop])

    def blocks(self) -> Iterator[tuple[int, int]]:
        yield 0, self.rows


class _OneMore(Content):
    """A float32 tensor with one added to each number, rounded as transformers rounds it."""

    def __init__(self, parent: Content) -> None:
        self.parent, self.dtype, self.shape = parent, "F32", parent.shape

    def bits(self, start: int, stop: int) -> Bits:
        values = self.parent.values(start, stop).astype(np.float32)
        return (values + np.float32(1)).view(np.uint32)


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """The file as it will be: the bytes of its keys, and its tensors in order."""

    keys: Mapping[str, bytes]
    tensors: Mapping[str, Content]

    def start(self) -> bytes:
        """The bytes before the first tensor's."""
        entries = [
            GGUFEntry(name=name, dtype=TYPES[one.dtype][0], shape=one.shape, nbytes=one.nbytes)
            for name, one in self.tensors.items()
        ]
        parts = [first_bytes(VERSION, len(entries), len(self.keys))]
        parts += [key_bytes(key, value) for key, value in self.keys.items()]
        parts.append(tensor_list(entries, ALIGNMENT))
        whole = b"".join(parts)
        return whole + bytes(padding(len(whole), ALIGNMENT))

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return len(self.start()) + sum(one.nbytes + padding(one.nbytes, ALIGNMENT) for one in self.tensors.values())

    def parts(self) -> Iterator[Any]:
        """The bytes of the file."""
        yield self.start()
        for one in self.tensors.values():
            yield from one.parts()
            yield bytes(padding(one.nbytes, ALIGNMENT))

    def sources(self) -> Iterator[Any | Extent]:
        """The same for a writer."""
        yield self.start()
        for one in self.tensors.values():
            yield from one.sources()
            yield bytes(padding(one.nbytes, ALIGNMENT))


def _plan(checkpoint: EditableCheckpoint, draft: Draft, tied: bool, name: str) -> EditPlan:
    config = draft.config
    architecture = architecture_for(config)
    keys = architecture.keys(config)
    if not tied and not architecture.has_head:
        raise TieError(
            f"the head is a matrix of its own, but llama.cpp's {architecture.name} takes the embedding for both ends",
            help="`bowline tie` makes the ends one matrix, which changes the model unless they are equal",
        )
    tensors = _tensors(draft, config, architecture, tied)
    notes = [
        f"tied: no {OUTPUT}, llama.cpp takes {EMBEDDING} for both ends" if tied else f"not tied: {OUTPUT} is the head"
    ]
    scale = logit_scale(draft)
    if scale != 1.0:
        tensors[architecture.last_norm] = Scaled(tensors[architecture.last_norm], scale)
        notes.append(
            f"the scale of the logits, {scale:.6g}, is in {architecture.last_norm}, since llama.cpp does not scale them"
        )
    factors = rope_factors(config) if architecture.name == "llama" else None
    if factors is not None:
        tensors["rope_freqs.weight"] = Held("F32", factors)
    kinds = {one.dtype for one in tensors.values() if len(one.shape) > 1 and one.dtype != "F32"}
    file_type = TYPES[max(kinds) if kinds else "F32"][1]
    tokenizer = tokenizer_keys(checkpoint.files, config, tensors[EMBEDDING].rows)
    file = _File(
        keys={
            "general.architecture": text(architecture.name),
            "general.type": text("model"),
            "general.name": text(os.fsencode(Path(checkpoint.location).name).decode("utf-8", "replace")),
            **{f"{architecture.name}.{key}": value for key, value in keys.items()},
            "general.file_type": number(file_type),
            "general.quantization_version": number(2),
            **tokenizer.keys,
        },
        tensors=tensors,
    )
    copied = sum(one.nbytes for one in tensors.values() if isinstance(one, Stored))
    parts = FileParts(parts=file.parts, sources=file.sources, copied=copied, check=read_gguf_header)
    weights = sum(one.nbytes for one in tensors.values())
    notes.append(
        f"size: {byte_count(file.nbytes)}, {file.nbytes / weights:.3f} times one copy of the weights "
        f"({byte_count(weights)})"
        if tied
        else f"size: {byte_count(file.nbytes)}, of which {byte_count(tensors[OUTPUT].nbytes)} are the head"
    )
    return EditPlan(
        location=checkpoint.location,
        steps=(_ExportStep(),),
        files=(FilePlan(name=name, action=Action.WRITE, nbytes=file.nbytes, parts=parts, is_new=True),),
        notes=(*notes, *architecture.notes(config), *draft.notes, *tokenizer.notes),
        draft=draft,
        audited=name,
        single=True,
    )


def _tensors(draft: Draft, config: Mapping[str, Any], architecture: GGUFArchitecture, tied: bool) -> dict[str, Content]:
    """Each tensor as llama.cpp wants it, by its name there."""
    origins: dict[str, str] = {}
    shapes: dict[str, Shape] = {}
    for name, content in draft.tensors.items():
        target = architecture.target(name)
        if target is None or (tied and target == OUTPUT):
            continue
        if target in origins:
            _check_equal(draft, origins[target], name, target)
            continue
        origins[target] = name
        turned = architecture.layer(name) in architecture.transposed and len(content.shape) == 2
        shapes[target] = content.shape[::-1] if turned else content.shape
    wanted = architecture.shapes(config)
    if not tied:
        wanted = replace(wanted, outside={**wanted.outside, OUTPUT: wanted.outside[EMBEDDING]})
    check_shapes(shapes, wanted, origins)
    return {
        target: _laid_out(name, draft.tensors[name], target, config, architecture) for target, name in origins.items()
    }


def _laid_out(
    name: str, content: Content, target: str, config: Mapping[str, Any], architecture: GGUFArchitecture
) -> Content:
    """A stored tensor as llama.cpp wants it."""
    if content.dtype not in TYPES:
        raise TieError(
            f"{name}: is stored as {content.dtype}, expected {', '.join(TYPES)}",
            help="`bowline cast --dtype bf16` first"
            if content.dtype == "F64"
            else "export the checkpoint that it was quantised from, or load the model and save it in floats",
        )
    layer = architecture.layer(name)
    if layer in architecture.interleaved:
        content = ChosenRows(content, 0, _interleaved(content.rows, architecture.heads(layer, config)), None)
    if layer in architecture.transposed and len(content.shape) == 2:
        content = _Transposed(content)
    if (len(content.shape) == 1 or architecture.single.fullmatch(target)) and content.dtype != "F32":
        content = Cast(content, "F32")
    return _OneMore(content) if architecture.one_less.fullmatch(name) else content


def _check_equal(draft: Draft, one: str, other: str, target: str) -> None:
    """Raises `TieError` if two tensors that become one are not equal."""
    first, second = draft.tensors[one], draft.tensors[other]
    if (first.dtype, first.shape) == (second.dtype, second.shape) and all(
        np.array_equal(first.bits(start, stop), second.bits(start, stop)) for start, stop in first.blocks()
    ):
        return
    raise TieError(
        f"{one} and {other} differ, but llama.cpp has one tensor for both, {target}",
        help="`bowline audit` says which of them the loaders use",
    )


def _interleaved(rows: int, heads: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The stored row of each row: in each head, rows of the two halves by turns.

    Example:
        >>> _interleaved(8, 2).tolist()
        [0, 2, 1, 3, 4, 6, 5, 7]
    """
    if rows % (2 * heads):
        raise UsageError(f"{rows} rows cannot be split into {heads} heads of even size", help="check the config")
    return np.arange(rows, dtype=np.int64).reshape(heads, 2, rows // heads // 2).swapaxes(1, 2).reshape(-1)
