"""The state of a checkpoint between the steps of an edit: its tensors as contents, its small files as texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bowline.checkpoint.checkpoint import CONFIG, Checkpoint
from bowline.checkpoint.formats.json_edit import set_values
from bowline.checkpoint.formats.safetensors_header import read_header
from bowline.checkpoint.formats.strict_json import loads
from bowline.checkpoint.lint import LintKind
from bowline.checkpoint.places.byte_source import ByteSource, MemoryBytes
from bowline.checkpoint.places.file_set import FileSet
from bowline.edit.content import Content, Stored
from bowline.errors import CheckpointError, ConfigError, UsageError
from bowline.families.declaration import Declaration
from bowline.families.resolver import resolve

__all__ = ["Check", "Draft", "DraftFiles", "GENERATION_CONFIG", "begin", "header_metadata"]

Check = Callable[[FileSet], str]
"""Looks at the files of the result, and says what it saw; raises `CheckpointError` if that is not as it should be."""

GENERATION_CONFIG = "generation_config.json"
REFUSED = {
    LintKind.TWO_MODELS: "remove the file or the index that is out of date",
    LintKind.NAME_IN_TWO_SHARDS: "remove the tensor from one of them",
}
"""The faults under which it is unclear which bytes are the model's, with the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A checkpoint as it will be: each tensor's content and file, and the small files that change (`None`: removed).

    Steps make a new draft of a draft; `notes` are sentences for the report, `checks` look at the written result. With
    `alone`, the result has only the files of this draft, and is a directory of its own. `metadata` is added to the
    header's of a file, by its name; `None` removes a key.
    """

    source: Checkpoint
    tensors: Mapping[str, Content]
    homes: Mapping[str, str]
    texts: Mapping[str, bytes | None] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()
    alone: bool = False
    metadata: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor."""
        return {name: content.shape for name, content in self.tensors.items()}

    def text(self, name: str) -> bytes | None:
        """The content of a small file, or `None` if there is none."""
        if name in self.texts:
            return self.texts[name]
        return self.source.files.read(name) if self.source.files.has(name) else None

    def json(self, name: str) -> Any:
        """The content of a JSON file, or `None` if there is none. Raises `FormatError` on bad JSON."""
        content = self.text(name)
        return None if content is None else loads(content, name, allow_nonfinite=True)

    @property
    def config(self) -> Mapping[str, Any]:
        """`config.json`. Raises `ConfigError` if it is missing or not an object."""
        config = self.json(CONFIG)
        if not isinstance(config, dict):
            seen = "is missing" if config is None else f"holds a {type(config).__name__}, expected an object"
            raise ConfigError(
                f"{self.source.location}: {CONFIG} {seen}; an edit has to change what it says",
                help="copy it from the model that this checkpoint was made from",
            )
        return config

    @property
    def declaration(self) -> Declaration:
        """What the class and the config declare, by the names in the files."""
        return resolve(self.config, self.shapes)

    def with_values(self, file: str, values: Mapping[tuple[str, ...], Any]) -> Draft:
        """With these keys of a JSON file set; the rest of its text stays as it is."""
        if not values:
            return self
        text = self.text(file)
        assert text is not None
        edited = set_values(text.decode("utf-8"), values, file).encode("utf-8")
        return replace(self, texts={**self.texts, file: edited})

    def with_tensor(self, name: str, content: Content, home: str) -> Draft:
        """With this tensor, new or in place of the one of this name."""
        return replace(self, tensors={**self.tensors, name: content}, homes={**self.homes, name: home})

    def without(self, name: str) -> Draft:
        """Without this tensor."""
        return replace(
            self,
            tensors={other: content for other, content in self.tensors.items() if other != name},
            homes={other: home for other, home in self.homes.items() if other != name},
        )

    def with_texts(self, texts: Mapping[str, bytes | None]) -> Draft:
        """With these small files, or without those that are `None`."""
        return replace(self, texts={**self.texts, **texts})

    def with_notes(self, *notes: str) -> Draft:
        """With further sentences for the report."""
        return replace(self, notes=(*self.notes, *notes))


class DraftFiles(FileSet):
    """The files of a draft: those of its source, with the small ones that changed."""

    def __init__(self, draft: Draft) -> None:
        self._draft, self._source = draft, draft.source.files
        self.location = self._source.location

    def sizes(self) -> Mapping[str, int]:
        changed = {name: len(text) for name, text in self._draft.texts.items() if text is not None}
        return {name: size for name, size in {**self._source.sizes(), **changed}.items() if self._kept(name)}

    def _kept(self, name: str) -> bool:
        return self._draft.texts.get(name, b"") is not None

    def open(self, name: str) -> ByteSource:
        text = self._draft.texts.get(name)
        return MemoryBytes(name, text) if text is not None else self._source.open(name)

    def close(self) -> None:
        """Nothing: the files belong to the source."""


def begin(source: Checkpoint) -> Draft:
    """The draft of an unchanged checkpoint.

    A pickle's tensors get files of their own, since it cannot be written: `pytorch_model.bin` becomes
    `model.safetensors`, each shard one shard.

    Raises:
        UsageError: the checkpoint is one file of a directory, or not on this machine, or in a format without edits.
        CheckpointError: a part is missing or unreadable, or it is unclear which files are the model.
    """
    other = "a GGUF file" if source.gguf is not None else source.graph.format.noun if source.graph is not None else None
    if other is not None:
        raise UsageError(
            f"{source.location}: is {other}, expected safetensors or pytorch_model.bin",
            help="edit the checkpoint that it was converted from, and convert again",
        )
    if source.only is not None:
        raise UsageError(
            f"{source.location}: is one file of a checkpoint, expected its directory",
            help=f"give {source.files.location}",
        )
    if not source.complete:
        raise CheckpointError(
            f"{source.location}: a part of the checkpoint cannot be read: {source.lints[0].message}",
            help="fetch the missing files, and check with `bowline audit`",
        )
    for lint in source.lints:
        if lint.kind in REFUSED:
            raise CheckpointError(f"{source.location}: {lint.message}", help=REFUSED[lint.kind])
    tensors = {name: Stored(source, tensor) for name, tensor in source.tensors.items()}
    homes = {name: _home(tensor.file) for name, tensor in source.tensors.items()}
    return Draft(source=source, tensors=tensors, homes=homes)


def _home(file: str) -> str:
    """The safetensors file for the tensors of a file."""
    if file.endswith(".safetensors"):
        return file
    return file.removesuffix(".bin").replace("pytorch_model", "model", 1) + ".safetensors"


def header_metadata(source: Checkpoint, file: str) -> Mapping[str, str]:
    """The metadata in the header of one safetensors file; what transformers requires, for a pickle."""
    if not file.endswith(".safetensors") or not source.files.has(file):
        return {"format": "pt"}
    with source.files.open(file) as opened:
        return read_header(opened).metadata
