"""An ONNX file as a checkpoint: its initializers as stored tensors, with the table and the heads found by their use."""

from __future__ import annotations

from math import prod
from typing import Final

from bowline.checkpoint.formats.dtypes import BITS
from bowline.checkpoint.formats.graphs import ONNX, SCALED
from bowline.checkpoint.formats.graphs.graph_model import GraphModel, graph_model
from bowline.checkpoint.formats.graphs.nodes import Initializer
from bowline.checkpoint.formats.graphs.uses import find_uses
from bowline.checkpoint.formats.onnx.graph import read_model
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.checkpoint.formats.strict_json import shown
from bowline.checkpoint.places.byte_source import ByteSource
from bowline.checkpoint.places.file_set import FileSet
from bowline.errors import CheckpointError, FormatError

__all__ = ["MOST_CODED", "read_onnx", "varint_bytes"]

MOST_CODED: Final = 256 << 20
"""The bytes of a tensor whose numbers are varints; it is decoded whole."""
LONGEST = 10
"""The bytes of a varint."""


def read_onnx(files: FileSet, name: str) -> GraphModel:
    """Read the ONNX file `name`; of the files with its external data only the sizes are looked at.

    Raises:
        FormatError: the file is damaged, or the bytes of a tensor lie beyond their file.
        CheckpointError: external data is missing, outside the directory, or cannot be read.
    """
    with files.open(name) as source:
        uses = find_uses(read_model(source))
    sizes: dict[str, int] = {}
    stored = {key: _stored(files, name, tensor, sizes) for key, tensor in uses.tensors.items()}
    coded = {key: one.coded_bytes for key, one in uses.tensors.items() if one.coded_bytes is not None}
    return graph_model(ONNX, (name, *sizes), uses, stored, coded)


def _stored(files: FileSet, file: str, tensor: Initializer, sizes: dict[str, int]) -> StoredTensor:
    if tensor.external is not None and tensor.nbytes:
        where = tensor.external
        if where.location not in sizes:
            sizes[where.location] = _size(files, file, tensor.name, where.location)
        if where.offset + tensor.nbytes > sizes[where.location]:
            raise FormatError(
                f"{where.location}: tensor {shown(tensor.name)} of {file} has the bytes {where.offset} to "
                f"{where.offset + tensor.nbytes}, but the file has {sizes[where.location]}",
                help="the download or the copy was cut short; fetch the file again",
            )
        file = where.location
    return StoredTensor(tensor.name, tensor.dtype, tensor.shape, file, tensor.offset, tensor.nbytes)


def _size(files: FileSet, file: str, tensor: str, location: str) -> int:
    way_out = files.way_out(location)
    if way_out:
        raise CheckpointError(
            f"{file}: the external data of tensor {shown(tensor)} is in {shown(location)}, which {way_out}; it was not "
            "opened",
            help="put the file beside the model; onnx and onnxruntime refuse such a path too",
        )
    if not files.has(location):
        raise CheckpointError(
            f"{file}: the external data of tensor {shown(tensor)} is in {shown(location)}, which is missing",
            help="fetch that file too, and put it beside the model",
        )
    with files.open(location) as source:
        return source.size


def varint_bytes(source: ByteSource, tensor: StoredTensor, stored: int) -> bytes:
    """The bytes of a tensor whose numbers are stored as varints, as raw_data would have them.

    Raises:
        FormatError: there are more or fewer numbers than the shape says, or too many to decode, or they are of a type
            of fewer than 8 bits.
    """
    import numpy as np

    dtype = SCALED.get(tensor.dtype, tensor.dtype)
    what = f"{tensor.file}: tensor {shown(tensor.name)}"
    if dtype not in BITS or BITS[dtype] < 8 or stored > MOST_CODED:
        raise FormatError(
            f"{what} has {stored} bytes of varints, which are read up to {MOST_CODED} and for types of whole bytes",
            help="save the model again with onnx.save after onnx.numpy_helper.from_array, which stores raw data",
        )
    octets = np.frombuffer(source.read_at(tensor.offset, stored), np.uint8)
    ends = np.flatnonzero(octets < 0x80)
    starts = np.concatenate([np.zeros(min(1, len(ends)), np.intp), ends[:-1] + 1])
    lengths = ends - starts + 1
    count = prod(tensor.shape)
    if len(ends) != count or (octets.size and (octets[-1] >= 0x80 or lengths.max() > LONGEST)):
        raise FormatError(f"{what} has {len(ends)} numbers, expected {count}", help="fetch the file again")
    values = np.zeros(count, np.uint64)
    for place in range(int(lengths.max(initial=0))):
        more = lengths > place
        values[more] |= (octets[starts[more] + place].astype(np.uint64) & np.uint64(0x7F)) << np.uint64(7 * place)
    return values.astype(f"<u{BITS[dtype] // 8}").tobytes()
