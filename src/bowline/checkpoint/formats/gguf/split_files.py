"""Finds the models among GGUF files, and reads one that is split in parts (`name-00001-of-00003.gguf`)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from bowline.checkpoint.formats.gguf import GGUF_SUFFIX
from bowline.checkpoint.formats.gguf.header import GGUFHeader, read_gguf_header
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.checkpoint.formats.strict_json import shown
from bowline.checkpoint.places.file_set import FileSet
from bowline.errors import CheckpointError, FormatError
from bowline.wording import listed

__all__ = ["gguf_models", "read_gguf"]

PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.gguf")
PART, PARTS, TENSORS_IN_ALL = "split.no", "split.count", "split.tensors.count"
MOST_PARTS = 1000


def gguf_models(names: Iterable[str]) -> list[str]:
    """The GGUF files among `names` that each stand for a model: of the parts of one model, the first that is there.

    Example:
        >>> gguf_models(["b-Q8_0.gguf", "a-00002-of-00002.gguf", "a-00001-of-00002.gguf", "config.json"])
        ['a-00001-of-00002.gguf', 'b-Q8_0.gguf']
    """
    models: dict[tuple[str, str], str] = {}
    for name in sorted(names):
        if name.endswith(GGUF_SUFFIX):
            part = PART_NAME.fullmatch(name)
            models.setdefault((part["stem"], part["total"]) if part else (name, ""), name)
    return sorted(models.values())


def read_gguf(files: FileSet, name: str) -> tuple[GGUFHeader, tuple[str, ...]]:
    """The header of the model that the file `name` holds, or is a part of, and the names of all its files.

    The tensors are those of every part, the metadata that of the first, as llama.cpp reads them.

    Raises:
        FormatError: a file is damaged, or the parts do not fit each other.
        CheckpointError: a part is missing, or cannot be read.
    """
    header = _header(files, name)
    part, total = PART_NAME.fullmatch(name), header.number(PARTS) or 0
    by_name = int(part["total"]) if part else 1
    if max(total, 1) != by_name:
        named = f"one part of {by_name}" if by_name > 1 else "a whole model"
        stated = f"{PARTS} is {total}" if total else f"it has no {PARTS}"
        raise FormatError(
            f"{name}: by its name it is {named}, but {stated}",
            help="give it the name that it had, or join the parts again with llama-gguf-split --merge",
        )
    if part is None or by_name == 1:
        return header, (name,)
    if by_name > MOST_PARTS:
        raise FormatError(f"{name}: one part of {by_name}, expected at most {MOST_PARTS}", help="fetch the file again")
    parts = tuple(f"{part['stem']}-{number:05d}-of-{by_name:05d}{GGUF_SUFFIX}" for number in range(1, by_name + 1))
    missing = [other for other in parts if not files.has(other)]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise CheckpointError(
            f"{name}: one part of {by_name}, and {len(missing)} of them {are} missing: "
            f"{listed([shown(other) for other in missing], 4)}",
            help="fetch the missing parts",
        )
    return _joined(parts, [header if other == name else _header(files, other) for other in parts]), parts


def _header(files: FileSet, name: str) -> GGUFHeader:
    with files.open(name) as source:
        return read_gguf_header(source)


def _joined(parts: tuple[str, ...], headers: list[GGUFHeader]) -> GGUFHeader:
    tensors: dict[str, StoredTensor] = {}
    for number, (name, header) in enumerate(zip(parts, headers, strict=True)):
        for key, expected in ((PARTS, len(parts)), (PART, number)):
            if header.number(key) != expected:
                raise FormatError(
                    f"{name}: {key} is {shown(header.values.get(key))}, expected {expected}",
                    help="the parts belong to different models, or were renamed; fetch them again",
                )
        twice = next((tensor for tensor in header.tensors if tensor in tensors), None)
        if twice is not None:
            raise FormatError(
                f"{name}: tensor {shown(twice)} is also in {tensors[twice].file}, expected it in one part",
                help="the parts belong to different models; fetch them again",
            )
        tensors.update(header.tensors)
    stated = headers[0].number(TENSORS_IN_ALL)
    if stated is not None and stated != len(tensors):
        raise FormatError(
            f"{parts[0]}: {TENSORS_IN_ALL} is {stated}, but the {len(parts)} parts hold {len(tensors)}",
            help="the parts belong to different models; fetch them again",
        )
    return replace(headers[0], tensors=tensors)
