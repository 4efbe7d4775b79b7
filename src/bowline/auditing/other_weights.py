"""Compares the vocabulary of a model in safetensors with the same model stored beside it in other weight files.

These are `pytorch_model.bin`, which transformers wrote before safetensors, and the original files of Llama and Mistral,
`consolidated.*`, with names of their own. A pickle is read by an allowlist and never executed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bowline.auditing.progress import Progress
from bowline.auditing.stated_declaration import declaration_of
from bowline.checkpoint.checkpoint import Checkpoint
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.checkpoint.places.local_directory import LocalDirectory
from bowline.errors import CheckpointError
from bowline.families.declaration import Declaration

if TYPE_CHECKING:  # an audit of headers needs no numpy
    from bowline.auditing.base_comparison import TableComparison

__all__ = ["OtherWeights", "compare_other_weights"]

PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
PICKLE_SHARD = re.compile(r"pytorch_model-\d{5}-of-\d{5}\.bin")
CONSOLIDATED = re.compile(r"consolidated(\.\d\d)?\.(pth|safetensors)")
EMBEDDING, HEAD = "embedding", "head"
ORIGINAL_NAMES = {EMBEDDING: "tok_embeddings.weight", HEAD: "output.weight"}
"""The names in the original files of Llama and Mistral."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherWeights:
    """The weights in `file` beside those that were audited, and how the tables of both ends compare.

    `tables` is empty if they were not compared; `reason` says why.
    """

    file: str
    nbytes: int
    """The size of the file, or of all its parts."""
    tables: tuple[TableComparison, ...] = ()
    reason: str | None = None


def compare_other_weights(
    checkpoint: Checkpoint, declaration: Declaration, progress: Progress, *, values: bool = True
) -> tuple[OtherWeights, ...]:
    """The other weights in the directory of a model in safetensors; none for a single file, or for other places.

    On the Hub nothing is compared: it would read every table a second time over the network.
    """
    files = checkpoint.files
    if not isinstance(files, LocalDirectory) or checkpoint.location != files.location:
        return ()
    if not checkpoint.weight_files or not all(file.endswith(".safetensors") for file in checkpoint.weight_files):
        return ()
    sizes = files.sizes()
    sharded = PICKLE_INDEX in sizes and any(PICKLE_SHARD.fullmatch(name) for name in sizes)
    found = [PICKLE] if PICKLE in sizes else [PICKLE_INDEX] if sharded else []
    original = sorted(name for name in sizes if CONSOLIDATED.fullmatch(name) and name not in checkpoint.weight_files)
    compared = [_compare(checkpoint, declaration, name, progress, values=values) for name in found]
    for kind in (".pth", ".safetensors"):
        parts = [name for name in original if name.endswith(kind)]
        if len(parts) == 1:
            compared.append(_compare(checkpoint, declaration, parts[0], progress, values=values))
        elif parts:
            nbytes = sum(sizes[name] for name in parts)
            reason = f"it is one of {len(parts)} parts for tensor parallelism"
            compared.append(OtherWeights(file=parts[0], nbytes=nbytes, reason=reason))
    return tuple(compared)


def _compare(
    checkpoint: Checkpoint, declaration: Declaration, name: str, progress: Progress, *, values: bool
) -> OtherWeights:
    sizes = checkpoint.files.sizes()
    if not values:
        return OtherWeights(file=name, nbytes=sizes[name], reason="no values were read")
    from bowline.auditing.base_comparison import compare_ends, stored_ends

    try:
        other = Checkpoint(checkpoint.files, only=name)  # the files of a directory need no closing, only its sources
        with other:
            nbytes = sum(sizes.get(file, 0) for file in other.weight_files)
            theirs = _original_ends(other, declaration) or stored_ends(other, declaration_of(other))
            ours = stored_ends(checkpoint, declaration)
            tables = compare_ends(checkpoint, ours, other, theirs, progress)
    except CheckpointError as error:
        reason = error.message.removeprefix(f"{checkpoint.location}: ")
        return OtherWeights(file=name, nbytes=sizes[name], reason=reason)
    return OtherWeights(
        file=name,
        nbytes=nbytes,
        tables=tables,
        reason=None if tables else "it holds neither end by a known name",
    )


def _original_ends(other: Checkpoint, declaration: Declaration) -> Mapping[str, StoredTensor]:
    """The ends in a file with the original names. A tied model that stores no head has one table for both.

    Empty for a file with other names.
    """
    found = {end: other.tensors[name] for end, name in ORIGINAL_NAMES.items() if name in other.tensors}
    tie = declaration.find(declaration.head or "")
    if EMBEDDING in found and HEAD not in found and tie is not None and tie.flag.value:
        found[HEAD] = found[EMBEDDING]
    return found
