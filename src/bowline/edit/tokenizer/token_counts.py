"""Counts the tokens of a corpus: text files, each a document, split by the `tokenizers` library.

A file of more than `LONGEST_DOCUMENT` bytes is read as several documents, cut after line ends, so that memory stays
bounded. The check of a pruned tokenizer cuts in the same places.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from bowline.auditing.progress import Progress
from bowline.edit.tokenizer.library import load_checked
from bowline.edit.tokenizer.stored_tokenizer import Kind, StoredTokenizer
from bowline.errors import UsageError

if TYPE_CHECKING:
    import tokenizers

__all__ = ["CorpusCount", "Document", "batches", "count_tokens"]

LONGEST_DOCUMENT = 2 << 20
"""Bytes of text that are split at once; the library needs about a hundred times as much memory."""
BATCH_BYTES = 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusCount:
    """How often a corpus uses each token."""

    counts: npt.NDArray[np.int64]
    """Occurrences (V,) by id."""
    files: int
    documents: int
    tried: frozenset[int]
    """Ids of WordPiece tokens that match the beginning of a word whose rest does not match: the word is unknown as a
    whole, but without these tokens it might not be."""

    @property
    def tokens(self) -> int:
        """The number of tokens in the corpus."""
        return int(self.counts.sum())

    @property
    def used(self) -> npt.NDArray[np.int64]:
        """The ids that occur, ascending."""
        return np.flatnonzero(self.counts)

    def covered(self, kept: npt.NDArray[np.int64]) -> float:
        """The share of the corpus' tokens whose ids are among `kept`."""
        inside = kept[kept < len(self.counts)]
        return float(self.counts[inside].sum() / self.tokens) if self.tokens else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A text of the corpus, its file, and the byte of the file at which it begins."""

    text: str
    path: Path
    start: int
    nbytes: int

    @property
    def place(self) -> str:
        """The file, with the byte where the document begins if that is not the first."""
        return f"{self.path}, from byte {self.start}" if self.start else f"{self.path}"


def count_tokens(tokenizer: StoredTokenizer, paths: Sequence[Path], progress: Progress | None = None) -> CorpusCount:
    """Split each file with the real tokenizer and count its tokens; special tokens that frame a text do not count.

    Arguments:
        tokenizer: what `read_tokenizer` returned.
        paths: text files, UTF-8.
        progress: receives the bytes of the files.

    Raises:
        UsageError: a file is missing, empty or not UTF-8, or the `tokenizers` library is not installed.
        FormatError: the library refuses the tokenizer.
    """
    backend = load_checked(tokenizer)
    counts = np.zeros(tokenizer.size, np.int64)
    words = _UnknownWords(tokenizer, backend)
    documents = 0
    for batch in batches(paths, progress):
        encodings = backend.encode_batch_fast([document.text for document in batch], add_special_tokens=False)
        for document, encoding in zip(batch, encodings, strict=True):
            ids = np.asarray(encoding.ids, np.int64)
            counts += np.bincount(ids, minlength=len(counts))
            words.look_at(document.text, ids)
        documents += len(batch)
    return CorpusCount(counts=counts, files=len(paths), documents=documents, tried=frozenset(words.tried))


def batches(paths: Sequence[Path], progress: Progress | None = None) -> Iterator[list[Document]]:
    """The documents of the files, several at a time.

    Raises:
        UsageError: a file is missing, empty or not UTF-8, or there are none.
    """
    if not paths:
        raise UsageError("the corpus has no files", help="name at least one text file")
    sizes = [_size(path) for path in paths]
    if progress is not None:
        progress.expect(sum(sizes))
    batch: list[Document] = []
    waiting = 0
    for path in paths:
        for document in _documents(path):
            batch.append(document)
            waiting += document.nbytes
            if waiting >= BATCH_BYTES:
                yield batch
                if progress is not None:
                    progress.advance(waiting)
                batch, waiting = [], 0
    if batch:
        yield batch
        if progress is not None:
            progress.advance(waiting)


def _size(path: Path) -> int:
    try:
        size = path.stat().st_size if path.is_file() else None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", help="name a text file", argument="corpus") from None
    if size is None:
        seen = "a directory" if path.is_dir() else "no such file"
        raise UsageError(f"{path}: {seen}, expected a text file", help="name its files", argument="corpus")
    if size == 0:
        raise UsageError(f"{path}: the file is empty", help="leave it out of the corpus", argument="corpus")
    return size


def _documents(path: Path) -> Iterator[Document]:
    with path.open("rb") as file:
        start, rest = 0, b""
        while data := rest + file.read(LONGEST_DOCUMENT - len(rest)):
            cut = len(data) if len(data) < LONGEST_DOCUMENT else _cut(data)
            try:
                text = data[:cut].decode("utf-8")
            except UnicodeDecodeError as error:
                raise UsageError(
                    f"{path}: byte {data[error.start]:#04x} at {start + error.start} is not UTF-8",
                    help="convert the file to UTF-8, or leave it out of the corpus",
                    argument="corpus",
                ) from None
            yield Document(text=text, path=path, start=start, nbytes=cut)
            start, rest = start + cut, data[cut:]


def _cut(data: bytes) -> int:
    """Where a full document ends: after its last line, or else before its last character."""
    lines = data.rfind(b"\n") + 1
    if lines > len(data) // 2:
        return lines
    cut = len(data) - 1
    while cut > len(data) - 4 and data[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut


class _UnknownWords:
    """Collects the WordPiece tokens that are tried on a word before a part of it turns out to be unknown."""

    def __init__(self, tokenizer: StoredTokenizer, backend: tokenizers.Tokenizer) -> None:
        self.tried: set[int] = set()
        self.seen: set[str] = set()
        self.ids, self.prefix = tokenizer.ids, tokenizer.prefix
        self.unknown = self.ids.get(tokenizer.model.get("unk_token") or "")
        self.concerned = tokenizer.kind is Kind.WORDPIECE and self.unknown is not None
        self.longest = max(map(len, self.ids), default=0)
        self.normalizer, self.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
        texts = tokenizer.texts
        added = sorted((texts[number] for number in tokenizer.added), key=len, reverse=True)
        self.between = re.compile("|".join(map(re.escape, added))) if added else None

    def look_at(self, text: str, ids: npt.NDArray[np.int64]) -> None:
        if not self.concerned or not (ids == self.unknown).any():
            return
        for part in self.between.split(text) if self.between else [text]:
            normal = self.normalizer.normalize_str(part) if self.normalizer else part
            words = self.pre_tokenizer.pre_tokenize_str(normal) if self.pre_tokenizer else [(normal, (0, 0))]
            for word in {word for word, _ in words} - self.seen:
                self.seen.add(word)
                self._try(word)

    def _try(self, word: str) -> None:
        start, matched = 0, []
        while start < len(word):
            prefix = self.prefix if start else ""
            for stop in range(min(len(word), start + self.longest), start, -1):
                found = self.ids.get(prefix + word[start:stop])
                if found is not None:
                    matched.append(found)
                    start = stop
                    break
            else:
                self.tried.update(matched)
                return
