"""A smaller vocabulary, on disk: the tokens that a text uses, or that a person lists, and what they need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from bowline.checkpoint.places.file_set import FileSet
from bowline.edit.draft import Check, Draft, DraftFiles
from bowline.edit.row_selection import RowSelection, named_ids, vocabulary_of, with_rows
from bowline.edit.tokenizer import (
    CorpusCount,
    StoredTokenizer,
    TokenSelection,
    check_prunable,
    check_split,
    count_tokens,
    keep_file,
    read_tokenizer,
    rewritten_files,
    select_tokens,
    token_map,
)
from bowline.errors import CheckpointError, UsageError
from bowline.families.stored_vocabulary import StoredVocabulary
from bowline.wording import listed

__all__ = ["PruneStep"]

TOKENIZER, TOKEN_MAP = "tokenizer.json", "token_map.json"
WAY_OUT = "list the token in a file for --keep-tokens"


@dataclass(frozen=True, slots=True)
class PruneStep:
    """Keep the tokens that a corpus uses, that a file lists, or whose text a regular expression finds.

    All special and added tokens stay, those that configs name, what spells any text (bytes or characters), and every
    token on a merge path to another.
    """

    corpus: tuple[Path, ...] = ()
    keep_tokens: Path | None = None
    pattern: str | None = None
    verb: ClassVar[str] = "prune"

    def __str__(self) -> str:
        corpus = f" --corpus {listed([str(path) for path in self.corpus], 2)}" if self.corpus else ""
        tokens = f" --keep-tokens {self.keep_tokens}" if self.keep_tokens is not None else ""
        return f"prune{corpus}{tokens}" + (f" --keep-scripts {self.pattern}" if self.pattern is not None else "")

    def apply(self, draft: Draft) -> Draft:
        """The draft with fewer tokens in its tokenizer, its tensors and its configs.

        Raises:
            UsageError: nothing says what to keep, a file is not text, or the tokenizer cannot be pruned faithfully.
            FormatError: a file of the tokenizer is malformed, or holds another vocabulary than `tokenizer.json`.
            TieError: the vocabulary's axes cannot be told from others, or a table is quantised.
        """
        vocabulary = vocabulary_of(draft)
        files = DraftFiles(draft)
        tokenizer = read_tokenizer(files)
        check_prunable(files, tokenizer)
        if tokenizer.size > vocabulary.size:
            raise UsageError(
                f"the tokenizer has ids up to {tokenizer.size - 1}, but the table has only {vocabulary.size} rows",
                help="`bowline audit` says which tokens have no row",
            )
        counted = count_tokens(tokenizer, self.corpus) if self.corpus else None
        selection = select_tokens(
            tokenizer,
            corpus=counted,
            listed=keep_file(tokenizer, self.keep_tokens) if self.keep_tokens is not None else (),
            pattern=self.pattern,
            named=(token for token in named_ids(draft, vocabulary.levels) if token < vocabulary.size),
        )
        rows = RowSelection(vocabulary.size, len(selection.kept), selection.kept)
        edited = with_rows(draft, vocabulary, rows, "mean", WAY_OUT)
        changed = rewritten_files(files, tokenizer, selection)
        edited = edited.with_texts({**changed.files, TOKEN_MAP: token_map(selection)})
        notes = (*_report(tokenizer, selection, counted, vocabulary), *changed.notes)
        check = self._check(tokenizer, selection)
        return replace(edited.with_notes(*notes), checks=(*edited.checks, check))

    def _check(self, tokenizer: StoredTokenizer, selection: TokenSelection) -> Check:
        def splits_alike(files: FileSet) -> str:
            found = check_split(tokenizer, files.read(TOKENIZER), selection, self.corpus)
            if found.difference is not None:
                raise CheckpointError(
                    f"the pruned tokenizer does not split the corpus as before: {found.difference}",
                    help="keep the token that is missing with --keep-tokens, and please report this",
                )
            if not self.corpus:
                return "the pruned tokenizer has each token under its new id"
            return (
                f"the pruned tokenizer splits {found.documents:,} documents into the same {found.tokens:,} tokens, by "
                "their new ids"
            )

        return splits_alike


def _report(
    tokenizer: StoredTokenizer, selection: TokenSelection, counted: CorpusCount | None, vocabulary: StoredVocabulary
) -> Iterator[str]:
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in selection.counts.items())
    yield f"{len(selection.kept):,} of {vocabulary.size:,} rows stay: {reasons}"
    if counted is not None:
        share = counted.covered(selection.kept)
        yield f"the corpus has {counted.tokens:,} tokens in {counted.documents:,} documents; {share:.2%} of them stay"
    unused = vocabulary.size - tokenizer.size
    if unused > 0:
        yield f"{unused:,} rows beyond the tokenizer's ids go, unless a config names them"
