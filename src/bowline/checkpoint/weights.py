"""Finds the files that hold a model, and maps each tensor name to its stored tensor; records the faults of the files.

The choice of files follows transformers: `model.safetensors`, else its index, else `pytorch_model.bin`, else that
index. Only headers are read: the cost grows with the number of files, not with their size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from bowline.checkpoint.formats.gguf import GGUF_SUFFIX
from bowline.checkpoint.formats.graphs import GRAPH_SUFFIXES, ONNX, PT2
from bowline.checkpoint.formats.other_files import (
    ADAPTER_CONFIG,
    FileKind,
    adapter_kind,
    file_kind,
    holds_adapter,
)
from bowline.checkpoint.formats.safetensors_header import read_header
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.checkpoint.formats.strict_json import loads, shown
from bowline.checkpoint.lint import Lint, LintKind
from bowline.checkpoint.places.file_set import FileSet
from bowline.checkpoint.places.local_directory import LocalDirectory
from bowline.errors import CheckpointError, FormatError, NoCheckpointError
from bowline.wording import joined, listed

if TYPE_CHECKING:
    from bowline.checkpoint.formats.gguf.header import GGUFHeader
    from bowline.checkpoint.formats.graphs.graph_model import GraphModel

__all__ = ["Weights", "holds_weights", "is_weight_file", "read_weights"]

SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
INDEX_SUFFIX = ".index.json"
DOWNLOAD = "ONNX and pt2 are audited on this machine: download the repository, and give the directory or the file"
MOST_SHARDS = 10_000
"""An index names no more files than this; the largest published models have a few hundred."""
SHARD_NAME = re.compile(r".+-\d{5}-of-\d{5}\.(safetensors|bin)")
UNSEEN = frozenset(
    {
        LintKind.SHARD_MISSING,
        LintKind.SHARD_MALFORMED,
        LintKind.PATH_LEAVES_DIRECTORY,
        LintKind.INDEX_DISAGREES,
        LintKind.INDEX_MISSING,
    }
)
"""The kinds of lint after which some tensors of the model may be missing from the mapping."""
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The tensors of a checkpoint and the files that hold them."""

    tensors: Mapping[str, StoredTensor]
    files: tuple[str, ...]
    metadata: Mapping[str, str]
    lints: tuple[Lint, ...]
    gguf: GGUFHeader | None = None
    """The header, if the model is in the format of llama.cpp."""
    graph: GraphModel | None = None
    """The table, the heads and the scales, if the model is a graph: ONNX or pt2."""
    part: bool = False
    """Whether this is one shard of several, asked for by name."""

    @property
    def complete(self) -> bool:
        """Whether every tensor of the model was found."""
        return not self.part and not any(lint.kind in UNSEEN for lint in self.lints)


@dataclass(slots=True)
class _File:
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str] = field(default_factory=dict)
    lints: list[Lint] = field(default_factory=list)


def is_weight_file(name: str) -> bool:
    """Whether a file of this name can hold tensors, by its suffix."""
    return name.endswith((".safetensors", ".bin", GGUF_SUFFIX, *GRAPH_SUFFIXES))


def holds_weights(names: Iterable[str]) -> bool:
    """Whether a directory with files of these names holds a model or an adapter.

    Example:
        >>> holds_weights(["config.json", "model-00001-of-00002.safetensors"]), holds_weights(["training_args.bin"])
        (True, False)
    """
    return any(
        name.endswith((".safetensors", GGUF_SUFFIX, *GRAPH_SUFFIXES))
        or name in [single + INDEX_SUFFIX for single in SINGLE_FILES]
        or re.fullmatch(r"(pytorch|adapter)_model.*\.bin", name)
        for name in names
    )


def read_weights(files: FileSet, only: str | None = None) -> Weights:
    """Read every tensor entry of the model in `files`, or of the one file (or index) `only`.

    Raises:
        NoCheckpointError: none of the files holds a model.
        FormatError: the only file, or every file, is malformed.
        UnsafePickleError: the only file is a pickle that asks for more than tensors.
    """
    names = files.sizes()
    if only is not None:
        return _sharded(files, only) if only.endswith(INDEX_SUFFIX) else _alone(files, only)
    for single in SINGLE_FILES:
        index = single + INDEX_SUFFIX
        if single in names:
            return _single(files, single, also=index if index in names else None)
        if index in names:
            return _sharded(files, index)
    if ADAPTER_CONFIG in names:
        raise _not_whole(files.location, adapter_kind(files))
    candidates = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    candidates = candidates or [name for name in names if re.fullmatch(r"pytorch_model.*\.bin", name)]
    shards = [name for name in candidates if SHARD_NAME.fullmatch(name)]
    if shards:
        return _without_index(files, shards)
    if len(candidates) == 1:
        return _single(files, candidates[0])
    if not candidates and any(name.endswith(GGUF_SUFFIX) for name in names):
        return _gguf(files, _only_gguf(files))
    if not candidates and any(name.endswith(GRAPH_SUFFIXES) for name in names):
        return _graph(files, _only_graph(files))
    raise _no_model(files, candidates)


