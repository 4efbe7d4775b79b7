"""The state of a GGUF file between the steps of an edit: its tensors as stored rows, and the keys that change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace

from bowline.checkpoint.checkpoint import Checkpoint
from bowline.checkpoint.formats.gguf.gguf_writer import GGUFEntry, first_bytes, padding, tensor_list
from bowline.checkpoint.formats.gguf.header import ArrayAt, GGUFHeader
from bowline.checkpoint.formats.gguf.value_bytes import KeyExtent, key_extents
from bowline.checkpoint.formats.safetensors_writer import Extent
from bowline.checkpoint.places.file_set import SMALL_FILE_LIMIT
from bowline.edit.content import BLOCK_BYTES
from bowline.edit.draft import Check
from bowline.edit.gguf.stored_rows import StoredRows
from bowline.errors import FormatError, UsageError

__all__ = ["GGUFDraft", "begin_gguf"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFDraft:
    """A GGUF file as it will be: its tensors in their order, and the values of the keys that change.

    `texts` are small files beside it that change, by name (`None`: removed). The `token_map` is a file too, whose name
    follows that of the result.
    """

    source: Checkpoint
    header: GGUFHeader
    extents: Mapping[str, KeyExtent]
    tensors: Mapping[str, StoredRows]
    values: Mapping[str, bytes] = field(default_factory=dict)
    texts: Mapping[str, bytes | None] = field(default_factory=dict)
    token_map: bytes | None = None
    notes: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()

    @property
    def architecture(self) -> str | None:
        """The text of `general.architecture`."""
        return self.header.architecture

    @property
    def changed(self) -> bool:
        """Whether any byte of the file changes."""
        stored = self.source.tensors
        return bool(self.values) or {
            name: (rows.tensor, rows.origins is None) for name, rows in self.tensors.items()
        } != {name: (tensor, True) for name, tensor in stored.items()}

    def value(self, key: str) -> bytes | None:
        """The bytes of a key's value, its type first, or `None` if there is no such key.

        Raises:
            FormatError: it has more than 256 MB.
        """
        if key in self.values:
            return self.values[key]
        extent = self.extents.get(key)
        if extent is None:
            return None
        if extent.stop - extent.value > SMALL_FILE_LIMIT:
            raise FormatError(
                f"{self.header.file}: the value of {key} has {extent.stop - extent.value} bytes, "
                f"expected at most {SMALL_FILE_LIMIT}",
                help="no vocabulary is that large; convert the model again",
            )
        with closing(self.source.files.open(self.header.file)) as opened:
            return opened.read_at(extent.value, extent.stop - extent.value)

    def array_lengths(self) -> dict[str, int]:
        """The number of items of each array that is as in the file, by key."""
        arrays = {key: value for key, value in self.header.values.items() if key not in self.values}
        return {key: value.length for key, value in arrays.items() if isinstance(value, ArrayAt)}

    def with_values(self, values: Mapping[str, bytes]) -> GGUFDraft:
        """With these values of keys that the file has."""
        return replace(self, values={**self.values, **values})

    def with_tensors(self, tensors: Mapping[str, StoredRows]) -> GGUFDraft:
        """With these tensors in place of all."""
        return replace(self, tensors=tensors)

    def with_notes(self, *notes: str) -> GGUFDraft:
        """With further sentences for the report."""
        return replace(self, notes=(*self.notes, *notes))

    # --- the file ---------------------------------------------------------------------------------------------------

    @property
    def _entries(self) -> list[GGUFEntry]:
        return [
            GGUFEntry(name=name, dtype=rows.dtype, shape=rows.shape, nbytes=rows.nbytes)
            for name, rows in self.tensors.items()
        ]

    def _key_bytes(self) -> int:
        return sum(
            extent.stop - extent.start if key not in self.values else extent.value - extent.start
            for key, extent in self.extents.items()
        ) + sum(map(len, self.values.values()))

    def nbytes(self) -> int:
        """The size of the file."""
        entries, alignment = self._entries, self.header.alignment
        start = len(first_bytes(3, 0, 0)) + self._key_bytes() + len(tensor_list(entries, alignment))
        if not entries:
            return start
        data = sum(entry.nbytes + padding(entry.nbytes, alignment) for entry in entries)
        return start + padding(start, alignment) + data

    def parts(self) -> Iterator[bytes | memoryview]:
        """The bytes of the file, in parts of about 512 KB; each is valid until the next is asked for."""
        yield from self._start()
        for rows in self.tensors.values():
            yield from rows.parts()
            yield bytes(padding(rows.nbytes, self.header.alignment))

    def sources(self) -> Iterator[bytes | memoryview | Extent]:
        """The same for a writer: a whole tensor is the range of the file that holds it."""
        yield from self._start()
        for rows in self.tensors.values():
            extent = self.source.extent(rows.tensor) if rows.origins is None else None
            if extent is None:
                yield from rows.parts()
            else:
                yield Extent(*extent)
            yield bytes(padding(rows.nbytes, self.header.alignment))

    def _start(self) -> Iterator[bytes]:
        """The bytes before the first tensor's."""
        entries, alignment = self._entries, self.header.alignment
        yield first_bytes(self.header.version, len(entries), len(self.extents))
        with closing(self.source.files.open(self.header.file)) as opened:
            for key, extent in self.extents.items():
                changed = self.values.get(key)
                stop = extent.stop if changed is None else extent.value
                for at in range(extent.start, stop, BLOCK_BYTES):
                    yield opened.read_at(at, min(BLOCK_BYTES, stop - at))
                if changed is not None:
                    yield changed
        listed = tensor_list(entries, alignment)
        yield listed
        if entries:
            yield bytes(padding(len(first_bytes(3, 0, 0)) + self._key_bytes() + len(listed), alignment))


def begin_gguf(source: Checkpoint) -> GGUFDraft:
    """The draft of an unchanged GGUF file.

    Raises:
        UsageError: the model is split in several files.
    """
    header = source.gguf
    assert header is not None
    if len(source.weight_files) > 1:
        raise UsageError(
            f"{source.location}: is split in {len(source.weight_files)} files, expected one GGUF file",
            help="merge them first: llama-gguf-split --merge",
        )
    with closing(source.files.open(header.file)) as opened:
        extents = key_extents(opened, header)
    tensors = {name: StoredRows(source, tensor) for name, tensor in source.tensors.items()}
    return GGUFDraft(source=source, header=header, extents=extents, tensors=tensors)
