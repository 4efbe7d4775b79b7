"""An open checkpoint: its config, its tensors by name, and their rows as numpy arrays."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from bowline.checkpoint.formats.dtypes import BITS, decode
from bowline.checkpoint.formats.gguf import GGUF_SUFFIX
from bowline.checkpoint.formats.gguf.ggml_types import BLOCKS
from bowline.checkpoint.formats.graphs import GRAPH_SUFFIXES, SCALED
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.checkpoint.formats.strict_json import loads
from bowline.checkpoint.lint import Lint, LintKind
from bowline.checkpoint.places.byte_source import ByteSource, LocalFile, MemoryBytes
from bowline.checkpoint.places.closeable import Closing
from bowline.checkpoint.places.file_set import FileSet
from bowline.checkpoint.places.local_directory import LocalDirectory, directories_where
from bowline.checkpoint.weights import INDEX_SUFFIX, Weights, holds_weights, is_weight_file, read_weights
from bowline.errors import BowlineError, CheckpointError, FormatError, NoCheckpointError, UsageError
from bowline.wording import listed, located

if TYPE_CHECKING:
    import numpy.typing as npt

    from bowline.checkpoint.formats.gguf.header import GGUFHeader
    from bowline.checkpoint.formats.gguf.text_arrays import TokenIds
    from bowline.checkpoint.formats.graphs.graph_model import GraphModel

__all__ = ["Checkpoint", "checkpoints_at", "find_checkpoints", "open_checkpoint"]

CONFIG = "config.json"
BLOCK_BYTES = 1 << 20
FEW_ELEMENTS = 1 << 14
"""Strided rows that reach over no more elements than this are read in one piece."""
MOST_DIRECTORIES = 1000
"""An error looks at no more directories than this for checkpoints that could have been meant."""
HUB_GGUF = re.compile(r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)/(?P<file>[^@\\]+\.gguf)(?P<revision>@[^\s@]+)?")
"""One GGUF file of a repository: they hold one for each quantisation."""
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?(@[^\s@]+)?")
Kind = TypeVar("Kind", bound="Checkpoint")


@overload
def open_checkpoint(place: str | os.PathLike[str]) -> Checkpoint: ...
@overload
def open_checkpoint(place: str | os.PathLike[str], kind: type[Kind]) -> Kind: ...
def open_checkpoint(place: str | os.PathLike[str], kind: Any = None) -> Any:
    """Open a checkpoint: a directory, one of its files, or a Hub repository (`org/name[@revision]`).

    A GGUF file is a checkpoint of its own, also on the Hub (`org/name/file.gguf[@revision]`). So is an ONNX file or a
    program of torch.export (`.pt2`) on this machine: its table and head have the vocabulary's rows first.

    Only headers and `config.json` are read here; tensors are read when rows are asked for. A path on disk takes
    precedence over a Hub repository of the same name. `kind` is the class to open it as, `Checkpoint` or one derived
    from it.

    Raises:
        UsageError: `place` is not a path.
        NoCheckpointError: nothing has that name, or it holds no model.
        CheckpointError: it cannot be read; the subclass says whether the bytes, a pickle or the network is at fault.

    Example:
        >>> with open_checkpoint(minilm) as checkpoint:  # doctest: +SKIP
        ...     checkpoint.tensors["embeddings.word_embeddings.weight"].shape
        (30522, 384)
    """
    kind = kind or Checkpoint
    name = os.fspath(place) if isinstance(place, os.PathLike) else place
    if not isinstance(name, str):
        raise UsageError(f"{place!r:.60}: expected a path or org/name", help="give a directory, a file or org/name")
    if not name:
        raise UsageError("the path is empty", help="give a directory, a file or org/name")
    path = Path(name)
    if os.path.lexists(path):
        if os.path.isdir(path):  # noqa: PTH112 - Path.is_dir raises where a folder on the way may not be searched
            return _open_directory(path, kind)
        if path.name == CONFIG:
            return kind(LocalDirectory(path.parent))
        if is_weight_file(path.name) or path.name.endswith(INDEX_SUFFIX):
            return kind(LocalDirectory(path.parent), only=path.name, location=name)
        raise NoCheckpointError(
            f"{name}: expected a directory, *.safetensors, *.bin, *.gguf, *.onnx, *.pt2, an index or config.json",
            help="give the directory that holds config.json and the weights",
        )
    one = HUB_GGUF.fullmatch(name)
    if isinstance(place, str) and (one or (HUB_NAME.fullmatch(name) and not is_weight_file(name))):
        from bowline.checkpoint.places.hub import HubRepository  # imported only when the Hub is needed

        try:
            repository = HubRepository.open_repository(f"{one['repository']}{one['revision'] or ''}" if one else name)
        except BowlineError as error:  # a mistyped path can look like a name on the Hub
            raise type(error)(f"{error.message}; and no local path has this name", help=error.help) from None
        if one is None:
            return kind(repository)
        return kind(repository, only=one["file"], location=repository.place_of(one["file"]))
    raise NoCheckpointError(
        f"{name}: no such file or directory", help="check the path, or give a Hub repository as org/name"
    )


def find_checkpoints(root: str | os.PathLike[str]) -> tuple[Path, ...]:
    """The directories that hold a model, `root` and below; checkpoint-500 comes before checkpoint-1000.

    GGUF, ONNX and pt2 files are named one by one if a directory holds several, or other weights beside them: each is a
    checkpoint of its own. Links to directories and hidden directories are not entered.
    """
    found: list[Path] = []
    for directory in directories_where(root, holds_weights):
        other_weights, files = _models_in(directory)
        found += [directory] if other_weights or len(files) == 1 else []
        found += files if other_weights or len(files) > 1 else []
    return tuple(found)


def checkpoints_at(path: str | os.PathLike[str]) -> tuple[Path, ...]:
    """The checkpoints that a directory stands for: itself, or its GGUF, ONNX and pt2 files if they are all its weights.

    It stands for itself too if there is one such file alone.

    Anything else that `open_checkpoint` takes stands for itself.
    """
    if os.path.isdir(path):  # noqa: PTH112 - Path.is_dir raises where a folder on the way may not be searched
        other_weights, files = _models_in(Path(path))
        if len(files) > 1 and not other_weights:
            return tuple(files)
    return (Path(path),)


def _models_in(directory: Path) -> tuple[bool, list[Path]]:
    """The GGUF, ONNX and pt2 files of a directory, each a model; and whether it has weights in other formats too."""
    try:
        names = sorted(os.listdir(directory))  # noqa: PTH208 - as the names that holds_weights takes
    except OSError:  # opening it says so
        return True, []
    ggufs = [name for name in names if name.endswith(GGUF_SUFFIX)]
    models = [name for name in names if name.endswith(GRAPH_SUFFIXES)]
    if ggufs:
        from bowline.checkpoint.formats.gguf.split_files import gguf_models  # imported only for GGUF files

        models += gguf_models(ggufs)
    elif not models:
        return True, []
    other = holds_weights(name for name in names if not name.endswith((GGUF_SUFFIX, *GRAPH_SUFFIXES)))
    return other, [directory / name for name in sorted(models)]


def _open_directory(path: Path, kind: type[Kind]) -> Kind:
    """Open a directory; if it holds no model, the error names the checkpoints below it."""
    try:
        return kind(LocalDirectory(path))
    except NoCheckpointError as error:
        below = [found for found in directories_where(path, holds_weights, MOST_DIRECTORIES) if found != path]
        if not below:
            raise
        names = listed([found.relative_to(path).as_posix() for found in below], 4)
        count = f"{len(below)} checkpoint{'s' * (len(below) != 1)}"
        raise NoCheckpointError(
            f"{path}: no model here, but {count} below: {names}",
            help="give one of them; `bowline audit --recursive` audits each",
        ) from error


class Checkpoint(Closing):
    """The files of one model: `tensors[name]` describes a stored tensor, `rows(name)` reads its values.

    `config` is `config.json` as it is written, or `None` when it is missing or malformed (`lints` says which). A GGUF
    file's metadata takes its place.
    Use it as a context manager, or `close()` it.
    """

    def __init__(self, files: FileSet, only: str | None = None, location: str | None = None) -> None:
        self.files = files
        self.only = only
        self.location = location or files.location
        self._sources: dict[str, ByteSource] = {}
        self._maps: dict[str, memoryview] = {}
        self._decoded: dict[str, MemoryBytes] = {}
        try:
            self._weights: Weights = read_weights(files, only)
        except BaseException as error:
            files.close()
            if isinstance(error, CheckpointError):
                raise type(error)(located(error.message, self.location), help=error.help) from error
            raise

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Every stored tensor by name."""
        return self._weights.tensors

    @property
    def weight_files(self) -> tuple[str, ...]:
        """The files that hold the tensors."""
        return self._weights.files

    @property
    def metadata(self) -> Mapping[str, str]:
        """The `__metadata__` of all safetensors files, merged."""
        return self._weights.metadata

    @property
    def gguf(self) -> GGUFHeader | None:
        """The header of a model in GGUF, the format of llama.cpp; `None` for every other format."""
        return self._weights.gguf

    @property
    def graph(self) -> GraphModel | None:
        """The table, the heads and the scales of an ONNX or pt2 file; `None` for every other format."""
        return self._weights.graph

    def token_ids(self) -> TokenIds | None:
        """The tokens that a GGUF file holds, by text; `None` if it has none, or for every other format."""
        from bowline.checkpoint.formats.gguf.text_arrays import TOKENS, read_token_ids

        array = self.gguf.text_array(TOKENS) if self.gguf else None
        return read_token_ids(self._source(self.gguf.file), array) if self.gguf and array else None

    @property
    def complete(self) -> bool:
        """Whether every file that the model consists of was read."""
        return self._weights.complete

    @cached_property
    def lints(self) -> tuple[Lint, ...]:
        """Faults of the files that did not prevent reading them."""
        return self._weights.lints + self._config_and_lints[1]

    @property
    def config(self) -> Mapping[str, Any] | None:
        """The content of `config.json`, or `None` if it is missing or malformed; a GGUF file's numbers and short texts.

        A GGUF file's keys are as written (`"llama.vocab_size"`); its arrays and long texts are left out.
        """
        return self._config_and_lints[0]

    @cached_property
    def _config_and_lints(self) -> tuple[Mapping[str, Any] | None, tuple[Lint, ...]]:
        if self.gguf is not None:
            return self.gguf.plain_values, ()
        if self.graph is not None and not self.files.has(CONFIG):  # a graph needs no config
            return None, ()
        if not self.files.has(CONFIG):
            return None, (
                Lint(
                    kind=LintKind.CONFIG_MISSING,
                    message=f"no {CONFIG} beside the weights; the audit knows only names and shapes",
                ),
            )
        way_out = self.files.way_out(CONFIG)
        outside = Lint(kind=LintKind.CONFIG_OUTSIDE, message=f"{CONFIG} {way_out}; it was read", files=(CONFIG,))
        seen = () if way_out is None else (outside,)
        try:
            content = loads(self.files.read(CONFIG, outside=True), CONFIG, allow_nonfinite=True)
            if not isinstance(content, dict):
                raise FormatError(f"{CONFIG}: expected an object, got {type(content).__name__}")
        except CheckpointError as error:
            return None, (*seen, Lint(kind=LintKind.CONFIG_MALFORMED, message=error.message, files=(CONFIG,)))
        return content, seen

    def json(self, name: str) -> Any:
        """The content of a JSON file, or `None` if the checkpoint lacks it. Raises `FormatError` on bad JSON."""
        return loads(self.files.read(name), name, allow_nonfinite=True) if self.files.has(name) else None

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
        """Rows `[start, stop)` of a tensor (along its first axis), exact, in native numpy types.

        bf16 and the 8-bit floats come as float32, which holds each of their values exactly. Quantised rows of GGUF come
        as float32, the same numbers that the package `gguf` gives; and so do the codes of a table or head that an ONNX
        graph dequantises.

        Raises:
            UsageError: the checkpoint has no such tensor, or the tensor has no such rows.
            CheckpointError: the bytes cannot be read.
        """
        tensor = self._tensor(name)
        return self._rows(tensor, start, _row_count(tensor) if stop is None else stop)

    def _rows(self, tensor: StoredTensor, start: int, stop: int) -> npt.NDArray[Any]:
        name, count = tensor.name, _row_count(tensor)
        if not 0 <= start <= stop <= count:
            raise UsageError(f"{name}: rows {start} to {stop} were requested, but it has {count}")
        shape = (stop - start, *tensor.shape[1:]) if tensor.shape else ()
        if tensor.dtype in SCALED:
            return self._scaled(tensor, start, shape)
        if tensor.strides is not None:
            return self._strided(tensor, start, shape)
        if tensor.dtype in BLOCKS:
            return self._dequantised(tensor, start, shape)
        buffer = bytearray(shape[0] * row_bytes(tensor) if shape else tensor.nbytes)
        self.read_rows_into(name, start, memoryview(buffer))
        return decode(buffer, tensor.dtype, shape)

    def bits(self, name: str, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
        """Rows `[start, stop)` of a tensor as their bit patterns: unsigned integers as wide as its elements.

        Raises:
            UsageError: the checkpoint has no such tensor, or the tensor has no such rows.
            FormatError: its elements do not fill whole bytes each.
            CheckpointError: the bytes cannot be read.
        """
        tensor = self._tensor(name)
        width = BITS.get(tensor.dtype, 0)
        if width % 8 or not width:
            raise FormatError(f"{name}: stored as {tensor.dtype}, whose elements are not whole bytes")
        stop = _row_count(tensor) if stop is None else stop
        return self._rows(tensor._replace(dtype=f"U{width}"), start, stop)

    def blocks(self, name: str, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Read a tensor in blocks of whole rows, `(first row, rows)`; memory does not grow with its size."""
        tensor = self._tensor(name)
        count = _row_count(tensor)
        whole = tensor.dtype in BLOCKS and len(tensor.shape) == 1
        step = max(1, count if whole else block_bytes // max(1, row_bytes(tensor)))
        for start in range(0, count, step):
            yield start, self.rows(name, start, min(start + step, count))

    def read_rows_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the stored bytes from row `start` on. Only for tensors without strides."""
        tensor = self._tensor(name)
        if tensor.strides is not None:
            raise FormatError(f"{name}: stored with strides {tensor.strides}, expected rows without gaps")
        per_row = row_bytes(tensor)
        if start * per_row + buffer.nbytes > tensor.nbytes:
            raise UsageError(
                f"{name}: {buffer.nbytes} bytes from row {start} were requested, but it has {tensor.nbytes} in all"
            )
        source, offset = self._bytes_of(tensor)
        source.read_into(offset + start * per_row, buffer)

    def read_bytes_into(self, tensor: StoredTensor, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the stored bytes of one of `tensors`, from byte `start` of it on, whatever they mean."""
        source, offset = self._bytes_of(tensor)
        source.read_into(offset + start, buffer)

    def extent(self, tensor: StoredTensor) -> tuple[int, int, int] | None:
        """Where one of `tensors` lies in its open file on this machine: descriptor, offset, length; else `None`."""
        source, offset = self._bytes_of(tensor)
        return source.extent(offset, tensor.nbytes) if isinstance(source, LocalFile) else None

    def stored_bytes(self, tensor: StoredTensor, *, mapped: bool = True) -> tuple[memoryview, int]:
        """A writable buffer that holds the bytes of one of `tensors`, and the position in it where they begin.

        With `mapped`, for a file on this machine, the buffer is the whole file, mapped copy on write
        (`LocalFile.map`). Otherwise the bytes are read as stored, strides included.
        """
        source, offset = self._bytes_of(tensor)
        if mapped and isinstance(source, LocalFile) and tensor.file in self._maps:
            return self._maps[tensor.file], tensor.offset
        if mapped and isinstance(source, LocalFile) and tensor.nbytes:
            self._maps[tensor.file] = memoryview(source.map())
            return self._maps[tensor.file], tensor.offset
        import numpy as np

        buffer = np.empty(tensor.nbytes, dtype=np.uint8).data  # a bytearray would be zeroed first
        source.read_into(offset, buffer)
        return buffer, 0

    def _dequantised(self, tensor: StoredTensor, start: int, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Rows of a tensor that GGUF stores in blocks; the blocks of a vector are dequantised together."""
        from bowline.checkpoint.formats.gguf.blocks import dequantise  # imported only for GGUF files

        if len(tensor.shape) == 1:
            whole = dequantise(
                self._source(tensor.file).read_at(tensor.offset, tensor.nbytes), tensor.dtype, tensor.shape
            )
            return whole[start : start + shape[0]]
        buffer = bytearray(shape[0] * row_bytes(tensor))
        self.read_rows_into(tensor.name, start, memoryview(buffer))
        return dequantise(buffer, tensor.dtype, shape)

    def _scaled(self, tensor: StoredTensor, start: int, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Rows of a matrix of codes that an ONNX graph dequantises."""
        from bowline.checkpoint.formats.graphs.graph_model import dequantise  # imported only for graphs

        assert self.graph is not None
        scaling = self.graph.scaling[tensor.name]
        codes = tensor._replace(dtype=SCALED[tensor.dtype])
        if codes.strides is not None:
            rows = self._strided(codes, start, shape)
        else:
            buffer = bytearray(math.prod(shape))
            self.read_rows_into(tensor.name, start, memoryview(buffer))
            rows = decode(buffer, codes.dtype, shape)
        parts = []
        for name in (scaling.scale, scaling.zero_point):
            factor = None if name is None else self.rows(name).reshape(-1)
            if factor is not None and factor.size > 1:
                by_row = (scaling.axis == 0) == (tensor.strides is None)
                factor = factor[start : start + shape[0], None] if by_row else factor
            parts.append(factor)
        assert parts[0] is not None
        return dequantise(rows, parts[0], parts[1])

    def _bytes_of(self, tensor: StoredTensor) -> tuple[ByteSource, int]:
        """The file of a tensor's bytes, and where they begin; numbers that ONNX stores as varints come from memory."""
        stored = self.graph.coded.get(tensor.name) if self.graph is not None else None
        if stored is None:
            return self._source(tensor.file), tensor.offset
        if tensor.name not in self._decoded:
            from bowline.checkpoint.formats.onnx.model import varint_bytes  # imported only for ONNX files

            raw = varint_bytes(self._source(tensor.file), tensor, stored)
            self._decoded[tensor.name] = MemoryBytes(tensor.file, raw)
        return self._decoded[tensor.name], 0

    def _strided(self, tensor: StoredTensor, start: int, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Rows of a tensor with strides: reads the bytes that they span, and takes the view in memory."""
        import numpy as np

        assert tensor.strides is not None
        if 0 in shape:
            return decode(b"", tensor.dtype, shape)
        itemsize = BITS[tensor.dtype] // 8
        reach = sum((extent - 1) * stride for extent, stride in zip(shape, tensor.strides, strict=True))
        source, offset = self._bytes_of(tensor)
        offset += start * tensor.strides[0] * itemsize
        sparse = reach > FEW_ELEMENTS and reach > 2 * math.prod(shape)
        if sparse and tensor.strides[0] == 1 and len(shape) == 2 and isinstance(source, (LocalFile, MemoryBytes)):
            columns = bytearray(math.prod(shape) * itemsize)
            for column in range(shape[1]):  # a transposed matrix: each column of these rows stands together
                part = memoryview(columns)[column * shape[0] * itemsize : (column + 1) * shape[0] * itemsize]
                source.read_into(offset + column * tensor.strides[1] * itemsize, part)
            return np.ascontiguousarray(decode(columns, tensor.dtype, shape[::-1]).T)
        raw = source.read_at(offset, (reach + 1) * itemsize)
        flat = decode(raw, tensor.dtype, (reach + 1,))
        view = np.lib.stride_tricks.as_strided(
            flat, shape, tuple(stride * flat.itemsize for stride in tensor.strides), writeable=False
        )
        return np.ascontiguousarray(view)

    def _tensor(self, name: str) -> StoredTensor:
        try:
            return self.tensors[name]
        except KeyError:
            raise UsageError(f"{self.location}: no tensor {name!r}", help="list them with .tensors") from None

    def _source(self, file: str) -> ByteSource:
        if file not in self._sources:
            self._sources[file] = self.files.open(file)
        return self._sources[file]

    def close(self) -> None:
        """Close every file. Buffers from `stored_bytes` stay valid."""
        for source in self._sources.values():
            source.close()
        self._sources.clear()
        self._maps.clear()
        self._decoded.clear()
        self.files.close()


def row_bytes(tensor: StoredTensor) -> int:
    """The stored size of one row. Raises `FormatError` when rows do not end on a byte, or are parts of a block."""
    if tensor.dtype in BLOCKS:
        if len(tensor.shape) == 1:
            raise FormatError(f"{tensor.name}: a vector of {tensor.dtype}, whose elements are not stored one by one")
        return tensor.nbytes // max(1, tensor.shape[0])
    dtype = SCALED.get(tensor.dtype, tensor.dtype)
    if dtype not in BITS:
        raise FormatError(
            f"{tensor.name}: stored as {dtype}, which is not decoded", help="other tensors of the file can be read"
        )
    bits = math.prod(tensor.shape[1:]) * BITS[dtype]
    if bits % 8:
        raise FormatError(f"{tensor.name}: a row has {bits} bits, expected whole bytes")
    return bits // 8


def _row_count(tensor: StoredTensor) -> int:
    return tensor.shape[0] if tensor.shape else 1