def _gguf(files: FileSet, name: str) -> Weights:
    """Read a GGUF file and, if it is one part of several, the others."""
    from bowline.checkpoint.formats.gguf.split_files import gguf_models, read_gguf  # imported only for GGUF files

    if not files.has(name):  # on the Hub; a local file that was named is there
        others = _some(gguf_models(files.sizes())) or "none"
        raise NoCheckpointError(
            f"{files.location}: no file {shown(name)}; its GGUF files are: {others}",
            help="give one of them",
        )
    header, parts = read_gguf(files, name)
    return Weights(tensors=header.tensors, files=parts, metadata={}, lints=(), gguf=header)


def _only_gguf(files: FileSet) -> str:
    """The GGUF file of the one model in `files`; raises `NoCheckpointError` if there are several."""
    from bowline.checkpoint.formats.gguf.split_files import gguf_models  # imported only for GGUF files

    models = gguf_models(files.sizes())
    if len(models) > 1:
        raise NoCheckpointError(
            f"{files.location}: {len(models)} GGUF files, each a model of its own ({_some(models)})",
            help=f"give one of them, such as {files.place_of(models[0])}; `bowline audit` audits each of a directory",
        )
    return models[0]


def _graph(files: FileSet, name: str) -> Weights:
    """Read an ONNX or pt2 file of this machine; on the Hub a transposed head would take a request for each column."""
    if not isinstance(files, LocalDirectory):
        raise _not_whole(f"{files.location}: {name}", FileKind(f"{_noun(name)} on the Hub", DOWNLOAD))
    if name.endswith(ONNX.suffix):
        from bowline.checkpoint.formats.onnx.model import read_onnx  # imported only for ONNX files

        model = read_onnx(files, name)
    else:
        from bowline.checkpoint.formats.pt2.program_archive import read_pt2  # imported only for pt2 files

        model = read_pt2(files, name)
    return Weights(tensors=model.tensors, files=model.files, metadata={}, lints=(), graph=model)


def _noun(name: str) -> str:
    return ONNX.noun if name.endswith(ONNX.suffix) else PT2.noun


def _only_graph(files: FileSet) -> str:
    """The one ONNX or pt2 file in `files`; raises `NoCheckpointError` if there are several."""
    models = sorted(name for name in files.sizes() if name.endswith(GRAPH_SUFFIXES) and "/" not in name)
    kinds = joined([kind.name for kind in (ONNX, PT2) if any(name.endswith(kind.suffix) for name in files.sizes())])
    if len(models) != 1:
        raise NoCheckpointError(
            f"{files.location}: {len(models)} {kinds} files, each a graph of its own ({_some(models)})"
            if models
            else f"{files.location}: no model here, but {kinds} graphs below",
            help=f"give one of them, such as {files.place_of(models[0])}; `bowline audit` audits each of a directory"
            if models
            else DOWNLOAD,
        )
    return models[0]


def _alone(files: FileSet, name: str) -> Weights:
    """Read one file that was asked for by name, and ignore the files beside it."""
    if name.endswith(GGUF_SUFFIX):
        return _gguf(files, name)
    if name.endswith(GRAPH_SUFFIXES):
        return _graph(files, name)
    kind = file_kind(files, name)
    if kind is not None:
        raise _not_whole(name, kind)
    read = _read_file(files, name)
    if holds_adapter(read.tensors):
        raise _not_whole(name, adapter_kind(files))
    part = SHARD_NAME.fullmatch(name) is not None
    return Weights(tensors=read.tensors, files=(name,), metadata=read.metadata, lints=tuple(read.lints), part=part)


def _not_whole(place: str, kind: FileKind) -> NoCheckpointError:
    return NoCheckpointError(f"{place}: {kind.name}, expected a whole model", help=kind.help)


def _single(files: FileSet, name: str, also: str | None = None) -> Weights:
    read = _read_file(files, name)
    if holds_adapter(read.tensors):
        raise _not_whole(f"{files.location}: {name}", adapter_kind(files))
    lints = list(read.lints)
    named: set[str] = set()
    if also is not None:
        weight_map: Mapping[str, str] = {}
        try:
            weight_map, _ = _weight_map(files, also)
        except CheckpointError as error:
            lints.append(Lint(kind=LintKind.INDEX_MALFORMED, message=error.message, files=(also,)))
        named = set(weight_map.values())
        if named == {name}:  # the index of the single file itself: one model
            lints += _disagreements(also, weight_map, {name: read})
        else:
            lints.append(
                Lint(
                    kind=LintKind.TWO_MODELS,
                    message=f"{name} and {also} are both there: transformers reads the first, other loaders the second",
                    files=(name, also),
                )
            )
    lints += _orphans(files, {name, *named})
    return Weights(tensors=read.tensors, files=(name,), metadata=read.metadata, lints=tuple(lints))


