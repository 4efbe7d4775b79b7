"""Packed tokens: the documents as two rows of token ids on the disk, one for training and one held out.

    DIR/train.bin       ids, each document followed by the separator, uint16 or uint32 in this machine's byte order
    DIR/held_out.bin    the same for the held-out documents, which are whole and not in train.bin
    DIR/packed.json     a description of both, written last

A directory whose `packed.json` has the same fingerprint is used as it is. A new directory gets its name only when it is
complete, so that a killed process leaves the old directory or none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bowline.checkpoint.durable.publication import publishing
from bowline.errors import UsageError
from bowline.train.text.corpus import Corpus, CorpusSurvey
from bowline.train.text.tokenizer_training import TextTokenizer

__all__ = ["Packed", "held_out_documents", "open_packed", "pack", "training_documents"]

VERSION = 1
"""The version of the format. Rows of another version are made anew."""
ROWS = ("train", "held_out")
AT_ONCE = 256
"""The number of documents that are encoded together."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Packed:
    """Two rows of ids, memory-mapped, so that only the parts in use are read.

    `documents` and `held_out_documents` are the numbers of documents in them.
    """

    train: npt.NDArray[Any]
    held_out: npt.NDArray[Any]
    documents: int
    held_out_documents: int
    fingerprint: str

    def __str__(self) -> str:
        return (
            f"{len(self.train):,} tokens of {self.documents:,} documents to train on, "
            f"{len(self.held_out):,} of {self.held_out_documents:,} held out"
        )

    def unigram(self, vocab_size: int, smoothing: float = 1.0) -> npt.NDArray[np.float64]:
        """Return the smoothed frequency of each token in the training text, (V,): (count + smoothing) / sum.

        With its logarithm as the head's bias, a model that uses no context predicts these frequencies.
        """
        counts: npt.NDArray[np.float64] = np.full(vocab_size, smoothing)
        for start in range(0, len(self.train), 2**24):
            counts += np.bincount(self.train[start : start + 2**24], minlength=vocab_size)
        shares: npt.NDArray[np.float64] = counts / counts.sum()
        return shares


def held_out_documents(survey: CorpusSurvey, share: float) -> frozenset[int]:
    """Choose the held-out documents, by number: at most `share` of the text, whatever the order of the files.

    Documents are taken in the order of their hashes, as far as they fit; equal documents stay together. If none fits,
    the shortest is taken.

    Raises:
        UsageError: a share that is not between 0 and 1, or fewer than two different documents.
    """
    if not isinstance(share, (int, float)) or not 0 < share < 1:
        raise UsageError(f"share={share!r:.60}: expected a number above 0 and below 1", argument="share")
    alike: dict[str, list[int]] = {}
    for at, one in enumerate(survey.hashes):
        alike.setdefault(one, []).append(at)
    if len(alike) < 2:
        raise UsageError(
            f"the text has {survey.characters:,} characters but only one distinct document, so nothing can be held out",
            help="add more text; a document is a file, or a part of a file that ends at a blank line",
        )
    left = share * survey.characters
    taken: set[int] = set()
    for one in sorted(alike):
        size = sum(survey.sizes[at] for at in alike[one])
        if size <= left:
            taken.update(alike[one])
            left -= size
    if not taken:
        shortest = min(alike.values(), key=lambda group: sum(survey.sizes[at] for at in group))
        taken.update(shortest)
    return frozenset(taken)


def training_documents(corpus: Corpus, held_out: frozenset[int]) -> Iterator[str]:
    """Return the documents that are not held out, on which a tokenizer can be trained."""
    return (document for at, document in enumerate(corpus) if at not in held_out)


