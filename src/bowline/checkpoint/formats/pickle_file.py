"""Finds the tensors of a `pytorch_model.bin` and the places of their bytes, without torch or executing the pickle.

`torch_archive` reads the archive, and `pickle_machine` the pickle in it, with the names that `pickle_names` allows.
This module checks the pickle's claims about each tensor against the stored bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Final

from bowline.checkpoint.formats.pickle_machine import LARGEST_PICKLE, run_pickle
from bowline.checkpoint.formats.pickle_names import Storage, TensorClaim, kind_of
from bowline.checkpoint.formats.storage_view import StorageExtent, View, view_of
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.checkpoint.formats.strict_json import shown
from bowline.checkpoint.formats.torch_archive import CONVERT, TorchArchive
from bowline.checkpoint.places.byte_source import ByteSource
from bowline.errors import FormatError

__all__ = ["PickledFile", "read_pickle"]

_LONGEST_NAME: Final = 4096
_MOST_NOTES: Final = 100
_FETCH_AGAIN: Final = "fetch the file again, or save it again with torch.save"


@dataclass(frozen=True, slots=True, kw_only=True)
class PickledFile:
    """The tensors of one `pytorch_model.bin`, in its own order, and what else was in it.

    Names that share a storage in the file have the same extent: `StoredTensor.same_storage` says so. `notes` has a
    printable line for each of the first hundred entries that were left out because they are not tensors. `under` is
    the key, also printable, of the nested dictionary that has the tensors, if the saved one has none.
    """

    tensors: Mapping[str, StoredTensor]
    notes: tuple[str, ...]
    under: str | None = None


def read_pickle(source: ByteSource) -> PickledFile:
    """Read name, dtype, shape, strides and extent of every tensor that `torch.save` put into `source`.

    The tensors are the entries of the dictionary that was saved or, if it has none, of the one dictionary in it that
    does (`{"state_dict": {...}}`). Nothing is executed. Only the archive's directory, `data.pkl` and the header in
    front of each storage are read, not the data of a tensor.

    Raises:
        UnsafePickleError: the pickle asks for anything but the rebuilding of tensors; the message names it.
        FormatError: the file is not an archive of `torch.save`, or is malformed, or larger than the limits here, or
            its tensors do not fit a `StoredTensor` (quantized, sparse, complex128, a lazy conjugate).

    Example:
        >>> import io, pickle, zipfile
        >>> from bowline.checkpoint.places.byte_source import MemoryBytes
        >>> file = io.BytesIO()
        >>> with zipfile.ZipFile(file, "w") as archive:
        ...     archive.writestr("model/data.pkl", pickle.dumps({"weight": print}))
        >>> read_pickle(MemoryBytes("pytorch_model.bin", file.getvalue()))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        bowline.errors.UnsafePickleError: pytorch_model.bin: the pickle asks for 'builtins.print', expected only ...
    """
    archive = TorchArchive(source)
    data = archive.read(archive.pickle, LARGEST_PICKLE)
    saved = run_pickle(data, source.name)
    tensors, notes, under = _state_dict(saved, source.name)
    if not archive.checksum_holds(archive.pickle, data):
        notes.insert(0, "data.pkl does not match the archive's checksum")
    starts: dict[str, int] = {}
    for tensor in tensors.values():
        if tensor.storage.key not in starts:
            starts[tensor.storage.key] = _storage_start(archive, tensor.storage, source.name)
    stored = {
        name: _stored_tensor(name, tensor, starts[tensor.storage.key], source) for name, tensor in tensors.items()
    }
    return PickledFile(tensors=MappingProxyType(stored), notes=tuple(notes), under=under)


def _state_dict(saved: object, where: str) -> tuple[dict[str, TensorClaim], list[str], str | None]:
    """The tensors by name, notes on the entries that are left out, and the key if the dictionary is a nested one."""
    if not isinstance(saved, dict):
        raise _wrong(where, f"it holds {kind_of(saved)}, expected a dictionary of tensors", CONVERT)
    under: str | None = None
    left_out: list[tuple[object, object]] = []
    chosen = saved
    if saved and not _has_tensors(saved):
        nested = [(key, value) for key, value in saved.items() if isinstance(value, dict) and _has_tensors(value)]
        if len(nested) != 1:
            seen = [f"{shown(key)}: {kind_of(value)}" for key, value in islice(nested or saved.items(), 5)]
            found = f"{len(nested)} dictionaries of tensors" if nested else "no tensors"
            more = ", ..." if len(nested or saved) > len(seen) else ""
            raise _wrong(
                where,
                f"{found} ({', '.join(seen)}{more}), expected a dictionary of tensors, or one such dictionary inside",
                "save the model's state_dict() alone",
            )
        ((chosen_key, chosen),) = nested
        under = shown(chosen_key)
        left_out = [(key, value) for key, value in saved.items() if key != chosen_key]
    tensors: dict[str, TensorClaim] = {}
    for key, value in chosen.items():
        if isinstance(value, TensorClaim):
            tensors[_checked_name(key, where)] = value
        else:
            left_out.append((key, value))
    notes = [f"{shown(key)} is left out: {kind_of(value)}, not a tensor" for key, value in left_out[:_MOST_NOTES]]
    if len(left_out) > _MOST_NOTES:
        notes.append(f"and {len(left_out) - _MOST_NOTES} more are left out")
    return tensors, notes, under


def _has_tensors(value: Mapping[object, object]) -> bool:
    return any(isinstance(item, TensorClaim) for item in value.values())


def _checked_name(name: object, where: str) -> str:
    if not isinstance(name, str):
        raise _wrong(
            where, f"the key of a tensor is {kind_of(name)}, expected text", "save the model's state_dict() alone"
        )
    if len(name) > _LONGEST_NAME:
        raise _wrong(
            where, f"a tensor's name has {len(name)} characters, expected at most {_LONGEST_NAME}", _FETCH_AGAIN
        )
    try:
        name.encode()
    except UnicodeEncodeError:  # a pickle may hold lone surrogates, which cannot be printed
        raise _wrong(where, f"a tensor is called {shown(name)}, expected Unicode text", _FETCH_AGAIN) from None
    return name


def _storage_start(archive: TorchArchive, storage: Storage, where: str) -> int:
    """The position of the storage in the file; raises `FormatError` if its size differs from the pickle's claim."""
    entry = archive.find(f"data/{storage.key}")
    if entry is None:
        raise _wrong(where, f"storage {storage.key} is missing, expected an entry data/{storage.key}", _FETCH_AGAIN)
    if entry.size != storage.nbytes:
        raise _wrong(
            where,
            f"storage {storage.key} has {entry.size} bytes, expected {storage.nbytes} "
            f"for {storage.numel} elements of {storage.type.path}",
            _FETCH_AGAIN,
        )
    return archive.data_start(entry)


def _stored_tensor(name: str, claim: TensorClaim, storage_start: int, source: ByteSource) -> StoredTensor:
    """The extent that the view covers; raises `FormatError` if that is not within its storage."""
    where = f"{source.name}: tensor {shown(name)}"
    dtype, itemsize = claim.dtype.dtype, claim.dtype.itemsize
    if dtype is None:
        raise _wrong(where, f"its dtype is {claim.dtype.path}, expected one that safetensors has", CONVERT)
    storage = StorageExtent(source.name, storage_start, claim.storage.nbytes)
    return view_of(name, dtype, itemsize, View(claim.shape, claim.strides, claim.offset), storage, source.size)


def _wrong(where: str, seen: str, way_out: str) -> FormatError:
    return FormatError(f"{where}: {seen}", help=way_out)
