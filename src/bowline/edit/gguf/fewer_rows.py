"""Fewer tokens in a GGUF file: those that a text uses or a person lists (`prune`), or the first ones (`resize`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from bowline.checkpoint.formats.gguf.value_bytes import array_items
from bowline.checkpoint.formats.strict_json import shown
from bowline.checkpoint.places.file_set import FileSet
from bowline.edit.draft import Check
from bowline.edit.gguf.gguf_draft import GGUFDraft
from bowline.edit.gguf.gguf_tokenizer import GGUFTokenizer, gguf_tokenizer, tokenizer_beside
from bowline.edit.gguf.gguf_vocabulary import MERGES, UNUSED, GGUFVocabulary, read_vocabulary, texts_of, with_tokens
from bowline.edit.steps.prune_step import PruneStep
from bowline.edit.steps.resize_step import ResizeStep
from bowline.edit.tokenizer import (
    CorpusCount,
    Reason,
    StoredTokenizer,
    TokenSelection,
    by_scores,
    check_split,
    count_tokens,
    keep_file,
    rewritten_files,
    select_tokens,
    token_map,
)
from bowline.errors import CheckpointError, UsageError
from bowline.wording import listed

__all__ = ["pruned_file", "resized_file"]

TOKENIZER = "tokenizer.json"
OTHER_IDS = (TOKENIZER, "config.json", "generation_config.json")
"""Files beside a GGUF file that name tokens by id, and that llama.cpp does not read."""


def pruned_file(draft: GGUFDraft, step: PruneStep) -> GGUFDraft:
    """The draft with the tokens that the step keeps, and what they need.

    Raises:
        UsageError: nothing says what to keep, the corpus cannot be counted, or the tokenizer cannot be pruned.
        FormatError: a key of the tokenizer is malformed.
        TieError: the tensors with a row for each token cannot be told from others.
    """
    vocabulary = read_vocabulary(draft)
    tokenizer = gguf_tokenizer(draft, vocabulary)
    stored = tokenizer.stored
    beside = tokenizer_beside(draft.source, tokenizer, vocabulary) if step.corpus else None
    counted = count_tokens(beside, step.corpus) if beside is not None else None
    selection = select_tokens(
        stored,
        corpus=counted,
        listed=keep_file(stored, step.keep_tokens) if step.keep_tokens is not None else (),
        pattern=step.pattern,
        named=() if beside is None else (*beside.added, *beside.named),
    )
    selection = _with_merge_paths(selection, tokenizer)
    merges = selection.merges if stored.kind.merges and tokenizer.scores is None else None
    edited = with_tokens(draft, vocabulary, selection.kept, merges)
    if beside is not None:
        texts = rewritten_files(draft.source.files, beside, selection).files
        check = _check(beside, texts[TOKENIZER] or b"", selection, step)
        edited = replace(edited, texts={**edited.texts, **texts}, checks=(*edited.checks, check))
    notes = _report(draft, selection, counted, vocabulary, rewritten=beside is not None)
    return replace(edited, token_map=token_map(selection)).with_notes(*notes)


def resized_file(draft: GGUFDraft, step: ResizeStep) -> GGUFDraft:
    """The draft with the first rows alone: those that go belong to padding, or the file has no tokens.

    Raises:
        UsageError: more rows are asked for, or a token that is used would go.
        TieError: the tensors with a row for each token cannot be told from others.
    """
    if step.add_tokens:
        raise UsageError(
            "tokens cannot be added to a GGUF file", help="add them to the checkpoint, and convert again", argument="to"
        )
    vocabulary = read_vocabulary(draft)
    wanted, multiple = step.to or vocabulary.size, step.pad_to_multiple_of or 1
    size = -(-wanted // multiple) * multiple
    if size == vocabulary.size:
        return draft.with_notes(f"the vocabulary has {size} rows")
    if size > vocabulary.size:
        raise UsageError(
            f"{size} rows were asked for, and the file has {vocabulary.size}: new rows would have to be quantised",
            help="resize the checkpoint that it was converted from, and convert again",
            argument="to",
        )
    _keep_used(draft, vocabulary, size)
    return with_tokens(draft, vocabulary, np.arange(size, dtype=np.int64))


def _keep_used(draft: GGUFDraft, vocabulary: GGUFVocabulary, size: int) -> None:
    """Raise if one of the tokens from `size` on is used."""
    way_out = "keep more rows, or prune: it gives the tokens that stay new ids"
    named = {number: key for number, key in vocabulary.named.items() if number >= size}
    if named or size < vocabulary.fixed:
        number, key = next(iter(named.items()), (vocabulary.fixed - 1, "llama.cpp's default"))
        raise UsageError(f"{key} is token {number}, which would be dropped", help=way_out, argument="to")
    if not vocabulary.tokens:
        return
    texts = texts_of(draft, vocabulary)
    used = next((number for number in range(size, len(texts)) if vocabulary.types[number] != UNUSED), None)
    if used is not None:
        raise UsageError(
            f"to={size}: token {used} is {shown(texts[used])}, which the tokenizer uses", help=way_out, argument="to"
        )
    gone = frozenset(texts[size:])
    for merge in array_items(draft.value(MERGES) or b"\x09\0\0\0\x08\0\0\0" + bytes(8))[1]:
        left, _, right = merge.decode("utf-8", "replace").partition(" ")
        if gone & {left, right, left + right}:
            raise UsageError(f"the merge {shown(f'{left} {right}')} uses a token that would go", help=way_out)


def _with_merge_paths(selection: TokenSelection, tokenizer: GGUFTokenizer) -> TokenSelection:
    """The selection with the tokens from which the others merge by score, where they do."""
    if tokenizer.scores is None:
        return selection
    added = tokenizer.stored.added
    normal = [number for number in selection.kept.tolist() if number not in added]
    reasons = dict(zip(selection.kept.tolist(), selection.reasons, strict=True))
    for number in sorted(by_scores(tokenizer.stored.ids, tokenizer.scores, normal)):
        reasons.setdefault(number, Reason.MERGE_PATH)
    kept: npt.NDArray[np.int64] = np.array(sorted(reasons), np.int64)
    remap = np.full(len(selection.remap), -1, np.int64)
    remap[kept] = np.arange(len(kept))
    chosen = tuple(reasons[number] for number in kept.tolist())
    return TokenSelection(kept=kept, reasons=chosen, remap=remap, merges=selection.merges)


def _check(beside: StoredTokenizer, pruned: bytes, selection: TokenSelection, step: PruneStep) -> Check:
    def splits_alike(files: FileSet) -> str:
        found = check_split(beside, pruned, selection, step.corpus)
        if found.difference is not None:
            raise CheckpointError(
                f"the pruned tokenizer does not split the corpus as before: {found.difference}",
                help="keep the token that is missing with --keep-tokens, and please report this",
            )
        return (
            f"the tokens and merges that stay split {found.documents:,} documents into the same {found.tokens:,} "
            f"tokens, by their new ids (with the pre-tokenizer of {TOKENIZER})"
        )

    return splits_alike


def _report(
    draft: GGUFDraft,
    selection: TokenSelection,
    counted: CorpusCount | None,
    vocabulary: GGUFVocabulary,
    *,
    rewritten: bool,
) -> Iterator[str]:
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in selection.counts.items())
    yield f"{len(selection.kept):,} of {vocabulary.size:,} rows stay: {reasons}"
    if counted is not None:
        share = counted.covered(selection.kept)
        yield f"the corpus has {counted.tokens:,} tokens in {counted.documents:,} documents; {share:.2%} of them stay"
    stale = [name for name in OTHER_IDS if draft.source.files.has(name) and not (rewritten and name == TOKENIZER)]
    if stale:
        yield f"{listed(stale, 3)} beside the file: kept as it was, with the old ids, if it names any"