def _sharded(files: FileSet, index: str) -> Weights:
    weight_map, total_size = _weight_map(files, index)
    shards = sorted(set(weight_map.values()))
    lints: list[Lint] = []
    reads = _read_shards(files, [shard for shard in shards if _is_there(files, shard, index, lints)], lints)
    if shards and not reads:
        raise CheckpointError(
            f"{files.location}: none of the {len(shards)} shards that {index} names can be read: "
            f"{lints[0].message if lints else 'no reason found'}",
            help="fetch the checkpoint again",
        )
    lints += _disagreements(index, weight_map, reads)
    lints += _orphans(files, {index.removesuffix(INDEX_SUFFIX), *shards})
    tensors = _merge(reads, weight_map)
    if total_size is not None and len(reads) == len(shards):
        lints += _total_size(index, total_size, tensors)
    return _weights(reads, tensors, lints)


def _without_index(files: FileSet, shards: list[str]) -> Weights:
    message = "1 shard, but no index; transformers does not load it"
    if len(shards) > 1:
        message = f"{len(shards)} shards, but no index; transformers loads none of them"
    lints = [
        Lint(
            kind=LintKind.INDEX_MISSING,
            message=message,
            files=tuple(shards),
        )
    ]
    reads = _read_shards(files, shards, lints)
    if not reads:
        raise CheckpointError(f"{files.location}: {lints[-1].message}", help="fetch the checkpoint again")
    lints += _disagreements(None, {}, reads)
    return _weights(reads, _merge(reads, {}), lints)


def _weights(reads: Mapping[str, _File], tensors: Mapping[str, StoredTensor], lints: list[Lint]) -> Weights:
    metadata: dict[str, str] = {}
    for read in reads.values():
        metadata.update(read.metadata)
        lints += read.lints
    return Weights(tensors=tensors, files=tuple(reads), metadata=metadata, lints=tuple(lints))


def _weight_map(files: FileSet, index: str) -> tuple[dict[str, str], int | None]:
    content = loads(files.read(index), index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise FormatError(
            f"{index}: expected an object with 'weight_map', a map from tensor names to file names",
            help="fetch the index again, or remove it when model.safetensors holds the model",
        )
    shards = len(set(weight_map.values()))
    if shards > MOST_SHARDS:
        raise FormatError(
            f"{index}: 'weight_map' names {shards} files, expected at most {MOST_SHARDS}",
            help="fetch the index again, or remove it when model.safetensors holds the model",
        )
    metadata = content.get("metadata") if isinstance(content, dict) else None
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total_size, float) and total_size.is_integer():  # torch has written such numbers as 1e9
        total_size = int(total_size)
    return weight_map, total_size if isinstance(total_size, int) else None


def _is_there(files: FileSet, shard: str, index: str, lints: list[Lint]) -> bool:
    way_out = files.way_out(shard)
    if way_out:
        lints.append(
            Lint(
                kind=LintKind.PATH_LEAVES_DIRECTORY,
                message=f"{index} names {shown(shard)}, which {way_out}; it was not opened",
                files=(index,),
            )
        )
    elif not files.has(shard):
        lints.append(
            Lint(
                kind=LintKind.SHARD_MISSING,
                message=f"{index} names {shown(shard)}, which is missing",
                files=(index,),
            )
        )
    else:
        return True
    return False


def _read_shards(files: FileSet, shards: list[str], lints: list[Lint]) -> dict[str, _File]:
    def read(name: str) -> _File | CheckpointError:
        try:
            return _read_file(files, name)
        except CheckpointError as error:
            return error

    reads: dict[str, _File] = {}
    for name, result in zip(shards, _in_parallel(files.parallel_reads, read, shards), strict=True):
        if isinstance(result, CheckpointError):
            lints.append(Lint(kind=LintKind.SHARD_MALFORMED, message=result.message, files=(name,)))
        else:
            reads[name] = result
    return reads


def _in_parallel(workers: int, do: Callable[[Item], Result], items: Iterable[Item]) -> Iterable[Result]:
    if workers < 2:
        return map(do, items)
    from concurrent.futures import ThreadPoolExecutor  # imported only where files are read in parallel

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(do, items))


