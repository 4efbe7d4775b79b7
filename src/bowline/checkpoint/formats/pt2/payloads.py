"""The stored tensors of a program: `data/weights` and `data/constants` of the archive, and the configs that name them.

A config has an entry for each name: the payload that holds the tensor's storage, and the tensor's dtype, shape, strides
and offset in it. Two names of one payload are one tensor, stored once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from bowline.checkpoint.formats.pt2.json_fields import FETCH_AGAIN, JsonDocument
from bowline.checkpoint.formats.storage_view import StorageExtent, View, view_of
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.checkpoint.formats.strict_json import loads, shown
from bowline.checkpoint.formats.torch_archive import StoredZip, ZipEntry
from bowline.checkpoint.places.byte_source import ByteSource
from bowline.errors import FormatError

__all__ = ["SUBCLASS", "read_json", "read_payloads"]

SUBCLASS: Final = "PICKLE"
"""The dtype of a tensor of a subclass, whose payload is a pickle. It is not read."""
LARGEST_CONFIG: Final = 32 << 20
MOST_TENSORS: Final = 1 << 16
MOST_AXES: Final = 64
LONGEST_NAME: Final = 4096
STRIDED: Final = 7
FOLDERS: Final = ("weights", "constants")
DTYPES: Final[Mapping[int, tuple[str, int]]] = {
    1: ("U8", 1),
    2: ("I8", 1),
    3: ("I16", 2),
    4: ("I32", 4),
    5: ("I64", 8),
    6: ("F16", 2),
    7: ("F32", 4),
    8: ("F64", 8),
    9: ("C32", 4),
    10: ("C64", 8),
    11: ("C128", 16),
    12: ("BOOL", 1),
    13: ("BF16", 2),
    28: ("U16", 2),
    29: ("F8_E4M3", 1),
    30: ("F8_E5M2", 1),
    31: ("F8_E4M3FNUZ", 1),
    32: ("F8_E5M2FNUZ", 1),
    33: ("F8_E8M0", 1),
    34: ("U32", 4),
    35: ("U64", 8),
}
"""The numbers of `torch._export.serde.schema.ScalarType` (torch 2.11 to 2.14), and the bytes of an element."""


def read_json(archive: StoredZip, entry: ZipEntry, source: ByteSource, limit: int) -> tuple[object, JsonDocument]:
    """The content of a JSON entry of at most `limit` bytes, whose checksum must hold.

    Raises:
        FormatError: the entry is larger, damaged, or not strict JSON.
    """
    place = f"{source.name}: {entry.name.partition('/')[2]}"
    data = archive.read(entry, limit)
    if not archive.checksum_holds(entry, data):
        raise FormatError(f"{place}: the content does not match the archive's checksum", help=FETCH_AGAIN)
    return loads(data, place, help=FETCH_AGAIN), JsonDocument(place)


def read_payloads(archive: StoredZip, model: str, source: ByteSource) -> dict[str, StoredTensor]:
    """Every tensor of the program `model`, by the name that the module has for it.

    Raises:
        FormatError: a config is missing or malformed, or a tensor does not lie within its payload.
    """
    tensors: dict[str, StoredTensor] = {}
    starts: dict[str, int] = {}
    for folder in FOLDERS:
        name = f"data/{folder}/{model}_{folder}_config.json"
        entry = archive.find(name)
        if entry is None:
            raise FormatError(f"{source.name}: has no {name}, expected the tensors of {shown(model)}", help=FETCH_AGAIN)
        content, document = read_json(archive, entry, source, LARGEST_CONFIG)
        config = document.member(content, "config", dict)
        if len(config) > MOST_TENSORS:
            document.refuse(f"names {len(config)} tensors, expected at most {MOST_TENSORS}")
        for key, meta in config.items():
            if len(key) > LONGEST_NAME:
                document.refuse(f"a name has {len(key)} characters, expected at most {LONGEST_NAME}")
            if key in tensors:
                document.refuse(f"{shown(key)} is a weight and a constant, expected one of them")
            tensor = _tensor(archive, source, document, folder, key, meta, starts)
            if tensor is not None:
                tensors[key] = tensor
    return tensors


def _tensor(
    archive: StoredZip,
    source: ByteSource,
    document: JsonDocument,
    folder: str,
    name: str,
    meta: object,
    starts: dict[str, int],
) -> StoredTensor | None:
    """One entry of a config; `None` if it is not a tensor, but an object that only torch reads."""
    path = f"data/{folder}/{document.member(meta, 'path_name', str)}"
    pickled = document.member(meta, "use_pickle", bool)
    assert isinstance(meta, dict)
    if meta.get("tensor_meta") is None:
        return None
    stated = document.member(meta, "tensor_meta", dict)
    payload = archive.find(path)
    if payload is None:
        document.refuse(f"{shown(name)} is in {shown(path)}, which is missing")
    if path not in starts:
        starts[path] = archive.data_start(payload)
    storage = StorageExtent(source.name, starts[path], payload.size)
    number = document.member(stated, "dtype", int)
    if number not in DTYPES:
        document.refuse(f"{shown(name)} has the dtype {shown(number)}, expected one that torch 2.14 has")
    view = View(
        shape=_sizes(document, stated, "sizes", name),
        strides=_sizes(document, stated, "strides", name),
        offset=document.size(stated.get("storage_offset"), f"storage_offset of {shown(name)}"),
    )
    if len(view.shape) != len(view.strides):
        document.refuse(f"{shown(name)} has {len(view.shape)} sizes and {len(view.strides)} strides")
    if pickled or document.member(stated, "layout", int) != STRIDED:
        return StoredTensor(name, SUBCLASS, view.shape, source.name, storage.start, storage.nbytes)
    dtype, itemsize = DTYPES[number]
    return view_of(name, dtype, itemsize, view, storage, source.size, help=FETCH_AGAIN)


def _sizes(document: JsonDocument, stated: Mapping[str, object], key: str, name: str) -> tuple[int, ...]:
    sizes = document.member(stated, key, list)
    if len(sizes) > MOST_AXES:
        document.refuse(f"{shown(name)} has {len(sizes)} axes, expected at most {MOST_AXES}")
    return tuple(document.size(one, f"{key} of {shown(name)}") for one in sizes)
