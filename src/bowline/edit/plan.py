"""The plan of an edit: what becomes of each file, in bytes, before anything is written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from bowline.checkpoint.formats.safetensors_writer import Payload, header_bytes
from bowline.checkpoint.places.byte_source import ByteSource
from bowline.checkpoint.weights import INDEX_SUFFIX
from bowline.edit.content import BLOCK_BYTES, Content, Stored
from bowline.edit.draft import Draft, header_metadata
from bowline.edit.steps.step import Step
from bowline.wording import listed

__all__ = ["Action", "EditPlan", "FileParts", "FilePlan", "plan_of"]

INDEX = "model.safetensors" + INDEX_SUFFIX
OTHER_WEIGHTS = re.compile(
    r"pytorch_model.*\.bin(\.index\.json)?|tf_model.*\.h5|flax_model.*\.msgpack|rust_model\.ot"
    r"|consolidated.*\.(pth|safetensors)"
)
"""Names of weights that hold the model before the edit, in a format that an edit does not write."""
OWN_DIRECTORY = ".bowline"


class Action(StrEnum):
    """What becomes of a file."""

    KEEP = "keep"
    """It is not changed: in a new directory it is a hard link, a reflink or a copy."""
    WRITE = "write"
    REMOVE = "remove"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileParts:
    """The bytes of a file in another format than safetensors, one part after the other.

    `sources` gives them to the writer, where bytes are stored as they are as the range of the file that holds them.
    `check` reads the written file and raises a `FormatError` if it is malformed; `copied` counts the bytes of tensors
    that stay as they are.
    """

    parts: Callable[[], Iterator[Any]]
    sources: Callable[[], Iterator[Any]]
    copied: int
    check: Callable[[ByteSource], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """One file of the result: its size, and where its bytes come from, a text, tensors or parts."""

    name: str
    action: Action
    nbytes: int
    text: bytes | None = None
    tensors: Mapping[str, Content] | None = None
    metadata: Mapping[str, str] | None = None
    parts: FileParts | None = None
    is_new: bool = False

    @property
    def copied(self) -> int:
        """The bytes that are copied from a stored tensor as they are."""
        if self.parts is not None:
            return self.parts.copied
        return sum(content.nbytes for content in (self.tensors or {}).values() if isinstance(content, Stored))

    def payloads(self) -> list[Payload]:
        """The tensors, for the writer of safetensors."""
        return [
            Payload(name=name, dtype=content.dtype, shape=content.shape, data=content.sources)
            for name, content in (self.tensors or {}).items()
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class EditPlan:
    """Every file of the result, and the sentences of the steps. `str()` is what `--dry-run` prints.

    `audited` is the file of the result that is the model, or empty if the directory is. With `single`, the result is
    this file, and files that belong to it, beside others.
    """

    location: str
    steps: tuple[Step, ...]
    files: tuple[FilePlan, ...]
    notes: tuple[str, ...]
    draft: Draft
    audited: str = ""
    single: bool = False

    @property
    def written(self) -> int:
        """The bytes to write."""
        return sum(file.nbytes for file in self.files if file.action is Action.WRITE)

    @property
    def copied(self) -> int:
        """Of these, the bytes of tensors that stay as they are."""
        return sum(file.copied for file in self.files if file.action is Action.WRITE)

    @property
    def kept(self) -> int:
        """The bytes of the files that do not change."""
        return sum(file.nbytes for file in self.files if file.action is Action.KEEP)

    @property
    def changes(self) -> bool:
        """Whether any file is written or removed."""
        return any(file.action is not Action.KEEP for file in self.files)

    @property
    def memory(self) -> int:
        """The most bytes that rows take in memory at a time, about: blocks of them, and the small files."""
        texts = sum(len(file.text) for file in self.files if file.text is not None)
        return 8 * BLOCK_BYTES + 2 * texts

    def lines(self) -> Iterator[str]:
        """The plan, a line for each fact."""
        yield f"{self.location}: {'; '.join(map(str, self.steps))}"
        for action in (Action.WRITE, Action.REMOVE):
            for file in self.files:
                if file.action is action:
                    yield f"  {action} {file.name}" + (f" ({size(file.nbytes)})" if action is Action.WRITE else "")
        kept = [file.name for file in self.files if file.action is Action.KEEP]
        if kept:
            yield f"  keep {listed(kept, 4)} ({size(self.kept)})"
        yield (
            f"  {size(self.written)} to write, {size(self.copied)} of them copied as they are; {size(self.kept)} to "
            f"link or keep; about {size(self.memory)} of memory for rows"
        )
        yield from (f"  {note}" for note in self.notes)

    def __str__(self) -> str:
        return "\n".join(self.lines())


def plan_of(draft: Draft, steps: tuple[Step, ...]) -> EditPlan:
    """What the files of an edited draft are."""
    source = draft.source
    sizes = source.files.sizes()
    notes = list(draft.notes)
    files: list[FilePlan] = []
    by_home: dict[str, dict[str, Content]] = {}
    for name, content in draft.tensors.items():
        by_home.setdefault(draft.homes[name], {})[name] = content
    for home, tensors in by_home.items():
        stored = {name for name, tensor in source.tensors.items() if tensor.file == home}
        same = stored == set(tensors) and all(
            isinstance(content, Stored) and content.tensor == source.tensors[name] for name, content in tensors.items()
        )
        if same:
            files.append(FilePlan(name=home, action=Action.KEEP, nbytes=sizes[home]))
            continue
        one = FilePlan(
            name=home,
            action=Action.WRITE,
            nbytes=0,
            tensors=tensors,
            metadata=_metadata(draft, home),
            is_new=home not in sizes,
        )
        header = header_bytes(one.payloads(), one.metadata)
        nbytes = 8 + len(header) + sum(content.nbytes for content in tensors.values())
        files.append(FilePlan(**{**_fields(one), "nbytes": nbytes}))
    gone = _gone(draft, by_home, files, notes)
    files += _index(draft, by_home)
    for name in gone:
        if not any(file.name == name for file in files):
            files.append(FilePlan(name=name, action=Action.REMOVE, nbytes=sizes[name]))
    for name, text in draft.texts.items():
        if text is None and name in sizes:
            files.append(FilePlan(name=name, action=Action.REMOVE, nbytes=sizes[name]))
        elif text is not None:
            same_text = name in sizes and sizes[name] == len(text) and source.files.read(name) == text
            action = Action.KEEP if same_text else Action.WRITE
            files.append(FilePlan(name=name, action=action, nbytes=len(text), text=text, is_new=name not in sizes))
    if draft.alone:
        files = [file for file in files if file.action is Action.WRITE]
        return EditPlan(location=source.location, steps=steps, files=tuple(files), notes=tuple(notes), draft=draft)
    named = {file.name for file in files}
    files += [
        FilePlan(name=name, action=Action.KEEP, nbytes=nbytes)
        for name, nbytes in sizes.items()
        if name not in named and not name.startswith(OWN_DIRECTORY)
    ]
    return EditPlan(location=source.location, steps=steps, files=tuple(files), notes=tuple(notes), draft=draft)


def _metadata(draft: Draft, home: str) -> dict[str, str]:
    """The metadata in the header of a file."""
    whole = {**header_metadata(draft.source, home), **draft.metadata.get(home, {})}
    return {key: value for key, value in whole.items() if value is not None}


def _gone(
    draft: Draft, by_home: Mapping[str, Mapping[str, Content]], files: list[FilePlan], notes: list[str]
) -> list[str]:
    """The files of weights that the result does not have; a note names those in another format."""
    source, sizes = draft.source, draft.source.files.sizes()
    gone = [name for name in source.weight_files if name not in by_home]
    stale = [name for name in sizes if OTHER_WEIGHTS.fullmatch(name) and name not in source.weight_files]
    if any(file.action is Action.WRITE for file in files) and stale and not draft.alone:
        gone += stale
        notes.append(f"{listed(stale, 3)}: the weights before the edit in another format, left out of the result")
    return gone


def _fields(file: FilePlan) -> dict[str, Any]:
    return {name: getattr(file, name) for name in FilePlan.__dataclass_fields__}


def _index(draft: Draft, by_home: Mapping[str, Mapping[str, Content]]) -> Iterator[FilePlan]:
    """The index of several files, with sizes that are true; none for a single `model.safetensors`."""
    source, sizes = draft.source, draft.source.files.sizes()
    old = next((name for name in sizes if name.endswith(INDEX_SUFFIX) and "/" not in name), None)
    if (old is None or draft.alone) and len(by_home) < 2:
        return
    content = source.json(old) if old is not None else {}
    metadata = dict(content.get("metadata") or {}) if isinstance(content, dict) else {}
    metadata["total_size"] = sum(tensor.nbytes for tensor in draft.tensors.values())
    if "total_parameters" in metadata:
        metadata["total_parameters"] = sum(_elements(tensor) for tensor in draft.tensors.values())
    edited = {"metadata": metadata, "weight_map": {name: draft.homes[name] for name in sorted(draft.tensors)}}
    if old == INDEX and content == edited:
        return
    text = (json.dumps(edited, indent=2, sort_keys=True) + "\n").encode()
    if old is not None and old != INDEX:
        yield FilePlan(name=old, action=Action.REMOVE, nbytes=sizes[old])
    yield FilePlan(name=INDEX, action=Action.WRITE, nbytes=len(text), text=text, is_new=INDEX not in sizes)


def _elements(content: Content) -> int:
    count = 1
    for extent in content.shape:
        count *= extent
    return count


def size(nbytes: int) -> str:
    """A number of bytes in words.

    Example:
        >>> size(700), size(1_234_567)
        ('700 bytes', '1.2 MB')
    """
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes} bytes"


def place_of(plan: EditPlan) -> Path:
    """The directory of the plan's source."""
    return Path(plan.draft.source.files.location)