def _read_file(files: FileSet, name: str) -> _File:
    with files.open(name) as source:
        if name.endswith(".safetensors"):
            header = read_header(source)
            lints = [
                Lint(
                    kind=LintKind.MISALIGNED if warning.kind == "misaligned" else LintKind.ODD_NAME,
                    message=warning.message,
                    files=(name,),
                    tensors=warning.tensors,
                )
                for warning in header.warnings
            ]
            return _File(header.tensors, header.metadata, lints)
        from bowline.checkpoint.formats.pickle_file import read_pickle  # imported only for checkpoints that are pickles

        pickled = read_pickle(source)
        message = f"{name}: the tensors are nested under {pickled.under}, expected at the top level"
        nested = Lint(kind=LintKind.NESTED_TENSORS, message=message, files=(name,))
        return _File(pickled.tensors, lints=[] if pickled.under is None else [nested])


def _merge(reads: Mapping[str, _File], weight_map: Mapping[str, str]) -> dict[str, StoredTensor]:
    """Merge the files to one tensor per name; of two, keep the one in the file that the index names."""
    tensors: dict[str, StoredTensor] = {}
    for shard, read in reads.items():
        for name, tensor in read.tensors.items():
            if name not in tensors or weight_map.get(name) == shard:
                tensors[name] = tensor
    return tensors


def _disagreements(index: str | None, weight_map: Mapping[str, str], reads: Mapping[str, _File]) -> list[Lint]:
    lints: list[Lint] = []
    homes: dict[str, list[str]] = {}
    for shard, read in reads.items():
        for name in read.tensors:
            homes.setdefault(name, []).append(shard)
    shared: dict[tuple[str, ...], list[str]] = {}
    for name, shards in homes.items():
        if len(shards) > 1:
            shared.setdefault(tuple(shards), []).append(name)
    for several, names in shared.items():
        are = "is" if len(names) == 1 else f"and {len(names) - 1} more are"
        lints.append(
            Lint(
                kind=LintKind.NAME_IN_TWO_SHARDS,
                message=f"{shown(names[0])} {are} stored in {_some(several)}; which one is loaded depends on the order",
                files=several,
                tensors=tuple(names),
            )
        )
    if index is None:
        return lints
    lost = sorted(name for name, shard in weight_map.items() if shard in reads and name not in reads[shard].tensors)
    unlisted = sorted(set(homes) - set(weight_map))
    for names, what in (
        (lost, "names tensors that their shards do not hold"),
        (unlisted, "does not name stored tensors"),
    ):
        if names:
            lints.append(
                Lint(
                    kind=LintKind.INDEX_DISAGREES,
                    message=f"{index} {what}: {_some(names)}",
                    files=(index,),
                    tensors=tuple(names),
                )
            )
    return lints


def _orphans(files: FileSet, used: set[str]) -> list[Lint]:
    orphans = [
        name for name in files.sizes() if name not in used and SHARD_NAME.fullmatch(name) and _same_kind(name, used)
    ]
    if not orphans:
        return []
    message = f"{_some(orphans)}: no index names {'it' if len(orphans) == 1 else 'them'}"
    return [Lint(kind=LintKind.ORPHAN_SHARD, message=message, files=tuple(orphans))]


def _same_kind(name: str, used: set[str]) -> bool:
    return any(other.rpartition(".")[2] == name.rpartition(".")[2] for other in used)


def _total_size(index: str, total_size: int, tensors: Mapping[str, StoredTensor]) -> list[Lint]:
    counted_twice = sum(tensor.nbytes for tensor in tensors.values())
    stored = sum({(tensor.file, tensor.offset): tensor.nbytes for tensor in tensors.values()}.values())
    if total_size in (stored, counted_twice, _bytes_in_use(tensors.values())):
        return []
    message = f"{index} says total_size {total_size}, but its tensors have {stored} bytes"
    return [Lint(kind=LintKind.WRONG_TOTAL_SIZE, message=message, files=(index,))]


def _bytes_in_use(tensors: Iterable[StoredTensor]) -> int:
    """The bytes that some tensor has, each counted once: in a pickle a tensor can be a part of another's storage."""
    total, file, reached = 0, "", 0
    for tensor in sorted(tensors, key=lambda tensor: (tensor.file, tensor.offset)):
        if tensor.file != file:
            file, reached = tensor.file, 0
        end = tensor.offset + tensor.nbytes
        total += max(0, end - max(reached, tensor.offset))
        reached = max(reached, end)
    return total


def _no_model(files: FileSet, candidates: list[str]) -> NoCheckpointError:
    if candidates:
        return NoCheckpointError(
            f"{files.location}: several files could be the model ({_some(candidates)}), expected model.safetensors",
            help="name one of the files instead of the directory",
        )
    seen = _some(sorted(files.sizes())) or "no files"
    return NoCheckpointError(
        f"{files.location}: no model here; expected model.safetensors, pytorch_model.bin or an index, found {seen}",
        help="give the directory that holds config.json and the weights",
    )


def _some(names: Sequence[str], limit: int = 3) -> str:
    return listed([shown(name) for name in names], limit)