def pack(
    corpus: Corpus,
    tokenizer: TextTokenizer,
    directory: Path,
    *,
    share: float = 0.05,
    progress: Callable[[int], object] | None = None,
) -> Packed:
    """Open the packed tokens of a corpus in `directory`, or make them there if they are missing or differ.

    Args:
        corpus: the text.
        tokenizer: the tokenizer that makes the ids.
        directory: a new directory, or one that an earlier `pack` made.
        share: the share of the text to hold out.
        progress: called with the number of documents encoded since the last call.

    Raises:
        UsageError: too little text for the split, or a directory that holds something else.
        CheckpointError: the directory cannot be written.
    """
    survey = corpus.survey
    held_out = held_out_documents(survey, share)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())) and _stated(directory) is None:
        raise UsageError(
            f"{directory}: expected packed tokens or an empty directory, got other files", help="give another directory"
        )
    of_tokenizer = hashlib.blake2b(tokenizer.backend.to_str().encode(), digest_size=16).hexdigest()
    content = {"version": VERSION, "text": survey.fingerprint, "tokenizer": of_tokenizer, "held_out_share": share}
    content["separator"] = tokenizer.separator
    fingerprint = hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()
    if (_stated(directory) or {}).get("fingerprint") == fingerprint:
        found = open_packed(directory)
        if found is not None:
            return found
    dtype = np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)
    with publishing(directory, replaces=lambda name: True) as stage:
        counts = _write(corpus, tokenizer, held_out, stage, dtype, progress)
        content |= {"fingerprint": fingerprint, "dtype": dtype.name, **counts}
        (stage / "packed.json").write_text(json.dumps(content, indent=2) + "\n")
    made = open_packed(directory)
    if made is None:
        raise UsageError(
            f"{directory}: its files changed while they were written", help="check whether another run writes there"
        )
    return made


def open_packed(directory: Path) -> Packed | None:
    """Open the packed tokens in `directory`, or return `None` if they are not complete."""
    content = _stated(directory)
    if content is None:
        return None
    rows = {}
    for name in ROWS:
        path, count, stated = directory / f"{name}.bin", content.get(name), content.get("dtype", "uint16")
        if stated not in ("uint16", "uint32"):
            return None
        dtype = np.dtype(stated)
        if not path.is_file() or not isinstance(count, int) or path.stat().st_size != count * dtype.itemsize:
            return None
        rows[name] = np.memmap(path, dtype=dtype, mode="r") if count else np.empty(0, dtype)
    return Packed(
        train=rows["train"],
        held_out=rows["held_out"],
        documents=content["documents"] - content["held_out_documents"],
        held_out_documents=content["held_out_documents"],
        fingerprint=content["fingerprint"],
    )


def _write(
    corpus: Corpus,
    tokenizer: TextTokenizer,
    held_out: frozenset[int],
    stage: Path,
    dtype: np.dtype[Any],
    progress: Callable[[int], object] | None,
) -> dict[str, int]:
    """Write both rows into `stage`, a few documents at a time; returns the numbers of ids and documents."""
    counts = dict.fromkeys((*ROWS, "documents", "held_out_documents"), 0)
    with (stage / "train.bin").open("wb") as train, (stage / "held_out.bin").open("wb") as held:
        for first, texts in _batches(corpus):
            for at, ids in enumerate(tokenizer.encode(texts), first):
                row = np.array([*ids, tokenizer.separator], dtype)
                (held if at in held_out else train).write(row.data)
                counts["held_out" if at in held_out else "train"] += len(row)
                counts["held_out_documents"] += at in held_out
            counts["documents"] += len(texts)
            if progress is not None:
                progress(len(texts))
    return counts


def _batches(corpus: Corpus) -> Iterator[tuple[int, list[str]]]:
    texts: list[str] = []
    first = 0
    for document in corpus:
        texts.append(document)
        if len(texts) == AT_ONCE:
            yield first, texts
            first, texts = first + len(texts), []
    if texts:
        yield first, texts


def _stated(directory: Path) -> dict[str, Any] | None:
    """Return the content of `packed.json`, or `None` if the file is missing or not Bowline's."""
    try:
        content = json.loads((directory / "packed.json").read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and "fingerprint" in content else None
