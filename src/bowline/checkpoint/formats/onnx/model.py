"""An ONNX file as a checkpoint: its initializers as stored tensors, with the table and the heads found by their use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bowline.checkpoint.formats.dtypes import BITS
from bowline.checkpoint.formats.onnx import SCALED
from bowline.checkpoint.formats.onnx.graph import Initializer, read_model
from bowline.checkpoint.formats.onnx.uses import Scaling, Use, Uses, find_uses
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.checkpoint.formats.strict_json import shown
from bowline.checkpoint.places.byte_source import ByteSource
from bowline.checkpoint.places.file_set import FileSet
from bowline.errors import CheckpointError, FormatError

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["MOST_CODED", "Head", "OnnxModel", "dequantise", "read_onnx", "varint_bytes"]

MOST_CODED: Final = 256 << 20
"""The bytes of a tensor whose numbers are varints; it is decoded whole."""
MOST_SCALES: Final = 1 << 24
LONGEST = 10
"""The bytes of a varint."""


class Head(NamedTuple):
    """The matrix of one head: its tensor, and the node that multiplies by it."""

    tensor: str
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxModel:
    """The tensors of one ONNX file, and which of them are the table and the heads."""

    file: str
    files: tuple[str, ...]
    """The file, and those that hold its external data."""
    tensors: Mapping[str, StoredTensor]
    """The initializers as stored; table and heads with the vocabulary's rows first, by strides where the file has
    them the other way round."""
    table: str | None
    copies: tuple[str, ...]
    """Further tables of look-ups that have the table's shape."""
    heads: tuple[Head, ...]
    scaling: Mapping[str, Scaling]
    """How the codes of a tensor become numbers."""
    coded: Mapping[str, int]
    """The stored bytes of the tensors whose numbers are varints."""
    opaque: frozenset[str]
    """Matrices of the table and the heads whose numbers are packed in a way that is not read."""


def read_onnx(files: FileSet, name: str) -> OnnxModel:
    """Read the ONNX file `name`; of the files with its external data only the sizes are looked at.

    Raises:
        FormatError: the file is damaged, or the bytes of a tensor lie beyond their file.
        CheckpointError: external data is missing, outside the directory, or cannot be read.
    """
    with files.open(name) as source:
        uses = find_uses(read_model(source))
    sizes: dict[str, int] = {}
    stored = {key: _stored(files, name, tensor, sizes) for key, tensor in uses.tensors.items()}
    tables, heads = _ends(uses)
    views = {use.tensor: use for use in (*heads, *tables)}  # a matrix of both is seen as the look-up has it
    opaque = set()
    for key, use in views.items():
        seen = _as_rows(stored[key], use, uses)
        if seen is None:
            opaque.add(key)
        else:
            stored[key] = seen
    return OnnxModel(
        file=name,
        files=(name, *sizes),
        tensors=stored,
        table=tables[0].tensor if tables else None,
        copies=tuple(dict.fromkeys(use.tensor for use in tables[1:] if use.tensor != tables[0].tensor)),
        heads=tuple({use.tensor: Head(use.tensor, use.node) for use in reversed(heads)}.values())[::-1],
        scaling={key: use.scaling for key, use in views.items() if use.scaling is not None and key not in opaque},
        coded={key: one.coded_bytes for key, one in uses.tensors.items() if one.coded_bytes is not None},
        opaque=frozenset(opaque),
    )


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


def _ends(uses: Uses) -> tuple[list[Use], list[Use]]:
    """The look-ups of the vocabulary's table, and the heads' products.

    The table is the largest one that a product at an output fits, otherwise the one with the most rows.
    """
    lookups = sorted(uses.lookups, key=lambda use: -prod(use.shape))
    shapes = [use.shape for use in lookups]
    known = set(shapes)
    fitting = [use for use in uses.at_output if use.shape in known]
    if not fitting:  # the head's rows may be padded, or the way to the output unknown
        alone = [use for use in uses.products if use.shape == (shapes[0] if shapes else None)]
        padded = [use for use in uses.at_output if shapes and use.shape[1] == shapes[0][1]]
        padded = [use for use in padded if 2 * use.shape[0] > shapes[0][0]]
        fitting = alone if len({use.tensor for use in alone}) == 1 else padded
    wanted = next((use.shape for use in fitting if use.shape in known), None)
    wanted = wanted or (shapes[0] if shapes else None)
    tables = [use for use in lookups if use.shape == wanted]
    return tables, fitting


def _as_rows(tensor: StoredTensor, use: Use, uses: Uses) -> StoredTensor | None:
    """The matrix with the vocabulary's rows first, dequantised if it has a scale; `None` if it cannot be read so."""
    codes = tensor.dtype in ("I8", "U8")
    if not use.readable or len(tensor.shape) != 2 or codes != (use.scaling is not None):
        return None
    if tensor.dtype not in ("F64", "F32", "F16", "BF16", "I8", "U8"):
        return None
    if use.scaling is not None and not _fits(tensor, use.scaling, uses):
        return None
    dtype = f"{tensor.dtype}*scale" if codes else tensor.dtype
    if use.transposed and min(tensor.shape) > 0:
        return tensor._replace(dtype=dtype, shape=tensor.shape[::-1], strides=(1, tensor.shape[1]))
    return tensor._replace(dtype=dtype)


def _fits(tensor: StoredTensor, scaling: Scaling, uses: Uses) -> bool:
    """Whether there is one scale (and zero point) for the matrix, or one for each row or column."""
    scale = uses.tensors[scaling.scale]
    zero = uses.tensors[scaling.zero_point] if scaling.zero_point is not None else None
    for one in (scale, zero):
        if one is not None and (len(one.shape) > 1 or prod(one.shape) > MOST_SCALES):
            return False
        if one is not None and prod(one.shape) != 1 and tensor.shape[scaling.axis : scaling.axis + 1] != one.shape:
            return False
    return scale.dtype in ("F32", "F16", "BF16") and (zero is None or zero.dtype == tensor.dtype)


def dequantise(
    codes: npt.NDArray[Any],
    scale: npt.NDArray[Any],
    zero_point: npt.NDArray[Any] | None,
) -> npt.NDArray[Any]:
    """`(codes - zero_point) * scale` in float32, as ONNX's DequantizeLinear computes it.

    Example:
        >>> import numpy as np
        >>> dequantise(np.array([[1, -2]], np.int8), np.float32(0.5), None)
        array([[ 0.5, -1. ]], dtype=float32)
    """
    import numpy as np

    whole = codes.astype(np.int32)
    if zero_point is not None:
        whole -= zero_point.astype(np.int32)
    values: npt.NDArray[Any] = whole.astype(np.float32) * scale.astype(np.float32)
    return values


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
