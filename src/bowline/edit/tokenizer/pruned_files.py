"""Rewrites the files of a tokenizer for the tokens that stay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bowline.checkpoint.formats.strict_json import shown
from bowline.checkpoint.places.file_set import FileSet
from bowline.edit.tokenizer.id_places import settings_with, tokenizer_with
from bowline.edit.tokenizer.json_style import written_like
from bowline.edit.tokenizer.obstacles import check_prunable
from bowline.edit.tokenizer.selection import TokenSelection
from bowline.edit.tokenizer.stored_tokenizer import (
    ADDED,
    RESAVE,
    SETTINGS,
    TOKENIZER,
    StoredTokenizer,
    read_json_object,
)
from bowline.errors import FormatError, UsageError
from bowline.wording import listed

__all__ = ["PrunedFiles", "rewritten_files"]

VOCABULARY, MERGES, LINES = "vocab.json", "merges.txt", "vocab.txt"
STALE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json")
STALE_ENDINGS = (".tiktoken", ".spm")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedFiles:
    """The new content of each file that changes, `None` for a file that goes, and what a person should know."""

    files: Mapping[str, bytes | None]
    notes: tuple[str, ...]


def rewritten_files(files: FileSet, tokenizer: StoredTokenizer, selection: TokenSelection) -> PrunedFiles:
    """The tokenizer's files with the selected tokens under their new ids.

    These are `tokenizer.json`, `tokenizer_config.json`, `added_tokens.json`, `vocab.json`, `merges.txt` and
    `vocab.txt`, each if it is there and changes; `special_tokens_map.json` holds no ids. Models of SentencePiece and
    tiktoken that lie beside `tokenizer.json` keep their old ids, so they go.

    Raises:
        UsageError: a file uses token ids where they cannot be rewritten.
        FormatError: a file holds another vocabulary than `tokenizer.json`.
    """
    check_prunable(files, tokenizer)
    changed: dict[str, bytes | None] = {TOKENIZER: pruned_tokenizer(tokenizer, selection)}

    def replace(number: int, place: str) -> int:
        new = selection.new_id(number)
        if new < 0:
            raise UsageError(f"{place}: the token id {number} would be dropped", help="keep this token")
        return new

    for name, rewrite in (
        (SETTINGS, lambda content: settings_with(content, replace)),
        (ADDED, lambda content: {text: replace(number, ADDED) for text, number in content.items()}),
        (VOCABULARY, lambda content: _pruned_vocabulary(content, tokenizer, selection)),
    ):
        if files.has(name):
            content = read_json_object(files, name)
            new = rewrite(content)
            if new != content or list(new) != list(content):
                changed[name] = written_like(new, files.read(name))
    if files.has(MERGES):
        changed[MERGES] = _pruned_merges(files.read(MERGES), tokenizer, selection)
    if files.has(LINES):
        changed[LINES] = _pruned_lines(files.read(LINES), tokenizer, selection)
    stale = [name for name in files.sizes() if "/" not in name and (name in STALE or name.endswith(STALE_ENDINGS))]
    changed.update(dict.fromkeys(stale))
    return PrunedFiles(files=changed, notes=tuple(_notes(stale, selection, tokenizer)))


def pruned_tokenizer(tokenizer: StoredTokenizer, selection: TokenSelection) -> bytes:
    """The content of the new `tokenizer.json`."""
    content = tokenizer_with(tokenizer.content, lambda number, place: selection.new_id(number))
    model = dict(tokenizer.model)
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):
        model["vocab"] = [vocabulary[old] for old in selection.kept.tolist() if old < len(vocabulary)]
    else:
        model["vocab"] = _renumbered(vocabulary, selection)
    if model.get("unk_id") is not None:
        model["unk_id"] = selection.new_id(model["unk_id"])
    if tokenizer.kind.merges:
        merges = model["merges"]
        model["merges"] = [merges[rank] for rank in selection.merges.tolist()]
    content["model"] = model
    if content.get("added_tokens") is not None:
        content["added_tokens"] = [token | {"id": selection.new_id(token["id"])} for token in content["added_tokens"]]
    return written_like(content, tokenizer.data)


def _renumbered(vocabulary: Mapping[str, int], selection: TokenSelection) -> dict[str, int]:
    remap = selection.remap.tolist()
    return {text: remap[old] for text, old in vocabulary.items() if remap[old] >= 0}


def _pruned_vocabulary(
    content: Mapping[str, Any], tokenizer: StoredTokenizer, selection: TokenSelection
) -> dict[str, int]:
    for text, number in content.items():
        if tokenizer.ids.get(text) != number:
            raise _differs(VOCABULARY, text, number, tokenizer)
    return _renumbered(content, selection)


def _pruned_merges(data: bytes, tokenizer: StoredTokenizer, selection: TokenSelection) -> bytes:
    """The lines of `merges.txt` whose merges stay; its first line can be a version."""
    known = set(tokenizer.merges)
    kept = {tokenizer.merges[rank] for rank in selection.merges.tolist()}
    lines: list[str] = []
    for number, line in enumerate(_text(data, MERGES).split("\n")):
        left, _, right = line.rstrip("\r").partition(" ")
        if left == "" or (number == 0 and line.startswith("#version")):
            lines.append(line)
        elif (left, right) not in known:
            raise FormatError(f"{MERGES}: line {number + 1}, {shown(line)}, is not a merge of {TOKENIZER}", help=RESAVE)
        elif (left, right) in kept:
            lines.append(line)
    return "\n".join(lines).encode("utf-8")


def _pruned_lines(data: bytes, tokenizer: StoredTokenizer, selection: TokenSelection) -> bytes:
    """The lines of `vocab.txt`, whose numbers are the ids, with the tokens that stay."""
    text = _text(data, LINES)
    lines = text.removesuffix("\n").split("\n")
    last = {line.removesuffix("\r"): number for number, line in enumerate(lines)}  # of a token that occurs twice
    for line, number in last.items():
        if tokenizer.ids.get(line) != number:
            raise _differs(LINES, line, number, tokenizer)
    kept = [lines[old] for old in selection.kept.tolist() if old < len(lines)]
    return ("\n".join(kept) + ("\n" if text.endswith("\n") else "")).encode("utf-8")


def _text(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{name}: not UTF-8 at byte {error.start}", help="fetch the file again") from None


def _differs(name: str, text: str, number: Any, tokenizer: StoredTokenizer) -> FormatError:
    theirs = tokenizer.ids.get(text)
    seen = "does not have it" if theirs is None else f"gives it {theirs}"
    return FormatError(f"{name}: the token {shown(text)} has the id {shown(number)}, {TOKENIZER} {seen}", help=RESAVE)


def _notes(stale: list[str], selection: TokenSelection, tokenizer: StoredTokenizer) -> Iterator[str]:
    if stale:
        yield (
            f"{listed(stale, 3)} holds the old ids and is removed; tokenizers that read only this file "
            f"(transformers' slow ones, llama.cpp's converter) no longer load, those that read {TOKENIZER} do"
        )
    bare = [old for old in selection.kept.tolist() if old >= tokenizer.size]
    if bare:
        yield f"the ids {listed([str(old) for old in bare], 5)} are named in a config, but no token has them"
