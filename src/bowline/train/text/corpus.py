"""Plain text as documents: files, the text files of directories, or the standard library's own source."""

from __future__ import annotations

import hashlib
import os
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

from bowline.errors import UsageError

__all__ = ["Corpus", "CorpusSurvey", "find_text"]

STDLIB = "stdlib"
"""The value of `data` for the standard library's source, which every machine has."""
NOT_SOURCE = frozenset(
    {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__"}
)
"""Directories of the standard library that are left out: its tests, which not every Python includes, two with tables
of data written as Python, and installed packages."""
FEW = 20
"""With fewer files than this, files are cut into documents, so that some can be held out."""
PIECE = 8192
"""The least number of characters in a piece of a cut file, except the last piece."""


@dataclass(frozen=True, kw_only=True)
class CorpusSurvey:
    """The counts from one pass over the text. `sizes` and `hashes` are those of the documents, in their order.

    `skipped_bytes` were not UTF-8; `skipped_files` were not text (they contain a NUL byte, as images and archives do).
    """

    sizes: tuple[int, ...]
    hashes: tuple[str, ...]
    files: int
    skipped_bytes: int
    skipped_files: int

    @property
    def documents(self) -> int:
        """The number of documents."""
        return len(self.sizes)

    @property
    def characters(self) -> int:
        """The number of characters in all documents."""
        return sum(self.sizes)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the text of all documents in their order: it differs if the text differs."""
        return hashlib.blake2b("\n".join(self.hashes).encode(), digest_size=16).hexdigest()

    def __str__(self) -> str:
        text = f"{self.documents:,} document{'s' * (self.documents != 1)} of {self.characters:,} characters from "
        text += f"{self.files:,} file{'s' * (self.files != 1)}"
        if self.skipped_bytes:
            text += f"; skipped {self.skipped_bytes:,} bytes that are not valid UTF-8"
        if self.skipped_files:
            are = "file that is" if self.skipped_files == 1 else "files that are"
            text += f"; skipped {self.skipped_files:,} {are} not text"
        return text


class Corpus:
    """Documents of text, read from their files in each iteration, so that the text need not fit into memory.

    A document is a file. With fewer than 20 files it is a piece of a file, cut at a blank line (or at the end of a line
    if the file has no blank lines) after 8192 characters or more. Empty documents are left out.

    Args:
        files: the files, in the order in which they are read.
        strict: refuse bytes that are not UTF-8 and files that are not text; otherwise skip and count them.

    Raises:
        UsageError: a file that cannot be read; if `strict`, a file that is not text; in `survey`, no text at all.
    """

    def __init__(self, files: Sequence[Path], *, strict: bool = False) -> None:
        self.files = tuple(files)
        self.strict = strict

    def __iter__(self) -> Iterator[str]:
        for path in self.files:
            text, _ = self._text(path)
            yield from self._documents(text)

    @cached_property
    def cut(self) -> bool:
        """True if so few files are text that they are cut into pieces."""
        text = (path for path in self.files if self._text(path)[0] is not None)
        return len(self.files) < FEW or len(list(islice(text, FEW))) < FEW

    @cached_property
    def survey(self) -> CorpusSurvey:
        """The counts, from one pass over the files when first used."""
        sizes, hashes = [], []
        skipped_bytes = skipped_files = 0
        for path in self.files:
            text, skipped = self._text(path)
            skipped_files += text is None
            skipped_bytes += skipped
            for document in self._documents(text):
                sizes.append(len(document))
                hashes.append(hashlib.blake2b(document.encode(), digest_size=16).hexdigest())
        if not sizes:
            seen = f"{len(self.files)} files" if len(self.files) != 1 else str(self.files[0])
            raise UsageError(
                f"{seen}: no text, expected text files in UTF-8",
                help=f"--data {STDLIB} trains on the source of Python's standard library, which is always available",
            )
        return CorpusSurvey(
            sizes=tuple(sizes),
            hashes=tuple(hashes),
            files=len(self.files) - skipped_files,
            skipped_bytes=skipped_bytes,
            skipped_files=skipped_files,
        )

    def _text(self, path: Path) -> tuple[str | None, int]:
        """Return the text of a file, `None` if it is not text, and the number of skipped bytes."""
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UsageError(
                f"{path}: cannot be read: {error.strerror or error}", help="make it readable, or leave it out"
            ) from None
        if b"\0" in content:
            if self.strict:
                raise UsageError(
                    f"{path}: is not a text file: byte {content.index(0)} is NUL",
                    help="leave it out, or leave --strict out to skip it; convert UTF-16 to UTF-8 first",
                )
            return None, 0
        skipped = 0
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            if self.strict:
                raise UsageError(
                    f"{path}: byte {error.start} is not valid UTF-8 ({content[error.start]:#04x})",
                    help="convert the file, or leave --strict out to skip and count such bytes",
                ) from None
            text = content.decode(errors="ignore")
            skipped = len(content) - len(text.encode())
        return text.removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}").replace("\r\n", "\n"), skipped

    def _documents(self, text: str | None) -> Iterator[str]:
        if text is None:
            return
        for piece in _pieces(text) if self.cut else [text]:
            if not piece.isspace() and piece:
                yield piece


def find_text(
    data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    strict: bool = False,
    without: Path | None = None,
) -> Corpus:
    """Find the corpus of `data`: "stdlib", files, directories, or several of these.

    A directory stands for every file below it, sorted by path, except hidden ones. "stdlib" is the source text of this
    Python's standard library (`*.py`, sorted), without its tests, the tables of `encodings` and of `pydoc_data`, and
    installed packages; it is the same on every machine with the same Python. Files below `without`, the directory of
    the run itself, are left out.

    Raises:
        UsageError: a path does not exist, or there is no file in it.

    Example:
        >>> corpus = find_text("stdlib")
        >>> corpus.survey.documents > 500, any("def " in document for document in corpus)
        (True, True)
    """
    places = [data] if isinstance(data, (str, os.PathLike)) else list(data)
    files: dict[Path, None] = {}
    for place in places:
        found = _stdlib() if place == STDLIB else _below(Path(place), without)
        files.update(dict.fromkeys(found))
    if not files:
        raise UsageError(
            f"{', '.join(map(str, places)) or 'no data'}: no files, expected text",
            help=f"name files, a directory, or {STDLIB}",
        )
    return Corpus(list(files), strict=strict)


def _below(place: Path, without: Path | None) -> list[Path]:
    try:
        mode = place.stat().st_mode
    except (OSError, ValueError) as error:  # a NUL byte in the path is a ValueError
        why = getattr(error, "strerror", None) or error
        seen = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {why}"
        raise UsageError(f"{place!s:.200}: {seen}", help=f"name files, a directory, or {STDLIB}") from None
    if stat.S_ISREG(mode):
        return [place]
    if not stat.S_ISDIR(mode):
        raise UsageError(f"{place}: is neither a file nor a directory", help=f"name files, a directory, or {STDLIB}")
    found = (path for path in place.rglob("*") if not any(part[0] == "." for part in path.relative_to(place).parts))
    out = None if without is None else _spelled_below(without, place)
    files = (path for path in found if path.is_file() and not (out and path.is_relative_to(out)))
    return sorted(files, key=lambda path: path.relative_to(place).parts)


def _spelled_below(inner: Path, place: Path) -> Path | None:
    """Return `inner` as a path that begins with `place`, or `None` if it does not lie below `place`."""
    real, root = inner.resolve(), place.resolve()
    return place / real.relative_to(root) if real != root and real.is_relative_to(root) else None


def _stdlib() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = (path for path in root.rglob("*.py") if not NOT_SOURCE.intersection(path.relative_to(root).parts))
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def _pieces(text: str) -> Iterator[str]:
    """Yield the text in pieces of `PIECE` characters or more, each up to a blank line, or else to a line's end."""
    stop = "\n\n" if "\n\n" in text else "\n"
    start = 0
    while start < len(text):
        end = text.find(stop, start + PIECE)
        end = len(text) if end < 0 or len(text) - end < PIECE // 2 else end + len(stop)
        yield text[start:end]
        start = end
